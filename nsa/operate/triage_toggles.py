"""The triage matrix: what is switched, one at a time, to find out where a fault sits, in order.

What costs nothing comes first, then the data, the kernels, the exchange between ranks, memory; what
makes it another run altogether comes last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nsa.config import Config

SHORT_ROW = 1024
"""Tokens of a row when memory is the question; half of a row that is no longer than this."""


@dataclass(frozen=True, kw_only=True)
class Toggle:
    """A change to the run under suspicion."""

    name: str
    meaning: str
    """What it says of the fault if it clears it."""
    environ: dict[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    ranks: int | None = None
    """Processes, where it changes their number."""

    @property
    def setting(self) -> str:
        """As somebody would write it before the command."""
        words = [f"{name}={value}" for name, value in self.environ.items()]
        words += self.overrides
        return " ".join(words + ([f"--np {self.ranks}"] if self.ranks else [])) or "as it is"


BASELINE = Toggle(name="baseline", meaning="the run as it is")


def matrix(config: Config, ranks: int, *, on_cuda: bool) -> list[Toggle]:
    """Every toggle that changes something for this run, in the order of the runbooks."""
    toggles = [*_telemetry(config), *_kernels(config)]
    is_ddp = ranks > 1 and config.runtime.strategy != "fsdp"
    if is_ddp:
        toggles += EXCHANGE
    toggles += [SELECTION, *_memory(config, ranks)]
    if on_cuda:
        toggles.append(BLOCKING)
    if ranks > 1:
        toggles.append(ONE_PROCESS)
    return [*toggles, FSDP] if is_ddp else toggles


def _telemetry(config: Config) -> list[Toggle]:
    found = [
        Toggle(
            name="stats_off",
            meaning="the statistics of gates and selection at logged steps",
            environ={"NSA_DISABLE_AUX_STATS": "1"},
        ),
        Toggle(
            name="logs_off",
            meaning="TensorBoard, the CSV files or a tracker; the disk that they are on",
            environ={"NSA_TB_DISABLE": "1", "NSA_DISABLE_CSV_LOGS": "1"},
            overrides=("train.tracker=none",),
        ),
    ]
    if config.data.dataset != "synthetic":
        found.append(
            Toggle(
                name="synthetic_data",
                meaning="the data: its source, the network, or what is in it",
                overrides=("data.dataset=synthetic", "data.local_path="),
            )
        )
    return found


def _kernels(config: Config) -> list[Toggle]:
    found = [
        Toggle(
            name="no_flash",
            meaning="flash kernels of scaled_dot_product_attention",
            environ={"NSA_SDPA_NO_FLASH": "1", "NSA_SDPA_FLASH_ONLY": "0"},
        ),
        Toggle(
            name="fa2_off",
            meaning="the FlashAttention-2 route of the window and compressed branches",
            environ=dict.fromkeys(("NSA_USE_FA2", "NSA_USE_FA2_WIN", "NSA_USE_FA2_CMP"), "0"),
        ),
    ]
    if config.runtime.compile or config.runtime.cuda_graph:
        found.append(
            Toggle(
                name="as_written",
                meaning="torch.compile, or the capture as a CUDA graph",
                overrides=("runtime.compile=false", "runtime.cuda_graph=false"),
            )
        )
    return found


OFF = {"NSA_DDP_COMPRESS": "off"}
EXCHANGE = [
    Toggle(
        name="compress_off",
        meaning="compressed gradients, or many small buckets",
        environ={**OFF, "NSA_DDP_BUCKET_MB": "100"},
    ),
    Toggle(
        name="static_graph_off",
        meaning="the promise that every step has the same graph",
        environ={**OFF, "NSA_DDP_STATIC_GRAPH": "0", "NSA_DDP_FIND_UNUSED": "0"},
    ),
    Toggle(
        name="find_unused",
        meaning="parameters that get no gradient in some steps",
        environ={**OFF, "NSA_DDP_STATIC_GRAPH": "1", "NSA_DDP_FIND_UNUSED": "1"},
    ),
    *(
        Toggle(
            name=f"bucket_{size}",
            meaning="the size of the buckets",
            environ={"NSA_DDP_BUCKET_MB": str(size)},
        )
        for size in (25, 50)
    ),
    Toggle(
        name="safe_mode",
        meaning="something of DDP or of the kernels; what exactly, the rows above do not say",
        environ={"NSA_DDP_SAFE_MODE": "1"},
    ),
]
SELECTION = Toggle(
    name="selection_v1",
    meaning="the fast selection of blocks",
    environ={"NSA_SEL_RANGES_V2": "0"},
)
BLOCKING = Toggle(
    name="launch_blocking",
    meaning="kernels that run side by side; or the log now names the kernel that fails",
    environ={"CUDA_LAUNCH_BLOCKING": "1"},
)
ONE_PROCESS = Toggle(
    name="one_process",
    meaning="that there are several ranks: the network between them, or DDP",
    overrides=("runtime.strategy=auto",),  # any other is refused in one process
    ranks=1,
)
FSDP = Toggle(
    name="fsdp",
    meaning="DDP; several ranks as such are not the fault",
    overrides=("runtime.strategy=fsdp",),
)


def _memory(config: Config, ranks: int) -> list[Toggle]:
    row = config.train.seq_len
    shorter = str(SHORT_ROW if row > SHORT_ROW else max(row // 2, 1))
    found = []
    if not config.runtime.gradient_checkpointing:
        found.append(
            Toggle(
                name="gradient_checkpointing",
                meaning="memory of activations",
                environ={"NSA_NO_GC": "0"} | ({"NSA_DDP_DISABLE_GC": "0"} if ranks > 1 else {}),
                overrides=("runtime.gradient_checkpointing=true",),
            )
        )
    found.append(
        Toggle(
            name="shorter_rows",
            meaning="memory, or something that only long rows meet",
            environ={"NSA_SEQ_LEN": shorter},
        )
    )
    return found
