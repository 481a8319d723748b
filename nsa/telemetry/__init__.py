"""Telemetry: writers and readers of every file that a run leaves behind."""

from nsa.telemetry import sentinels, stack_dump
from nsa.telemetry.config_file import read_config, write_config
from nsa.telemetry.counter_files import (
    CounterFiles,
    FallbackRow,
    KStatsRow,
    fallback_counts,
    read_fallback_counters,
    read_k_stats,
)
from nsa.telemetry.csv_log import TRAINING, VAL, CsvLog, TrainingRow, ValRow, last_rows, read_rows
from nsa.telemetry.curve import PlotUnavailable, draw_loss_curve
from nsa.telemetry.env_file import RunEnvironment, read_env, write_env
from nsa.telemetry.gpu import GpuReading, read_gpu
from nsa.telemetry.heartbeat import (
    Beat,
    BrokenHeartbeat,
    Heartbeat,
    age_seconds,
    last_beat,
    read_heartbeat,
)
from nsa.telemetry.memory_dump import MemoryDumps, read_memory
from nsa.telemetry.metrics import Metrics, read_metrics, write_metrics
from nsa.telemetry.run_files import MODEL, Folder, open_folder
from nsa.telemetry.sample import read_sample, write_sample
from nsa.telemetry.tensorboard import TensorBoard, open_tensorboard

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
    "stack_dump",
    "write_config",
    "write_env",
    "write_metrics",
    "write_sample",
]
