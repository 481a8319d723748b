"""Train a model from a config: the trainer, under the name that the runbooks use.

`CONFIG=FILE python scripts/train_showcase.py [flags]`; TinyLM can be imported from here.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

from nsa.config.env import translate_torch_logs

if __name__ == "__main__":
    translate_torch_logs()  # before anything imports torch

from nsa.cli.__main__ import run_command
from nsa.cli.train import add_train_flags, train
from nsa.config import StrictParser
from nsa.data import end_process
from nsa.model import TinyLM

__all__ = ["TinyLM", "main"]
CONFIG = "configs/train_showcase.yaml"
"""The config if neither --config nor CONFIG is given."""


def main(arguments: list[str] | None = None) -> int:
    """Train, and return the exit code."""
    parser = StrictParser(prog="train_showcase", description=(__doc__ or "").splitlines()[0])
    add_train_flags(parser)
    args = parser.parse_args(arguments)
    return run_command("train_showcase", lambda: train(args, "train_showcase", CONFIG))


if __name__ == "__main__":
    end_process(main())
