"""Replay of areal-debug: train from a record, bit for bit; find where runs diverge.

A name is imported from its module when it is first used, so that `import replayer` does not import
torch. `replayer.goto.goto` and `replayer.explain.explain` are functions of the modules of their
name.
"""

from importlib import import_module
from typing import Any

NAMES = {
    "anchors": ["AnchorPolicy", "AnchorTaker"],
    "check": ["ReplayCheck", "ReplayReport", "StepResult", "StoppedAtDifference"],
    "commits.bisect": ["BisectReport", "find_commit"],
    "commits.first_step": ["FirstStep", "bisect_steps"],
    "diff": ["DiffReport", "diff_records"],
    "errors": ["NothingToBisect", "ReplayError", "WrongEdit", "WrongFilter", "WrongModel"],
    "explain": ["StepExplanation"],
    "goto": ["GotoReport", "Scene"],
    "noise": ["Guarantee", "Verdict"],
    "preflight.repeats": ["PreflightReport"],
    "request": ["Request", "replay_config"],
    "rerun": ["replay_and_judge"],
    "run": ["replay", "replay_and_compare"],
    "source": ["RecordedRollouts"],
}
MODULES = {name: module for module, names in NAMES.items() for name in names}
__all__ = sorted(MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name from its module. Raises AttributeError for any other name."""
    if name not in MODULES:
        raise AttributeError(f"module 'replayer' has no attribute {name!r}")
    return getattr(import_module(f"replayer.{MODULES[name]}"), name)
