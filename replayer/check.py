"""Watches a replay and compares every step with the record, on all ranks, as it happens."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from recorder import Outcome, OutcomeObserver, Record
from recorder.difference import Difference
from recorder.writer import describe_run
from replayer.compare import HeaderComparison, StepComparison, compare_headers, compare_outcomes

# Options that say where a run keeps its files, what it tells, and whether it is recorded: none changes a number.
WITHOUT_EFFECT = frozenset(
    {
        "allocation_mode",
        "checkpointer",
        "cluster",
        "debug",
        "evaluator",
        "experiment_name",
        "launcher",
        "perf_tracer",
        "recover",
        "rollout",
        "saver",
        "scheduler",
        "sglang",
        "stats_logger",
        "trial_name",
        "valid_dataset",
    }
)
# Statistics of the machine, not of the batch.
NOT_COMPUTED = ("timeperf/",)


@dataclass(frozen=True)
class RankDifference:
    """One value that differs on one rank. `kind` is "loss", "stat" or "parameter"."""

    rank: int
    kind: str
    where: str
    recorded: Any
    replayed: Any


@dataclass(frozen=True)
class StepResult:
    """One step of all ranks. `num_compared` counts values, so that "identical" cannot mean "nothing compared"."""

    step: int
    num_compared: int
    num_parameters: int
    loss: float
    grad_norm: float
    differences: tuple[RankDifference, ...]

    @property
    def identical(self) -> bool:
        """Every loss, statistic and parameter has the recorded bits on every rank."""
        return not self.differences


@dataclass
class ReplayReport:
    """What a replay found. `set_differently` came before any number; `steps` are in order."""

    record: str
    set_differently: HeaderComparison | None = None
    steps: list[StepResult] = field(default_factory=list)

    @property
    def first_different(self) -> StepResult | None:
        """The first step that differs, or None."""
        return next((result for result in self.steps if not result.identical), None)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types, with the verdict."""
        first = self.first_different
        return {
            "record": self.record,
            "identical": bool(self.steps) and first is None,
            "first_different": None if first is None else first.step,
            "set_differently": None if self.set_differently is None else asdict(self.set_differently),
            "steps": [asdict(result) | {"identical": result.identical} for result in self.steps],
        }


class ReplayCheck:
    """An observer that compares each step with its record.

    Args:
        record: what the run did.
        rank, gather: this rank, and every rank's value of an object in rank order (a collective).
        first_step: steps before it are run, not reported.
        on_header, on_step: told what was set differently, and each step's result; called on every rank.
    """

    def __init__(
        self,
        record: Record,
        rank: int,
        gather: Callable[[object], list[Any]],
        first_step: int = 0,
        on_header: Callable[[HeaderComparison], None] = lambda header: None,
        on_step: Callable[[StepResult], None] = lambda result: None,
    ) -> None:
        self.record, self.rank, self.gather, self.first_step = record, rank, gather, first_step
        self.on_header, self.on_step = on_header, on_step
        self.report = ReplayReport(str(record.path))
        self._outcome = OutcomeObserver(self._compare)

    def __call__(self, event: str, **facts: Any) -> None:
        """Takes one event with the facts of ARCHITECTURE.md."""
        if event == "start":
            self.report.set_differently = compare_run(self.record, facts)
            self.on_header(self.report.set_differently)
        self._outcome(event, **facts)

    def _compare(self, outcome: Outcome) -> None:
        if outcome.step < self.first_step:
            return
        recorded = self.record.step(outcome.step).outcome(self.rank)
        comparison = compare_outcomes(recorded, outcome, NOT_COMPUTED)
        comparisons = self.gather(comparison)  # a collective: every rank compares every step
        result = StepResult(
            outcome.step,
            sum(one.num_compared for one in comparisons),
            len(outcome.checksums),
            outcome.stats["ppo_actor/update/loss"],
            outcome.stats["ppo_actor/update/grad_norm"],
            tuple(difference for rank, one in enumerate(comparisons) for difference in on_rank(rank, one)),
        )
        self.report.steps.append(result)
        self.on_step(result)


def on_rank(rank: int, comparison: StepComparison) -> list[RankDifference]:
    """A rank's differences. Statistics and parameters are the same on all ranks: rank 0 speaks for them."""
    kinds: dict[str, tuple[Difference, ...]] = {"loss": comparison.losses}
    if rank == 0:
        kinds |= {"stat": comparison.stats, "parameter": comparison.parameters}
    return [
        RankDifference(rank, kind, item.where, item.recorded, item.current)
        for kind, items in kinds.items()
        for item in items
    ]


def compare_run(record: Record, start_facts: dict[str, Any]) -> HeaderComparison:
    """What was set differently from the record, in config, environment and model, leaving out what changes no number."""
    current = describe_run(start_facts)
    comparison = compare_headers(record.header, current)
    return HeaderComparison(
        config=tuple(d for d in comparison.config if d.where.split(".")[0] not in WITHOUT_EFFECT),
        environment=comparison.environment,
        model=comparison.model,
    )
