"""Train with the model sharded over the ranks: train_showcase.py with runtime.strategy=fsdp.

`torchrun --nproc_per_node=N scripts/train_showcase_fsdp.py --config FILE [flags]`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

from nsa.config.env import translate_torch_logs

if __name__ == "__main__":
    translate_torch_logs()  # before anything imports torch

from nsa.data import end_process
from scripts.train_showcase import main

if __name__ == "__main__":
    end_process(main(["--strategy", "fsdp", *sys.argv[1:]]))
