"""Compare repeats of real steps bit by bit, and measure the noise where they differ.

A repeat is a folder:

    REPEAT/
      repeat.json                   rank 0: outcomes and findings
      values-00001.safetensors      rank 1: its shards of the requested weights and gradients
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from recorder.difference import Difference
from recorder.documents import parse_as
from recorder.format import Outcome, outcome_document
from replayer.check import NOT_COMPUTED, StepComparison, compare_outcomes
from replayer.preflight.settings import PreflightFinding

REPEAT_FILE = "repeat.json"


@dataclass(frozen=True)
class ParameterNoise:
    """Largest absolute distance of a parameter's weights and gradients between two repeats.

    `gradient_share` is the latter over the largest gradient; `num_different` of `num_elements`
    weights differ.
    """

    name: str
    num_different: int
    num_elements: int
    weight: float
    gradient: float
    gradient_share: float


@dataclass(frozen=True)
class PreflightReport:
    """Result of a preflight.

    `num_compared` counts values of `num_steps` steps in `num_runs` processes; `step` is the first
    that differs. `noise` lists the parameters that differ, noisiest first.
    """

    findings: tuple[PreflightFinding, ...]
    num_compared: int
    differences: tuple[Difference, ...]
    noise: tuple[ParameterNoise, ...]
    num_steps: int = 1
    num_runs: int = 2
    step: int | None = None

    @property
    def identical(self) -> bool:
        """True if all repeats of the steps have the same bits."""
        return self.num_compared > 0 and not self.differences

    @property
    def problems(self) -> list[PreflightFinding]:
        """Findings that can change bits from run to run."""
        return [finding for finding in self.findings if finding.status == "problem"]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        return {"identical": self.identical, "problems": len(self.problems)} | asdict(self)


def write_repeat(folder: Path, outcomes: Sequence[Outcome], findings: list[PreflightFinding]) -> None:
    """Save rank 0's outcomes and findings."""
    document = {
        "outcomes": [outcome_document(outcome) for outcome in outcomes],
        "findings": [asdict(finding) for finding in findings],
    }
    (folder / REPEAT_FILE).write_text(json.dumps(document))


def read_repeat(folder: Path) -> tuple[list[Outcome], tuple[PreflightFinding, ...]]:
    """Read rank 0's outcomes and findings."""
    document = json.loads((folder / REPEAT_FILE).read_text())
    outcomes = [parse_as(Outcome, outcome, REPEAT_FILE) for outcome in document["outcomes"]]
    return outcomes, tuple(PreflightFinding(**f) for f in document["findings"])


def compare_repeats(first: Path, second: Path) -> StepComparison:
    """Compare losses, statistics and parameters of two repeats bitwise.

    Returns:
        The first step that differs, or the last one; `num_compared` of all steps up to it.
    """
    num_compared = 0
    for outcomes in zip(read_repeat(first)[0], read_repeat(second)[0], strict=True):
        comparison = compare_outcomes(*outcomes, NOT_COMPUTED)
        num_compared += comparison.num_compared
        if not comparison.identical:
            break
    return replace(comparison, num_compared=num_compared)


def measure_noise(first: Path, second: Path) -> tuple[ParameterNoise, ...]:
    """Return the noise of each parameter with kept values, over all ranks; the noisiest first."""
    left, right = read_values(first), read_values(second)
    names = sorted(name.removeprefix("weights:") for name in left if name.startswith("weights:"))
    found = [parameter_noise(name, left, right) for name in names]
    return tuple(sorted(found, key=lambda noise: (-noise.gradient_share, -noise.weight, noise.name)))


def read_values(folder: Path) -> dict[str, list[np.ndarray]]:
    values: dict[str, list[np.ndarray]] = {}
    for file in sorted(folder.glob("values-*.safetensors")):
        for name, array in load_file(file).items():
            values.setdefault(name, []).append(array)
    return values


def parameter_noise(
    name: str, left: dict[str, list[np.ndarray]], right: dict[str, list[np.ndarray]]
) -> ParameterNoise:
    weights = absolute_difference(left[f"weights:{name}"], right[f"weights:{name}"])
    gradients = absolute_difference(left[f"gradients:{name}"], right[f"gradients:{name}"])
    largest = max((float(np.abs(shard).max(initial=0)) for shard in left[f"gradients:{name}"]), default=0.0)
    gradient = float(gradients.max(initial=0))
    return ParameterNoise(
        name,
        int((weights > 0).sum()),
        weights.size,
        float(weights.max(initial=0)),
        gradient,
        gradient / largest if largest else 0.0,
    )


def absolute_difference(left: list[np.ndarray], right: list[np.ndarray]) -> np.ndarray:
    """Return |left - right| over all shards, flat.

    0 for equal values, also for two NaNs; infinite for NaN against another value, and for infinite
    differences.
    """
    a, b = (np.concatenate([shard.ravel() for shard in shards]) for shards in (left, right))
    with np.errstate(invalid="ignore"):
        distance = np.abs(a.astype(np.float64) - b)
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(equal, 0.0, np.where(np.isnan(distance), np.inf, distance))
