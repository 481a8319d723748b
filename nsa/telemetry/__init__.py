"""Telemetry: writers and readers of every file that a run leaves behind."""

from nsa.telemetry.config_file import read_config, write_config
from nsa.telemetry.csv_log import TRAINING, VAL, CsvLog, TrainingRow, ValRow, read_rows
from nsa.telemetry.curve import PlotUnavailable, draw_loss_curve
from nsa.telemetry.metrics import Metrics, read_metrics, write_metrics
from nsa.telemetry.run_files import MODEL, Folder, open_folder
from nsa.telemetry.sample import read_sample, write_sample

__all__ = [
    "MODEL",
    "TRAINING",
    "VAL",
    "CsvLog",
    "Folder",
    "Metrics",
    "PlotUnavailable",
    "TrainingRow",
    "ValRow",
    "draw_loss_curve",
    "open_folder",
    "read_config",
    "read_metrics",
    "read_rows",
    "read_sample",
    "write_config",
    "write_metrics",
    "write_sample",
]
