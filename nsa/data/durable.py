"""A file that has its name only when it is complete and on the disk."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType


class DurableFile:
    """Written under a temporary name; when the block ends well it gets its own, else it goes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._file = self._temporary.open("wb")

    def write(self, content: bytes | memoryview) -> None:
        """Append."""
        self._file.write(content)

    def commit(self) -> None:
        """Bring the bytes to the disk, then rename, then bring the new name there, too."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

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
