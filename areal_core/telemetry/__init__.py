"""Telemetry of a run: statistics, their loggers, one summary line per step, and a trace.

The names below are imported on first access, so reading traces needs no torch.
"""

import importlib
from typing import Any

MODULES = {"Reduce": "stats", "Stats": "stats"} | dict.fromkeys(
    (
        *("JsonlLogger", "StatsLogger", "TensorBoardLogger", "TrackioLogger", "WandbLogger"),
        *("read_stats", "step_summary"),
    ),
    "loggers",
)


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"{__name__} has no {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MODULES[name]}"), name)
