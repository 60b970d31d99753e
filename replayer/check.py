"""Compare a replay with its record bit by bit: an observer on every rank, step by step as it runs.

`ReplayCheck` compares the settings at the start, then every loss, statistic and parameter checksum
of each step, and collects a `ReplayReport`. `compare_headers` and `compare_outcomes` are the
comparisons themselves, for any two runs.
"""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec

from areal_core.telemetry.loggers import GRAD_NORM, LOSS, first_of
from recorder import OutcomeObserver, Record
from recorder.difference import Difference, find_differences
from recorder.environment import diff_environment
from recorder.format import Outcome, RecordHeader, outcome_document
from recorder.header import describe_run
from replayer.carried import is_same_carried
from replayer.compare.stages import StageDifference
from replayer.errors import ReplayError
from replayer.gradients import RowSignal, no_gradient_warnings, normalises_groups, row_signals
from replayer.noise import Guarantee, Trajectory, Verdict, expected_guarantee, is_division, smooth
from replayer.own_code import OwnCodeState, by_name, compare_own_code
from replayer.request import is_new_option_at_default

WITHOUT_EFFECT = frozenset(
    tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["without_effect"]
)
# Statistics of the machine, not of the batch.
NOT_COMPUTED = ("timeperf/",)
Result = Literal["identical", "same weights, other numbers", "diverged", "not comparable"]


@dataclass(frozen=True)
class StepComparison:
    """One step of one rank.

    `num_compared` counts values, so that "identical" cannot mean "nothing compared".
    """

    step: int
    num_compared: int
    losses: tuple[Difference, ...]
    stats: tuple[Difference, ...]
    parameters: tuple[Difference, ...]

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All differences, in the order in which a step computes: losses, stats, parameters."""
        return self.losses + self.stats + self.parameters

    @property
    def identical(self) -> bool:
        """True if every loss, stat and parameter checksum has the recorded bits."""
        return not self.differences


@dataclass(frozen=True)
class HeaderComparison:
    """Settings that differ; report them before the numbers that depend on them."""

    config: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    model: tuple[Difference, ...]


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
    """One step of all ranks.

    `num_compared` counts values, as in StepComparison. `recorded` and `replayed` are the
    statistics, without times. `warnings` are sentences on what the step did not learn.
    """

    step: int
    num_compared: int
    num_parameters: int
    loss: float
    grad_norm: float
    differences: tuple[RankDifference, ...]
    recorded: dict[str, float]
    replayed: dict[str, float]
    warnings: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        """True if every loss, statistic and parameter has the recorded bits on every rank."""
        return self.num_compared > 0 and not self.differences

    @property
    def same_weights(self) -> bool:
        """True if every parameter has the recorded bits after the step."""
        of_parameters = any(difference.kind == "parameter" for difference in self.differences)
        return self.num_compared > 0 and self.num_parameters > 0 and not of_parameters


@dataclass
class ReplayReport:
    """Result of a replay; `steps` are in order.

    `set_differently` and `guarantee` are known before any number. `verdict` is None until the
    numbers are judged, for which noise may have to be measured first (`replayer.rerun`). `first` is
    the first stage of the first step that differs, with its place, None if it was not searched for;
    `pattern` describes its values. `own_code` is the user's code that computes the steps.
    `started_at` is the first step that was run, which may be before the first of `steps`.
    """

    record: str
    set_differently: HeaderComparison | None = None
    guarantee: Guarantee = field(default_factory=lambda: Guarantee("bitwise"))
    steps: list[StepResult] = field(default_factory=list)
    verdict: Verdict | None = None
    first: StageDifference | None = None
    pattern: str | None = None
    own_code: tuple[OwnCodeState, ...] = ()
    started_at: int | None = None

    @property
    def result(self) -> Result:
        """What the comparison shows, whatever the guarantee."""
        if self.guarantee.kind == "unrecorded" or not self.steps:
            return "not comparable"
        if self.identical:
            return "identical"
        return "diverged" if self.weights_diverge_at is not None else "same weights, other numbers"

    @property
    def weights_diverge_at(self) -> int | None:
        """The first step after which a parameter has other bits, or None."""
        return next((result.step for result in self.steps if not result.same_weights), None)

    @property
    def first_different(self) -> StepResult | None:
        """The first step that differs, or None."""
        return next((result for result in self.steps if not result.identical), None)

    @property
    def identical(self) -> bool:
        """True if every step has the recorded bits, and there is at least one."""
        return bool(self.steps) and self.first_different is None

    @property
    def recorded(self) -> Trajectory:
        """The smooth statistics of each step as recorded."""
        return {result.step: smooth(result.recorded) for result in self.steps}

    @property
    def replayed(self) -> Trajectory:
        """The smooth statistics of each step as replayed."""
        return {result.step: smooth(result.replayed) for result in self.steps}

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types; the inverse of `parse_report`."""
        first = self.first_different
        judged = {
            "result": self.result,
            "identical": self.identical,
            "weights_diverge_at": self.weights_diverge_at,
        }
        judged["first_different"] = None if first is None else first.step
        steps = [asdict(result) | {"identical": result.identical} for result in self.steps]
        return judged | asdict(self) | {"steps": steps}


