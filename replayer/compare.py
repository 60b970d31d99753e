"""Bitwise comparison of recorded and replayed steps, and of their settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recorder.difference import Difference, find_differences
from recorder.environment import diff_environment
from recorder.format import Outcome, RecordHeader, outcome_document


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

    @property
    def identical(self) -> bool:
        """True if no setting differs."""
        return not (self.config or self.environment or self.model)


def loss_values(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return each fact of each micro-batch under a unique, readable name."""
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


def compare_headers(recorded: RecordHeader, current: RecordHeader) -> HeaderComparison:
    """Compare config, environment and model files of a record and of the run that replays it."""
    return HeaderComparison(
        config=find_differences(recorded.config, current.config),
        environment=diff_environment(recorded.environment, current.environment),
        model=find_differences(recorded.model["files"], current.model["files"]),
    )
