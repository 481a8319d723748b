"""Documents of a dataset on the Hugging Face Hub, streamed, resumable at any row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

from nsa.config import DataConfig
from nsa.data.documents import KEY, Document, fingerprint_of
from nsa.data.encode import Place
from nsa.data.errors import DataError, Retries, is_transient, need

SPLIT = "train"
PATHS_AT_ONCE = 500
"""Files per metadata request."""


class HubDocuments:
    """The documents in hub order, epoch after epoch; connection errors are retried.

    The commit is fixed when the dataset is opened, so that a push during the run changes nothing.
    """

    def __init__(self, config: DataConfig, say: Callable[[str], None]) -> None:
        self.name = f"{config.hub_dataset} ({config.hub_subset or 'default'})"
        self._config, self._say = config, say
        self._client = need("datasets", f"data.dataset={config.dataset}", extra="stream")
        # Turn off the client's own silent retries: only `Retries` retries, and it logs each one.
        self._client.config.STREAMING_READ_MAX_RETRIES = 1
        self._client.config.STREAMING_READ_RETRY_INTERVAL = 0
        self._client.config.STREAMING_OPEN_MAX_RETRIES = 1
        self._client.config.STREAMING_OPEN_RETRY_INTERVAL = 0
        self._stream, self._files, self._sha256 = self._with_retries(self._open)

    @property
    def num_files(self) -> int:
        """Files per epoch."""
        return len(self._files)

    def fingerprint(self) -> str:
        """sha256 of the names and hashes of all files, in order."""
        return self._sha256

    def read(self, place: Place) -> Iterator[tuple[Place, Document]]:
        """Yield (place, document) from a place on, endlessly."""
        retries = Retries(self.name, self._say)
        empty = place == Place(place.epoch)  # no document seen in this epoch yet
        while True:
            if place.file >= self.num_files:
                if empty:
                    raise DataError(f"{self.name} has no documents; set another data.hub_subset")
                # Next epoch. An epoch without any document would loop forever, hence `empty`.
                place, empty = Place(place.epoch + 1), True
            try:
                for text in self._texts(place):
                    yield place, Document(text, f"{self._files[place.file]} row {place.row}")
                    # After the yield: a retry resumes at the first undelivered row.
                    place, empty = place._replace(row=place.row + 1), False
                    retries.worked()
            except Exception as error:  # noqa: BLE001  the client raises errors of many packages
                self._wait_or_raise(error, retries, f"{self._files[place.file]} row {place.row}")
            else:
                place = Place(place.epoch, place.file + 1)

    def _texts(self, place: Place) -> Iterator[str]:
        """Texts of one file, from a row on."""
        part = self._stream.shard(num_shards=self.num_files, index=place.file)
        parts: Iterable[Any] = [part]
        skip = place.row
        if skip and (sizes := self._row_groups(self._files[place.file])):
            first = 0  # skip whole row groups before the row without downloading them
            while first < len(sizes) and skip >= sizes[first]:
                skip, first = skip - sizes[first], first + 1
            groups = part.reshard()
            assert groups.num_shards == len(sizes), f"{groups.num_shards} groups, not {len(sizes)}"
            wanted = range(first, len(sizes))
            parts = (groups.shard(num_shards=len(sizes), index=number) for number in wanted)
        for example in islice(chain.from_iterable(parts), skip, None):
            text = example.get(KEY)
            if not isinstance(text, str):
                raise DataError(
                    f"{self.name} has a row without a string {KEY!r}; use another dataset"
                )
            yield text

    def _row_groups(self, file: str) -> list[int]:
        """Rows per row group of a Parquet file; empty for other types."""
        if not file.endswith(".parquet"):
            return []
        parquet, hub = need("pyarrow.parquet", file), need("huggingface_hub", file, extra="stream")
        with hub.HfFileSystem().open(file, "rb") as content:
            metadata = parquet.read_metadata(content)
        return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]

    def _open(self) -> tuple[Any, list[str], str]:
        """The client's stream, its files, and a hash of their contents."""
        config = self._config
        builder = self._client.load_dataset_builder(
            config.hub_dataset, name=config.hub_subset or None, revision=config.hub_revision or None
        )
        if hasattr(builder.config, "fragment_scan_options"):  # Parquet
            builder.config.columns = [KEY]
            options = need("pyarrow.dataset", self.name).ParquetFragmentScanOptions
            # Verify page checksums: otherwise a corrupted byte in a text goes unnoticed.
            builder.config.fragment_scan_options = options(page_checksum_verification=True)
        stream = builder.as_streaming_dataset(split=SPLIT)
        files = [str(file) for file in builder.config.data_files[SPLIT]]
        if stream.num_shards != len(files):
            raise DataError(f"{self.name}: {stream.num_shards} shards of {len(files)} files")
        return stream, files, self._describe_files(files)

    def _describe_files(self, files: list[str]) -> str:
        """Hash of file names and content hashes; equal for commits with the same data."""
        hub = need("huggingface_hub", self.name, extra="stream")
        places = [hub.HfFileSystem().resolve_path(file) for file in files]
        found: dict[str, str] = {}
        for start in range(0, len(places), PATHS_AT_ONCE):
            for entry in hub.HfApi().get_paths_info(
                places[start].repo_id,
                [place.path_in_repo for place in places[start : start + PATHS_AT_ONCE]],
                revision=places[start].revision,
                repo_type="dataset",
            ):
                found[entry.path] = entry.lfs.sha256 if entry.lfs else entry.blob_id
        names = [place.path_in_repo for place in places]
        self._say(f"[data] {self.name}: {len(files)} files of commit {places[0].revision}")
        return fingerprint_of(files=" ".join(f"{name}={found.get(name)}" for name in names))

    def _with_retries(self, attempt: Callable[[], Any]) -> Any:
        retries = Retries(self.name, self._say)
        while True:
            try:
                return attempt()
            except Exception as error:  # noqa: BLE001  the client raises errors of many packages
                self._wait_or_raise(error, retries, self.name)

    def _wait_or_raise(self, error: Exception, retries: Retries, where: str) -> None:
        """Sleep before a retry if the error is transient; otherwise raise DataError."""
        if is_transient(error):
            retries.failed(error)
            return
        if isinstance(error, DataError):
            raise DataError(f"{where}: {error}") from None
        text = " ".join(str(error).split())[:500]
        raise DataError(
            f"{where}: cannot be read ({type(error).__name__}: {text}); check data.hub_dataset, "
            "data.hub_subset and data.hub_revision, and whether its files are intact"
        ) from error
