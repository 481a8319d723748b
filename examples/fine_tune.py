"""Fine-tune: train a model, then start a new run from its file at a longer sequence length.

The second run reads rows four times as long. It has its own optimizer, schedule and data; only the
weights come from `model.pt`. Its first loss shows what they know: random weights begin near
ln 256 = 5.55 nats per byte, as the first run does.

    python examples/fine_tune.py [--steps N] [--out-dir DIR]
"""

import argparse
from pathlib import Path

from nsa.config import load_config
from nsa.train import TrainResult, run

parser = argparse.ArgumentParser(description="Fine-tune a model at a longer sequence length.")
parser.add_argument("--steps", type=int, default=80, help="of the first run; the second has half")
parser.add_argument("--out-dir", type=Path, default=Path("artifacts/fine_tune"))
args = parser.parse_args()
args.out_dir.mkdir(parents=True, exist_ok=True)


def train(name: str, steps: int, *settings: str) -> TrainResult:
    """Train the bundled quickstart with these settings; its log goes to a file."""
    config = load_config(
        "quickstart",
        [
            f"train.out_dir={args.out_dir / name}",
            f"train.steps={steps}",
            f"train.warmup_steps={steps // 10}",
            f"train.eval_every={steps}",
            "train.eval_batches=4",
            "runtime.device=cpu",
            *settings,
        ],
    )
    with (args.out_dir / f"{name}.log").open("w") as log:
        # resume="none" starts over where an earlier call has left its files.
        result = run(config, config_path="quickstart", out=log, resume="none")
    metrics, rows = result.metrics, config.train
    print(f"{name}: {metrics.step} steps, {rows.batch_size} rows of {rows.seq_len} bytes: ", end="")
    print(f"loss {metrics.loss_first:.3f} -> {metrics.loss_last:.3f}, ", end="")
    print(f"held out {metrics.val_loss:.3f}")
    return result


base = train("base", args.steps, "train.seq_len=64", "train.batch_size=8")
tuned = train(
    "tuned",
    args.steps // 2,
    f"train.init_from={base.folder / 'model.pt'}",
    "train.seq_len=256",
    "train.batch_size=2",
    "train.lr=1e-3",  # a quarter of quickstart's
    # Rows far longer than those of the first run also want slower positions: model.rope_scale=4.
)
metrics = tuned.metrics
assert metrics.init_sha256 is not None
print(f"tuned began with the weights of {metrics.init_from} (sha256 {metrics.init_sha256[:12]})")