def parse_report(document: dict[str, Any]) -> ReplayReport:
    """Parse a report from JSON types; the inverse of `ReplayReport.to_dict`."""
    return msgspec.convert(document, ReplayReport)


class StoppedAtDifference(ReplayError):
    """A replay was configured to stop at the first difference from its record, and did."""

    def __init__(self, result: StepResult) -> None:
        self.result = result
        super().__init__(f"step {result.step} differs from its record in {len(result.differences)} values")


@dataclass
class ReplayCheck:
    """An observer that compares each step with its record.

    Args:
        record: the recorded run.
        rank, gather: this data-parallel rank, and a function that returns the value of each rank in
            order (a collective).
        first_step: earlier steps are run, but not reported.
        edits: what was changed in the recorded rows, a phrase each; their losses then differ from
            the recorded ones.
        stop_at_difference: raise StoppedAtDifference, on every rank, at the first step that
            differs.
        on_start: called on every rank with the report, when the settings that differ are known.
        on_step: called on every rank with each step's result.
    """

    record: Record
    rank: int
    gather: Callable[[object], list[Any]]
    first_step: int = 0
    edits: tuple[str, ...] = ()
    stop_at_difference: bool = False
    on_start: Callable[[ReplayReport], None] = lambda report: None
    on_step: Callable[[StepResult], None] = lambda result: None

    def __post_init__(self) -> None:
        self.report = ReplayReport(str(self.record.path))
        self.same_rows = True
        self.actor: dict[str, Any] = {}  # its options
        self.rows: list[RowSignal] = []  # of the step
        self.plan: list[dict[str, Any]] = []  # its minibatches
        self._outcome = OutcomeObserver(self._compare)

    def __call__(self, event: str, **facts: Any) -> None:
        """Handle an event (ARCHITECTURE.md)."""
        if event == "start":
            self._start(facts)
        elif event == "advantages" and "advantages" in facts["inputs"]:
            self.rows = row_signals(facts["inputs"])
        elif event == "step":
            self.plan = facts["plan"]["minibatches"]
        self._outcome(event, **facts)

    def _start(self, facts: dict[str, Any]) -> None:
        current = describe_run(facts)
        self.actor = facts["config"]["actor"]
        header = compare_run(self.record, current)
        self.report.set_differently = header
        self.report.own_code = compare_own_code(self.record.header, current, is_replay=True)
        self.report.guarantee = expected_guarantee(self.record.header, current, header.config, self.edits)
        divided = any(is_division(difference.where) for difference in header.config)
        self.same_rows = current.num_ranks == self.record.header.num_ranks and not (divided or self.edits)
        self.on_start(self.report)

    def _compare(self, outcome: Outcome) -> None:
        if self.report.started_at is None:
            self.report.started_at = outcome.step
        if outcome.step < self.first_step:
            return
        if self.report.guarantee.kind == "unrecorded":
            compared = recorded = replace(outcome, micro_batches=(), stats={}, checksums={})
        else:
            compared, recorded = outcome, self.recorded(outcome.step)
        if not self.same_rows:  # losses of micro-batches with other rows cannot be compared
            recorded, compared = replace(recorded, micro_batches=()), replace(compared, micro_batches=())
        comparison = compare_outcomes(recorded, compared, NOT_COMPUTED)
        comparisons = self.gather(comparison)  # a collective: every rank compares every step
        result = StepResult(
            outcome.step,
            sum(one.num_compared for one in comparisons),
            len(outcome.checksums),
            number_of(outcome.stats, LOSS),
            number_of(outcome.stats, GRAD_NORM),
            tuple(difference for rank, one in enumerate(comparisons) for difference in on_rank(rank, one)),
            computed(recorded.stats),
            computed(outcome.stats),
            self._warnings(),
        )
        self.report.steps.append(result)
        self.on_step(result)
        if self.stop_at_difference and not result.identical:
            raise StoppedAtDifference(result)

    def _warnings(self) -> tuple[str, ...]:
        """Return what the step did not learn, a sentence each; a collective where there is any."""
        if not self.rows:  # of a supervised run, whose rows have no reward
            return ()
        norms = [float.fromhex(minibatch["grad_norm"]) for minibatch in self.plan]
        num_planned = self.actor["ppo_n_minibatches"]
        if 0.0 not in norms and len(norms) >= num_planned:
            return ()
        of_ranks = self.gather([[self.rows[row] for row in minibatch["rows"]] for minibatch in self.plan])
        minibatches = [list(chain(*of_minibatch)) for of_minibatch in zip(*of_ranks, strict=True)]
        return no_gradient_warnings(minibatches, norms, num_planned, normalises_groups(self.actor))

    def recorded(self, step: int) -> Outcome:
        """Return the recorded outcome of this rank; of rank 0 if rows are divided differently."""
        return self.record.step(step).outcome(self.rank if self.same_rows else 0)


