"""Replay of areal-debug: train from a record, bit for bit; find where runs diverge.

A name is imported from its module when it is first used, so that `import replayer` does not import
torch. `replayer.goto.goto` and `replayer.explain.explain` are functions of the modules of their
name.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replayer.anchors import AnchorPolicy, AnchorTaker
    from replayer.check import ReplayCheck, ReplayReport, StepResult, StoppedAtDifference
    from replayer.commits.bisect import BisectReport, find_commit
    from replayer.commits.first_step import FirstStep, bisect_steps
    from replayer.diff import DiffReport, diff_records
    from replayer.errors import NothingToBisect, ReplayError, WrongEdit, WrongFilter, WrongModel
    from replayer.explain import StepExplanation
    from replayer.goto import GotoReport, Scene
    from replayer.noise import Guarantee, Verdict
    from replayer.preflight.repeats import PreflightReport
    from replayer.request import Request, replay_config
    from replayer.rerun import replay_and_judge
    from replayer.run import replay, replay_and_compare
    from replayer.source import RecordedRollouts

MODULES = {
    "AnchorPolicy": "anchors",
    "AnchorTaker": "anchors",
    "BisectReport": "commits.bisect",
    "DiffReport": "diff",
    "FirstStep": "commits.first_step",
    "GotoReport": "goto",
    "Guarantee": "noise",
    "NothingToBisect": "errors",
    "PreflightReport": "preflight.repeats",
    "RecordedRollouts": "source",
    "ReplayCheck": "check",
    "ReplayError": "errors",
    "ReplayReport": "check",
    "Request": "request",
    "Scene": "goto",
    "StepExplanation": "explain",
    "StepResult": "check",
    "StoppedAtDifference": "check",
    "Verdict": "noise",
    "WrongEdit": "errors",
    "WrongFilter": "errors",
    "WrongModel": "errors",
    "bisect_steps": "commits.first_step",
    "diff_records": "diff",
    "find_commit": "commits.bisect",
    "replay": "run",
    "replay_and_compare": "run",
    "replay_and_judge": "rerun",
    "replay_config": "request",
}

__all__ = [
    "AnchorPolicy",
    "AnchorTaker",
    "BisectReport",
    "DiffReport",
    "FirstStep",
    "GotoReport",
    "Guarantee",
    "NothingToBisect",
    "PreflightReport",
    "RecordedRollouts",
    "ReplayCheck",
    "ReplayError",
    "ReplayReport",
    "Request",
    "Scene",
    "StepExplanation",
    "StepResult",
    "StoppedAtDifference",
    "Verdict",
    "WrongEdit",
    "WrongFilter",
    "WrongModel",
    "bisect_steps",
    "diff_records",
    "find_commit",
    "replay",
    "replay_and_compare",
    "replay_and_judge",
    "replay_config",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module. Raises AttributeError for any other name."""
    if name not in MODULES:
        raise AttributeError(f"module 'replayer' has no attribute {name!r}")
    return getattr(import_module(f"replayer.{MODULES[name]}"), name)
