"""`areal-debug replay`: start the ranks of a replay, run a task on each, print the result.

Its Python names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from areal_debug.installation import lazy_names

if TYPE_CHECKING:
    from replayer.anchors import AnchorPolicy as AnchorPolicy
    from replayer.anchors import AnchorTaker as AnchorTaker
    from replayer.check import ReplayCheck as ReplayCheck
    from replayer.check import ReplayReport as ReplayReport
    from replayer.check import StepResult as StepResult
    from replayer.check import StoppedAtDifference as StoppedAtDifference
    from replayer.commits.bisect import BisectReport as BisectReport
    from replayer.commits.bisect import find_commit as find_commit
    from replayer.commits.first_step import FirstStep as FirstStep
    from replayer.commits.first_step import bisect_steps as bisect_steps
    from replayer.diff import DiffReport as DiffReport
    from replayer.diff import diff_records as diff_records
    from replayer.errors import NothingToBisect as NothingToBisect
    from replayer.errors import ReplayError as ReplayError
    from replayer.errors import WrongEdit as WrongEdit
    from replayer.errors import WrongFilter as WrongFilter
    from replayer.errors import WrongModel as WrongModel
    from replayer.explain import StepExplanation as StepExplanation
    from replayer.goto import GotoReport as GotoReport
    from replayer.goto import Scene as Scene
    from replayer.noise import Guarantee as Guarantee
    from replayer.noise import Verdict as Verdict
    from replayer.preflight.repeats import PreflightReport as PreflightReport
    from replayer.request import Request as Request
    from replayer.request import replay_config as replay_config
    from replayer.rerun import replay_and_judge as replay_and_judge
    from replayer.run import replay as replay
    from replayer.run import replay_and_compare as replay_and_compare
    from replayer.source import RecordedRollouts as RecordedRollouts

__getattr__, __all__ = lazy_names(
    {
        "replayer.anchors": ["AnchorPolicy", "AnchorTaker"],
        "replayer.check": ["ReplayCheck", "ReplayReport", "StepResult", "StoppedAtDifference"],
        "replayer.commits.bisect": ["BisectReport", "find_commit"],
        "replayer.commits.first_step": ["FirstStep", "bisect_steps"],
        "replayer.diff": ["DiffReport", "diff_records"],
        "replayer.errors": ["NothingToBisect", "ReplayError", "WrongEdit", "WrongFilter", "WrongModel"],
        "replayer.explain": ["StepExplanation"],
        "replayer.goto": ["GotoReport", "Scene"],
        "replayer.noise": ["Guarantee", "Verdict"],
        "replayer.preflight.repeats": ["PreflightReport"],
        "replayer.request": ["Request", "replay_config"],
        "replayer.rerun": ["replay_and_judge"],
        "replayer.run": ["replay", "replay_and_compare"],
        "replayer.source": ["RecordedRollouts"],
    },
    __name__,
)
