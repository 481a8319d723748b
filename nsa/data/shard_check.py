"""Holding prepared shards to the hashes of their manifest while a run trains on them.

Opening shards looks at their sizes alone, so a byte that has changed on the disk would be trained
on. A small folder is read whole before the first step; a large one is read by a thread beside the
training, which hears of damage before its next update.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

from nsa.data.errors import DataError
from nsa.data.manifest import Manifest, Shard

SMALL_BYTES = 256 << 20
"""Up to here a run waits: a second or two."""
CHUNK = 1 << 22


class DamagedShard(DataError):
    """The bytes of a shard are not those that were prepared."""


class ShardCheck:
    """Reads every shard of a folder once, here or in the background."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        sizes = [shard.tokens * manifest.token_bytes for shard in manifest.shards]
        self.num_bytes, self.num_read = sum(sizes), 0
        self._problem = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, say: Callable[[str], None]) -> None:
        """Read a small folder now, and raise DamagedShard; a large one from now on."""
        if self._thread is not None:
            return
        size = f"{self.num_bytes / 1e6:,.1f} MB in {len(self._manifest.shards)} shards"
        if self.num_bytes <= SMALL_BYTES:
            self._read()
            self.require_whole()
            say(f"[data] {size} match their sha256")
            return
        say(f"[data] {size} are held to their sha256 in the background")
        self._thread = threading.Thread(target=self._read, name="shard check", daemon=True)
        self._thread.start()

    def require_whole(self) -> None:
        """Raise DamagedShard where damage was found so far; nobody waits."""
        if self._problem:
            raise DamagedShard(
                f"{self._problem}; its bytes have changed since it was prepared: copy it again, or "
                f"prepare the shards again (`nsa data verify {self._folder}` lists all that differ)"
            )

    def settle(self, patience_s: float, say: Callable[[str], None]) -> None:
        """Wait for the end of the reading, and raise as above; say so where it takes longer."""
        if self._thread is not None:
            self._thread.join(patience_s)
        self.require_whole()
        if self._thread is not None and self._thread.is_alive():
            say(
                f"[data] WARNING: the run ends when {self.num_read / 1e6:,.1f} of "
                f"{self.num_bytes / 1e6:,.1f} MB have been held to their sha256; "
                f"`nsa data verify {self._folder}` reads all"
            )

    def close(self) -> None:
        """Stop reading."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _read(self) -> None:
        for shard in self._manifest.shards:
            self._problem = self._problem or self._look_at(shard)
            if self._problem or self._stop.is_set():
                return

    def _look_at(self, shard: Shard) -> str:
        path, digest = self._folder / shard.file, hashlib.sha256()
        try:
            with path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    digest.update(chunk)
                    self.num_read += len(chunk)
                    if self._stop.is_set():
                        return ""
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        found = digest.hexdigest()
        differs = f"{path}: sha256 is {found}, the manifest says {shard.sha256}"
        return "" if found == shard.sha256 else differs
