"""Watch a run folder from outside: `nsa watch` under the name that the runbooks use."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

from nsa.cli.operate import add_watch_flags
from nsa.config import BAD_INPUT, StrictParser
from nsa.operate.watch.watchdog import watch

DEFAULT = Path("artifacts/train_showcase")


def main(arguments: list[str] | None = None) -> int:
    """Watch, and return the exit code."""
    parser = StrictParser(prog="_watchdog", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=DEFAULT, help="run folder (%(default)s)")
    add_watch_flags(parser)
    args = parser.parse_args(arguments)
    try:
        return watch(args.dir, args)
    except ValueError as error:  # bad input, by the convention of this package
        print(f"_watchdog: error: {error}", file=sys.stderr)
        return BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
