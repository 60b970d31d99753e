"""What a run says about itself: statistics, where they go, and one line a step."""

from areal_core.telemetry.loggers import JsonlLogger, StatsLogger, TensorBoardLogger, read_stats
from areal_core.telemetry.stats import Reduce, Stats
from areal_core.telemetry.summary import step_summary

__all__ = ["JsonlLogger", "Reduce", "Stats", "StatsLogger", "TensorBoardLogger", "read_stats", "step_summary"]
