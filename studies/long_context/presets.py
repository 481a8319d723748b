"""The sizes of the study: `full` for a GPU, `tiny` to rehearse every part on a CPU in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

MODELS = ("nsa", "dense")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A run of the trainer; it starts from the weights of the one before it."""

    seq_len: int
    batch_size: int
    steps: int
    num_keys: int
    """Keys that its needles have, the rarest words first; the hay has none of them."""
    growing: tuple[float, float]
    """Shares of its steps between which documents grow from the shortest to the length of a row."""
    settings: dict[str, object] = field(default_factory=dict)
    """More of the trainer's config, by key."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Everything that decides what is trained and asked."""

    vocab: int
    digits: int
    """Digits of a value; all such numbers are tokens."""
    text_chars: int
    """Characters of text to hide needles in."""
    stages: tuple[Stage, ...]
    pass_mark: float
    """Share of right answers in held-out rows without which no further stage is trained."""
    settings: dict[str, object] = field(default_factory=dict)
    """More of the trainer's config in all stages, by key."""
    lengths: tuple[int, ...]
    depths: int
    """Depths of the grid, from 0 to 1 in equal steps."""
    trials: int
    decode_lengths: tuple[int, ...]
    """Lengths at which the answers are also decoded."""
    decode_trials: int
    batch_tokens: int
    seed: int = 1

    @property
    def num_keys(self) -> int:
        """Keys of the grid: those of the last stage."""
        return self.stages[-1].num_keys

    @property
    def seq_len(self) -> int:
        """Tokens of a row in the last stage: the longest context that was trained."""
        return self.stages[-1].seq_len


def blocks(l: int, d: int, l_sel: int, n_sel: int, w: int) -> dict[str, object]:
    """Sizes of NSA. A stage of shorter rows has smaller ones, so that a row of any stage is more
    than its window and the blocks that a query reads. Before the last stage these are the forced
    ones alone: what lies further back comes through the compressed branch, or not at all."""
    return {"nsa.l": l, "nsa.d": d, "nsa.l_sel": l_sel, "nsa.n_sel": n_sel, "nsa.w": w}


FULL = Preset(
    vocab=8192,
    digits=2,
    text_chars=24_000_000,
    stages=(
        Stage(
            seq_len=64,
            batch_size=512,
            steps=1000,
            num_keys=32,
            growing=(0.0, 0.3),
            settings=blocks(4, 2, 8, 3, 8) | {"train.lr": 4.0e-3},
        ),
        Stage(
            seq_len=256,
            batch_size=128,
            steps=800,
            num_keys=64,
            growing=(0.0, 0.3),
            settings=blocks(8, 4, 16, 3, 32) | {"train.lr": 3.0e-3},
        ),
        Stage(
            seq_len=1024,
            batch_size=32,
            steps=1500,
            num_keys=128,
            growing=(0.0, 0.3),
            settings=blocks(16, 8, 32, 3, 64) | {"train.lr": 3.0e-3},
        ),
        Stage(
            seq_len=4096,
            batch_size=8,
            steps=1500,
            num_keys=256,
            growing=(0.0, 0.3),
            settings=blocks(32, 16, 64, 3, 128) | {"train.lr": 3.0e-3},
        ),
        Stage(
            seq_len=8192,
            batch_size=4,
            steps=2000,
            num_keys=512,
            growing=(0.0, 0.3),
            settings=blocks(32, 16, 64, 16, 512) | {"train.lr": 2.0e-3},
        ),
    ),
    pass_mark=0.3,
    settings={
        "model.dim": 384,
        "model.n_layers": 6,
        "model.n_heads": 8,
        "model.n_kv_groups": 2,
        "model.d_k": 64,
        "model.d_v": 64,
        "model.tie_embeddings": True,
        "model.embed_std": 0.04,
        "model.rope_base": 1.0e6,
        "train.optimizer": "muon",
        "train.warmup_steps": 100,
        "train.log_every": 50,
        "train.eval_every": 500,
        "train.eval_batches": 4,
        "runtime.precision": "bf16",
        "runtime.compile": True,
        "runtime.cuda_graph": True,
    },
    lengths=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
    depths=11,
    trials=8,
    decode_lengths=(8192, 65536),
    decode_trials=1,
    batch_tokens=131072,
)

TINY = Preset(
    vocab=1024,
    digits=2,
    text_chars=400_000,
    stages=(
        Stage(
            seq_len=48,
            batch_size=4,
            steps=3,
            num_keys=32,
            growing=(0.3, 0.7),
            settings=blocks(4, 2, 8, 3, 8),
        ),
        Stage(
            seq_len=96,
            batch_size=4,
            steps=4,
            num_keys=64,
            growing=(0.0, 0.4),
            settings=blocks(8, 4, 8, 4, 16),
        ),
    ),
    pass_mark=0.0,
    settings={
        "model.dim": 32,
        "model.n_layers": 2,
        "model.n_heads": 2,
        "model.n_kv_groups": 1,
        "model.d_k": 16,
        "model.d_v": 16,
        "model.tie_embeddings": True,
        "train.optimizer": "muon",
        "train.lr": 1e-2,
        "train.log_every": 1,
        "train.eval_every": 0,
        "runtime.precision": "fp32",
    },
    lengths=(64, 128),
    depths=3,
    trials=1,
    decode_lengths=(128,),
    decode_trials=1,
    batch_tokens=256,
)

PRESETS = {"full": FULL, "tiny": TINY}
