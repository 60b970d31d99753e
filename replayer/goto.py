"""Go to a step of a recorded run with the model, optimizer and batch that it had there.

nearest anchor ─> replay, each step compared ─differs?─> stop and report
                          └─> step N ─> its batch | advantages | loss | backward | optimizer ─> visit(scene) ─> end of the replay
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal_core.data.batch import Batch
from areal_core.engine.checkpoint.hf_folder import save_hf
from areal_core.trainer.observed import Observer
from areal_core.trainer.rl import PPOTrainer
from recorder import Outcome, Plan, Record, open_record
from replayer.check import ReplayReport, StepResult, StoppedAtDifference
from replayer.errors import ReplayError
from replayer.own_code import OwnCodeState
from replayer.preconditions import nearest_anchor, step_range
from replayer.request import Request, Summation
from replayer.run import check_of, replay

# Stage of a step -> the event at which to stop. "batch": before anything is computed from it.
STAGES = {
    "batch": "batch",
    "advantages": "advantages",
    "loss": "loss",
    "backward": "gradients",
    "optimizer": "optimizer",
}


@dataclass(frozen=True)
class Scene:
    """The objects that are available at a stage of a step.

    Attributes:
        batch: this rank's padded batch. plan, outcome: those recorded for the step.
        facts: facts of the stage's event (ARCHITECTURE.md), such as `inputs`, or `loss` and `flat`.
    """

    trainer: PPOTrainer
    record: Record
    step: int
    stage: str
    batch: Batch
    plan: Plan
    outcome: Outcome
    facts: Mapping[str, Any]

    def names(self) -> dict[str, Any]:
        """Return all objects by the names that they have in the interactive shell."""
        self.trainer.actor.wake()
        own = {name: vars(self)[name] for name in ("trainer", "record", "step", "batch", "plan", "outcome")}
        of_actor = {name: getattr(self.trainer.actor, name) for name in ("model", "optimizer")}
        return dict(self.facts) | of_actor | own | {"tokenizer": self.trainer.tokenizer}


Visit = Callable[[Scene], None]


@dataclass
class GotoReport:
    """Result of reaching a step.

    Attributes:
        anchor: the step of the checkpoint that the replay started from; None for the run's first
            model.
        replayed: the steps before it, each compared with its record.
        num_parameters: parameters that were compared with the checksums recorded before the step.
        wrong_parameters: those that differ.
        reached: whether the step was visited.
        own_code: the user's code that computes the steps.
    """

    record: str
    step: int
    stage: str
    anchor: int | None
    replayed: list[StepResult] = field(default_factory=list)
    num_parameters: int = 0
    wrong_parameters: list[str] = field(default_factory=list)
    reached: bool = False
    own_code: tuple[OwnCodeState, ...] = ()

    @property
    def first_different(self) -> StepResult | None:
        """The first replayed step that differs from its record."""
        return next((result for result in self.replayed if not result.identical), None)

    @property
    def faithful(self) -> bool:
        """True if the step was reached, and every bit before it equals the recorded one."""
        return self.reached and self.first_different is None and not self.wrong_parameters

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        first = self.first_different
        return asdict(self) | {
            "faithful": self.faithful,
            "first_different": None if first is None else first.step,
        }


class VisitFinished(Exception):
    """Ends a replay after the visit; caught by `goto`."""


def goto(
    folder: str,
    step: int,
    visit: Visit,
    *,
    stage: str = "batch",
    model: str | None = None,
    keep_going: bool = False,
    finish_step: bool = False,
    virtual: Summation = "",
    on_step: Callable[[StepResult], None] = lambda result: None,
) -> GotoReport:
    """Replay on this rank up to a stage of a step and call `visit` there; a collective.

    Args:
        keep_going: continue after a step that differs from its record.
        finish_step: run the step to its end after the visit, and compare it as well.
        virtual: as in Request.

    Raises:
        ReplayError, RecordError: the record does not have the steps up to this one.
    """
    record = open_record(folder)
    step_range(record, step, step)
    anchor = nearest_anchor(record, step)
    start = record.steps[0] if anchor is None else anchor
    request = Request(folder, start, step, model, stop_at_difference=not keep_going, virtual=virtual)
    reports: list[GotoReport] = []  # of each virtual rank of this process: all have the same

    def make_visitor(record: Record, trainer: PPOTrainer, request: Request) -> Observer:
        report, is_first = GotoReport(folder, step, stage, anchor), not reports
        reports.append(report)

        def add_result(result: StepResult) -> None:
            report.replayed.append(result)
            if is_first:
                on_step(result)

        def add_own_code(found: ReplayReport) -> None:
            report.own_code = found.own_code

        check = check_of(record, trainer, request, on_start=add_own_code, on_step=add_result)
        visitor = visit_once(record, trainer, report, visit, finish_step)

        def observe(event: str, **facts: Any) -> None:
            check(event, **facts)
            visitor(event, **facts)

        return observe

    with suppress(VisitFinished, StoppedAtDifference):  # the report contains the reason
        replay(request, [make_visitor])
    return reports[0]


def visit_once(
    record: Record, trainer: PPOTrainer, report: GotoReport, visit: Visit, finish_step: bool
) -> Observer:
    """Return an observer that calls `visit` once, at the stage of the step in the report."""
    batch: Batch = {}

    def observe(event: str, **facts: Any) -> None:
        nonlocal batch
        if event in ("start", "end") or report.reached or facts["step"] != report.step:
            return
        if event == "batch":
            batch = facts["batch"]
            report.num_parameters, report.wrong_parameters = compare_weights(record, trainer, report.step)
        if event == STAGES[report.stage]:
            report.reached = True
            recorded, rank = record.step(report.step), trainer.ranks.data_parallel_rank
            plan, outcome = recorded.plan(rank), recorded.outcome(rank)
            visit(Scene(trainer, record, report.step, report.stage, batch, plan, outcome, facts))
            if not finish_step:
                raise VisitFinished

    return observe


def compare_weights(record: Record, trainer: PPOTrainer, step: int) -> tuple[int, list[str]]:
    """Compare the weights with the checksums of the step before, if recorded; a collective.

    Returns:
        The number of parameters that were compared, and those that differ.
    """
    if step - 1 not in record.steps:
        return 0, []
    recorded = record.step(step - 1).outcome(trainer.ranks.data_parallel_rank).checksums
    found = trainer.checksums()
    return len(found), sorted({name for name, _ in found.items() ^ recorded.items()})


def save_weights(record: str, steps: Sequence[int], folder: Path, model: str | None = None) -> None:
    """Save the weights before each step into `folder/VERSION`, adapters merged; a collective.

    Args:
        steps: ascending.
        model: current path of the model that the run started from, if it has moved.

    Raises:
        ReplayError: the weights before a step are not those of the recorded run, or its steps are
            missing.
    """

    def make_saver(record: Record, trainer: PPOTrainer, request: Request) -> Observer:
        def observe(event: str, **facts: Any) -> None:
            if event != "batch" or facts["step"] not in steps:
                return
            _, wrong = compare_weights(record, trainer, facts["step"])
            if wrong:
                raise ReplayError(
                    f"{record.path}: replayed up to step {facts['step']}, {len(wrong)} parameters differ from the "
                    f"recorded run, such as {wrong[0]}: replay it with the code and on the machine that recorded it"
                )
            save_hf(folder / str(facts["version"]), trainer.actor, trainer.tokenizer, merged=True)
            if facts["step"] == steps[-1]:
                raise VisitFinished

        return observe

    start = nearest_anchor(open_record(record), steps[0])
    with suppress(VisitFinished):
        replay(Request(record, steps[0] if start is None else start, steps[-1], model), [make_saver])
