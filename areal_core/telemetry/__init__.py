"""Telemetry of a run: statistics, their loggers, one summary line per step, and a trace.

The names below are imported on first access, so reading traces needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_core.telemetry.loggers import (
        JsonlLogger,
        StatsLogger,
        TensorBoardLogger,
        TrackioLogger,
        WandbLogger,
        read_stats,
        step_summary,
    )
    from areal_core.telemetry.stats import Reduce, Stats

__all__ = [
    "JsonlLogger",
    "Reduce",
    "Stats",
    "StatsLogger",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
    "read_stats",
    "step_summary",
]
MODULES = dict.fromkeys(__all__, "loggers") | {"Reduce": "stats", "Stats": "stats"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"{__name__} has no {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
