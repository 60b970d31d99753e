"""Two takes of one step, compared: equal bits, or how far each parameter moves by itself. Imports no torch.

TAKE/
  take.json                     rank 0: outcome and findings
  values-00001.safetensors      rank 1: its part of the weights and gradients that were asked for
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from recorder.difference import Difference
from recorder.format import Outcome, outcome_document, parse_outcome
from replayer.check import NOT_COMPUTED
from replayer.compare import StepComparison, compare_outcomes
from replayer.preflight_checks import Finding

TAKE_FILE = "take.json"


@dataclass(frozen=True)
class ParameterNoise:
    """How far a parameter lies from itself in two takes of a step: largest absolute distance of weights and of gradients.

    `gradient_share` is the latter over the largest gradient; `num_different` of `num_elements` weights differ.
    """

    name: str
    num_different: int
    num_elements: int
    weight: float
    gradient: float
    gradient_share: float


@dataclass(frozen=True)
class PreflightReport:
    """What a preflight found. `num_compared` counts values of the step; `noise` has the parameters that differ, noisiest first."""

    findings: tuple[Finding, ...]
    num_compared: int
    differences: tuple[Difference, ...]
    noise: tuple[ParameterNoise, ...]

    @property
    def identical(self) -> bool:
        """Both takes of the step have the same bits."""
        return self.num_compared > 0 and not self.differences

    @property
    def problems(self) -> list[Finding]:
        """Findings that can change bits from run to run."""
        return [finding for finding in self.findings if finding.status == "problem"]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        return {"identical": self.identical, "problems": len(self.problems)} | asdict(self)


def write_take(folder: Path, outcome: Outcome, findings: list[Finding]) -> None:
    """Leaves what rank 0 saw."""
    document = {"outcome": outcome_document(outcome), "findings": [asdict(finding) for finding in findings]}
    (folder / TAKE_FILE).write_text(json.dumps(document))


def read_take(folder: Path) -> tuple[Outcome, tuple[Finding, ...]]:
    """What rank 0 saw."""
    document = json.loads((folder / TAKE_FILE).read_text())
    return parse_outcome(document["outcome"], TAKE_FILE), tuple(Finding(**f) for f in document["findings"])


def compare_takes(first: Path, second: Path) -> StepComparison:
    """Losses, statistics and parameters of two takes, on bits."""
    return compare_outcomes(read_take(first)[0], read_take(second)[0], NOT_COMPUTED)


def measure_noise(first: Path, second: Path) -> tuple[ParameterNoise, ...]:
    """Each parameter of two takes that kept values, over all ranks; the noisiest first."""
    left, right = read_values(first), read_values(second)
    names = sorted(name.removeprefix("weights:") for name in left if name.startswith("weights:"))
    found = [parameter_noise(name, left, right) for name in names]
    return tuple(sorted(found, key=lambda noise: (-noise.gradient_share, -noise.weight, noise.name)))


def read_values(folder: Path) -> dict[str, list[np.ndarray]]:
    """Each kept array, a part a rank."""
    values: dict[str, list[np.ndarray]] = {}
    for file in sorted(folder.glob("values-*.safetensors")):
        for name, array in load_file(file).items():
            values.setdefault(name, []).append(array)
    return values


def parameter_noise(
    name: str, left: dict[str, list[np.ndarray]], right: dict[str, list[np.ndarray]]
) -> ParameterNoise:
    """One parameter."""
    weights = apart(left[f"weights:{name}"], right[f"weights:{name}"])
    gradients = apart(left[f"gradients:{name}"], right[f"gradients:{name}"])
    largest = max((float(np.abs(part).max(initial=0)) for part in left[f"gradients:{name}"]), default=0.0)
    gradient = float(gradients.max(initial=0))
    return ParameterNoise(
        name,
        int((weights > 0).sum()),
        weights.size,
        float(weights.max(initial=0)),
        gradient,
        gradient / largest if largest else 0.0,
    )


def apart(left: list[np.ndarray], right: list[np.ndarray]) -> np.ndarray:
    """|left - right| of all parts, flat: 0 for equal values, NaN beside NaN included; infinite beside NaN and infinity."""
    a, b = (np.concatenate([part.ravel() for part in parts]) for parts in (left, right))
    with np.errstate(invalid="ignore"):
        distance = np.abs(a.astype(np.float64) - b)
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(equal, 0.0, np.where(np.isnan(distance), np.inf, distance))
