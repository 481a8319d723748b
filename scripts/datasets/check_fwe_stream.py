"""Read three batches of FineWeb-Edu from the hub, to see that the stream works from here."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without PYTHONPATH, too

from nsa.config import BAD_INPUT, DataConfig, StrictParser
from nsa.data import Data, SourceLost, end_process, open_data, within
from nsa.train import LoaderOptions
from nsa.train.errors import NO_DATA

SEQ_LEN, BATCH_SIZE, NUM_BATCHES = 128, 2, 3


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each batch, and return the exit code."""
    parser = StrictParser(prog="check_fwe_stream", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--subset", default="", help="for example sample-10BT; default: all")
    parser.add_argument(
        "--loader-timeout", type=float, default=LoaderOptions.timeout_s, metavar="SECONDS"
    )
    flags = parser.parse_args(arguments)
    config = DataConfig(dataset="fineweb_edu", hub_subset=flags.subset)
    try:
        within(flags.loader_timeout, lambda: _read(config), "the first batches")
    except ValueError as error:
        print(f"check_fwe_stream: error: {error}", file=sys.stderr)
        return BAD_INPUT
    except SourceLost as error:
        print(f"check_fwe_stream: error: {error}", file=sys.stderr)
        return NO_DATA
    return 0


def _read(config: DataConfig) -> None:
    data: Data = open_data(config, SEQ_LEN, seed=0, say=partial(print, file=sys.stderr))
    for number in range(NUM_BATCHES):
        batch = data.train.batch(number * BATCH_SIZE, BATCH_SIZE)
        print(f"ok batch[{number}] lens: {[len(row) - 1 for row in batch]}", flush=True)


if __name__ == "__main__":
    end_process(main())
