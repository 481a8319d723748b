"""A file that has its name only when it is complete and on the disk."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from nsa.files import put_in_place
from nsa.leftovers import temporary_name


class DurableFile:
    """Written under a temporary name; when the block ends well it gets its own, else it goes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = temporary_name(path)
        self._file = self._temporary.open("wb")

    def write(self, content: bytes | memoryview) -> None:
        """Append."""
        self._file.write(content)

    def commit(self) -> None:
        """Give the file its name."""
        self._file.close()
        put_in_place(self._temporary, self.path)

    def discard(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> DurableFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.commit()
        else:
            self.discard()
