"""Writers and readers of every file in a run folder."""

from nsa.records import dumps, sentinels
from nsa.records.dumps import MemoryDumps, read_memory
from nsa.records.env import GpuReading, RunEnvironment, read_env, read_gpu, write_env
from nsa.records.folder import MODEL, Folder, open_folder
from nsa.records.heartbeat import (
    Beat,
    BrokenHeartbeat,
    Heartbeat,
    age_seconds,
    last_beat,
    read_heartbeat,
)
from nsa.records.metrics import Metrics, read_config, read_metrics, write_config, write_metrics
from nsa.records.results import PlotUnavailable, draw_loss_curve, read_sample, write_sample
from nsa.records.sinks import TensorBoard, open_tensorboard
from nsa.records.tables import (
    TRAINING,
    VAL,
    CounterFiles,
    CsvLog,
    FallbackRow,
    KStatsRow,
    TrainingRow,
    ValRow,
    fallback_counts,
    last_rows,
    read_fallback_counters,
    read_k_stats,
    read_rows,
)

__all__ = [
    "MODEL",
    "TRAINING",
    "VAL",
    "Beat",
    "BrokenHeartbeat",
    "CounterFiles",
    "CsvLog",
    "FallbackRow",
    "Folder",
    "GpuReading",
    "Heartbeat",
    "KStatsRow",
    "MemoryDumps",
    "Metrics",
    "PlotUnavailable",
    "RunEnvironment",
    "TensorBoard",
    "TrainingRow",
    "ValRow",
    "age_seconds",
    "draw_loss_curve",
    "dumps",
    "fallback_counts",
    "last_beat",
    "last_rows",
    "open_folder",
    "open_tensorboard",
    "read_config",
    "read_env",
    "read_fallback_counters",
    "read_gpu",
    "read_heartbeat",
    "read_k_stats",
    "read_memory",
    "read_metrics",
    "read_rows",
    "read_sample",
    "sentinels",
    "write_config",
    "write_env",
    "write_metrics",
    "write_sample",
]
