"""What the training benchmark measures: cells, variants of the step, the model, and the goals."""

from __future__ import annotations

import re
from typing import NamedTuple

from nsa.config import Config, load_config
from nsa.config.load import REPOSITORY

PRODUCTION = REPOSITORY / "configs" / "m7c_125m_2xa100_production.yaml"
VOCABULARY = "data.tokenizer=gpt2"
TINY = (
    *("model.dim=32", "model.n_layers=2", "model.n_heads=4", "model.n_kv_groups=2"),
    *("model.d_k=8", "model.d_v=8", "nsa.l=8", "nsa.d=4", "nsa.l_sel=8", "nsa.n_sel=3", "nsa.w=16"),
    *("data.tokenizer=byte", "runtime.precision=fp32"),
)
"""For a rehearsal on a CPU."""
TINY_CELLS = "64x2,128x1"
NAMES = tuple(
    f"{attention}{how}"
    for attention in ("nsa", "dense")
    for how in ("", "-compiled", "-graph", "-compiled-graph")
)


class Variant(NamedTuple):
    """One way to train: which attention, compiled by torch.compile or not, a CUDA graph or not."""

    name: str

    @property
    def attention(self) -> str:
        return self.name.split("-")[0]

    @property
    def compiled(self) -> bool:
        return "-compiled" in self.name

    @property
    def graph(self) -> bool:
        return self.name.endswith("-graph")


class Cell(NamedTuple):
    """Rows of `length` tokens, `batch` of them in an update."""

    length: int
    batch: int

    def __str__(self) -> str:
        return f"{self.length}x{self.batch}"

    @property
    def tokens(self) -> int:
        return self.length * self.batch


class Goal(NamedTuple):
    """What ours must reach: so many times the best dense variant, or so many tokens/s."""

    ratio: float | None = None
    tokens_per_s: float | None = None

    def __str__(self) -> str:
        if self.ratio is not None:
            return f">= {self.ratio:g}x"
        return f">= {self.tokens_per_s:,.0f}/s"

    def met(self, tokens_per_s: float, ratio: float | None) -> bool | None:
        """None where there was nothing to compare with."""
        if self.ratio is None:
            assert self.tokens_per_s is not None, "a goal has one of the two"
            return tokens_per_s >= self.tokens_per_s
        return None if ratio is None else ratio >= self.ratio


GOALS = {
    Cell(2048, 16): Goal(ratio=0.88),
    Cell(8192, 4): Goal(ratio=1.1),
    Cell(32768, 1): Goal(ratio=2.2),
    Cell(65536, 1): Goal(ratio=3.4),
    Cell(2048, 1): Goal(tokens_per_s=120_000),
}
"""On an H200, with the production model and the GPT-2 vocabulary."""


def parse_cells(text: str) -> list[Cell]:
    """`2048x16,8192x4` -> cells."""
    cells = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)x(\d+)\s*", part)
        if not match or "0" in match.groups():
            raise ValueError(
                f"--cells {part!r} is not a cell; use length x batch, as in 2048x16, with commas "
                "between cells"
            )
        cells.append(Cell(int(match[1]), int(match[2])))
    return cells


def parse_variants(text: str) -> list[Variant]:
    """`nsa,dense-compiled` -> variants, each once."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in NAMES:
            raise ValueError(f"--variants {name!r} is not known; choose from {', '.join(NAMES)}")
    return [Variant(name) for name in dict.fromkeys(names)]


def config_of(cell: Cell, variant: Variant, device: str, *, tiny: bool) -> Config:
    """The production model with the GPT-2 vocabulary, bf16 with fp32 weights; or the tiny one."""
    sizes = TINY if tiny else (VOCABULARY, "runtime.precision=bf16")
    settings = [
        *sizes,
        *(f"train.seq_len={cell.length}", f"train.batch_size={cell.batch}"),
        "train.accumulate_grad_batches=1",
        *(f"model.attention={variant.attention}", f"runtime.device={device}"),
        *(f"runtime.compile={variant.compiled}", f"runtime.cuda_graph={variant.graph}"),
    ]
    return load_config(PRODUCTION, settings, environ={})
