"""What tests of streams share: documents from memory, and waiting for what another thread does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain, count

from nsa.data.documents import Document, fingerprint_of
from nsa.data.encode import Place


class ListDocuments:
    """Documents from lists, one for each file; it notes how far it was read."""

    def __init__(self, *files: list[str]) -> None:
        self.files, self.num_read = list(files), 0

    def read(self, place: Place) -> Iterator[tuple[Place, Document]]:
        for epoch in count(place.epoch):
            for file, texts in enumerate(self.files):
                for row, text in enumerate(texts):
                    here = Place(epoch, file, row)
                    if here >= place:
                        self.num_read += 1
                        yield here, Document(text, str(here))

    def fingerprint(self) -> str:
        return fingerprint_of(texts="\0".join(chain.from_iterable(self.files)))


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.perf_counter() + timeout_s
    while not condition():
        assert time.perf_counter() < end, "it did not happen in time"
        time.sleep(0.005)