def number_of(stats: Mapping[str, float], names: tuple[str, ...]) -> float:
    """Return the statistic that a method has under one of these names; NaN without it."""
    found = first_of(stats, names)
    return math.nan if found is None else found


def computed(stats: dict[str, float]) -> dict[str, float]:
    """The statistics that are computed from the batch."""
    return {name: value for name, value in stats.items() if not name.startswith(NOT_COMPUTED)}


def on_rank(rank: int, comparison: StepComparison) -> list[RankDifference]:
    """List a rank's differences.

    Statistics and parameters are equal on all ranks: rank 0 reports them.
    """
    kinds: dict[str, tuple[Difference, ...]] = {"loss": comparison.losses}
    if rank == 0:
        kinds |= {"stat": comparison.stats, "parameter": comparison.parameters}
    return [
        RankDifference(rank, kind, item.where, item.recorded, item.current)
        for kind, items in kinds.items()
        for item in items
    ]


def compare_run(record: Record, current: RecordHeader) -> HeaderComparison:
    """Return the settings that differ from the record, without those that change no number."""
    comparison = compare_headers(record.header, current)
    # another trainer has other options, on another machine
    has_config, has_model = record.header.config_is_ours, bool(record.header.model["files"])
    both = (record.header.config, current.config)
    moved = [  # options with the path of the model in both: it may differ if the files are equal
        option
        for option in ("actor.path", "ref.path", "critic.path", "tokenizer_path")
        if not comparison.model and all(member(c, option) == member(c, "actor.path") for c in both)
    ]
    config = tuple(
        d
        for d in comparison.config
        if d.where.split(".")[0] not in WITHOUT_EFFECT
        and d.where not in moved
        and not is_same_carried(d.recorded, d.current)
        and not is_new_option_at_default(d.where, d.current, record.header.config)
    )
    return HeaderComparison(
        config=config if has_config else (),
        environment=comparison.environment if record.header.trainer is None else (),
        model=comparison.model if has_model else (),
    )


def member(config: Any, option: str, default: Any = None) -> Any:
    """Return an option of nested members, the default where it is absent."""
    for key in option.split("."):
        if not isinstance(config, Mapping) or key not in config:
            return default
        config = config[key]
    return config


def compare_headers(recorded: RecordHeader, current: RecordHeader) -> HeaderComparison:
    """Compare config, environment and model files of a record and of the run that replays it."""
    return HeaderComparison(
        config=find_differences(by_name(recorded), by_name(current)),
        environment=diff_environment(recorded.environment, current.environment),
        model=find_differences(recorded.model["files"], current.model["files"]),
    )


def compare_outcomes(recorded: Outcome, replayed: Outcome, ignored: Sequence[str] = ()) -> StepComparison:
    """Compare two outcomes of the same step and rank bitwise: 0.0 is not -0.0, NaN equals NaN.

    `ignored` are prefixes of stats that are not computed from the batch, such as times.
    """
    assert recorded.step == replayed.step
    left, right = outcome_document(recorded), outcome_document(replayed)
    losses = loss_values(left)
    return StepComparison(
        step=recorded.step,
        num_compared=len(losses) + len(left["stats"]) + len(left["checksums"]),
        losses=differing(losses, loss_values(right)),
        stats=differing(left["stats"], right["stats"], ignored),
        parameters=differing(left["checksums"], right["checksums"]),
    )


def loss_values(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"minibatch {item['minibatch']}, micro-batch {item['micro_batch']}, {fact}": item[fact]
        for item in document["micro_batches"]
        for fact in ("loss", "weight", "num_tokens", "rows")
    }


def differing(
    recorded: Mapping[str, Any], replayed: Mapping[str, Any], ignored: Sequence[str] = ()
) -> tuple[Difference, ...]:
    """List the members that differ, without those whose name starts with one of `ignored`."""
    prefixes = tuple(ignored)
    return find_differences(
        {name: value for name, value in recorded.items() if not name.startswith(prefixes)},
        {name: value for name, value in replayed.items() if not name.startswith(prefixes)},
    )
