"""Judge a difference against this machine's noise floor and the guarantee of the replay.

Guarantees, from strong to weak:

    bitwise       same machine, same shape, deterministic: every bit is equal
    noise         the same sums in another order (other kernels, ranks or micro-batches): numbers
                  are within a few times the noise floor
    statistical   optimizer steps have other rows, so only many steps together can be compared
    changed       an option was set differently, and the numbers are expected to follow
    unrecorded    the record has rollouts only, and there is nothing to compare

The noise floor is measured, never guessed: the same steps run again with their rows divided into
other micro-batches (and, if the run is not deterministic, once more unchanged). This changes the
rounding and not the mathematics.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areal_core.config.allocation import parse_allocation
from recorder.difference import Difference
from recorder.environment import diff_environment
from recorder.format import RecordHeader

Kind = Literal["bitwise", "noise", "statistical", "changed", "unrecorded"]
Finding = Literal["identical", "within", "unclear", "different", "changed"]
Trajectory = dict[int, dict[str, float]]  # step -> statistic -> value

# up to the first: within noise; above the second: different; in between: inconclusive
WITHIN_K, BEYOND_K = 10.0, 100.0
ROUNDING = 2.0**-23  # of float32: the floor of a statistic that is equal in all repeats
# One token changes these by a discrete step, however small the noise; times depend on the machine.
NOT_SMOOTH = ("timeperf/", "clip", "filtered", "__count", "num_micro_batches", "update_successful")
OF_LOGPROB_DIFFERENCES = ("kl", "importance_weight", "imp_weight")
MIN_STEPS, FAR_T = 5, 4.0  # of a statistical comparison
# Options of the shape: they change the order of sums, not what is summed.
DIVISION = ("mb_spec.max_tokens_per_mb", "mb_spec.n_mbs")
DEVICE = "device"


@dataclass(frozen=True)
class Guarantee:
    """How close a replay can come to its record; `reasons` why not closer."""

    kind: Kind
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison.

    Attributes:
        k: distance in units of the noise floor (or, statistically, in standard errors) at the worst
            place.
        where, step: that place.
        exit_code: 0 within the guarantee, 1 a difference outside of it, 2 inconclusive.
    """

    finding: Finding
    k: float | None
    where: str | None
    step: int | None

    @property
    def exit_code(self) -> int:
        """Exit code of a command that ends with this verdict."""
        return {"identical": 0, "within": 0, "changed": 0, "different": 1, "unclear": 2}[self.finding]


def other_machine(recorded: RecordHeader, current: RecordHeader) -> tuple[Difference, ...]:
    """Differences of the fingerprints, without our own code: its changes must show."""
    return diff_environment(machine(recorded.environment), machine(current.environment))


def machine(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint without our own code."""
    kept = {name: value for name, value in environment.items() if name != "code"}
    if "libraries" in kept:
        kept["libraries"] = {n: v for n, v in kept["libraries"].items() if n != "areal-debug"}
    return kept


def is_division(option: str) -> bool:
    """Return whether an option determines how rows are divided into micro-batches."""
    return option.endswith(DIVISION)


def expected_guarantee(
    recorded: RecordHeader,
    current: RecordHeader,
    changed: Sequence[Difference] = (),
    edits: Sequence[str] = (),
) -> Guarantee:
    """Return the guarantee for a replay of `recorded` that runs as `current`.

    Args:
        changed: options with an effect that differ, including those of shape.
        edits: what was changed in the recorded rows, a phrase each.
    """
    if not recorded.recording.has_plans:
        return Guarantee("unrecorded", ("only rollouts were recorded, not the outcome of training on them",))
    effects = [d for d in changed if not is_division(d.where) and d.where != DEVICE]
    if effects or edits:
        reasons = [f"{d.where} from {d.recorded} to {d.current}" for d in effects]
        return Guarantee("changed", (*edits, *reasons))
    reasons = [f"{d.where} is {d.current}, recorded with {d.recorded}" for d in changed]
    if current.num_ranks != recorded.num_ranks:
        reasons.append(f"{current.num_ranks} ranks, recorded with {recorded.num_ranks}")
        minibatches = recorded.config["actor"].get("ppo_n_minibatches", 1)
        if minibatches > 1:
            because = f"rows are redistributed into {minibatches} minibatches on other ranks"
            return Guarantee("statistical", (*reasons, because))
    elif layout(current) != layout(recorded):
        reasons.append(f"{layout(current)}, recorded with {layout(recorded)}")
    reasons += [f"{d.where}: {d.current}, recorded {d.recorded}" for d in other_machine(recorded, current)]
    if not recorded.config["deterministic"]:
        reasons.append("recorded without deterministic=true")
    return Guarantee("noise" if reasons else "bitwise", tuple(reasons))


def layout(header: RecordHeader) -> str:
    """Describe how ranks shared the rows."""
    trainer = parse_allocation(header.allocation).trainer if header.allocation else ""
    return f"{header.world_size} ranks" + (f" as {trainer}" if trainer else "")


def smooth(stats: Mapping[str, float]) -> dict[str, float]:
    """The statistics that noise changes gradually: no times, no counts."""
    return {name: v for name, v in stats.items() if not any(part in name for part in NOT_SMOOTH)}


def noise_floor(run: Trajectory, others: Sequence[Trajectory]) -> Trajectory:
    """Return the largest distance of each statistic between repeats up to each step.

    Noise grows as runs diverge, so earlier steps are a lower bound; so are related statistics
    (`x/avg`, `x/max`), and rounding relative to the largest of them: the mean of normalised
    advantages is 1e-9 although its terms are of size 1.
    """
    noise: Trajectory = {}
    seen: dict[str, float] = {}
    for step in sorted(run):
        for name, value in run[step].items():
            distances = [abs(other[step][name] - value) for other in others if name in other[step]]
            spread = max([d for d in distances if math.isfinite(d)], default=0.0)
            seen[family(name)] = max(seen[family(name)], spread) if family(name) in seen else spread
        sizes = rounding_sizes(run[step])
        noise[step] = {name: max(seen[family(name)], ROUNDING * sizes[name]) for name in run[step]}
    return noise


def rounding_sizes(stats: Mapping[str, float]) -> dict[str, float]:
    """Return the magnitude of the numbers behind each statistic, to which rounding is relative.

    It is that of the largest related statistic. A divergence and an importance weight follow from
    differences of logprobs, a total loss sums the losses of its scope, such as `actor_loss`: if two
    logprobs of -5 agree, other kernels change their difference by 5e-7 and not by a fraction of 0.
    """
    sizes: dict[str, float] = {}
    for name, value in stats.items():
        sizes[family(name)] = max(abs(value), sizes.get(family(name), 0.0))
    logprobs = max([size for related, size in sizes.items() if "logp" in related], default=0.0)

    def size(name: str) -> float:
        if name.endswith("/loss"):
            scope = name.removesuffix("loss")
            return max(sizes[term] for term in sizes if term.startswith(scope) and term.endswith("loss"))
        if any(part in name for part in OF_LOGPROB_DIFFERENCES):
            return max(sizes[family(name)], logprobs)
        return sizes[family(name)]

    return {name: size(name) for name in stats}


def family(name: str) -> str:
    """Return the common name of related statistics: `loss` for `loss/avg` and `loss/max`."""
    head, _, last = name.rpartition("/")
    return head if last in ("avg", "max", "min") else name


def judge_by_noise(recorded: Trajectory, replayed: Trajectory, noise: Trajectory) -> Verdict:
    worst = max(
        (
            (distance(recorded[s][n], replayed[s][n], noise[s][n]), s, n)
            for s, n in shared(recorded, replayed)
        ),
        default=None,
    )
    if worst is None:
        return Verdict("unclear", None, None, None)
    k, step, where = worst
    finding: Finding = "within" if k <= WITHIN_K else "different" if k > BEYOND_K else "unclear"
    return Verdict(finding, k, where, step)


def shared(recorded: Trajectory, replayed: Trajectory) -> list[tuple[int, str]]:
    """List (step, statistic) that both have, in order."""
    return [
        (s, n) for s in sorted(recorded.keys() & replayed.keys()) for n in recorded[s] if n in replayed[s]
    ]


def distance(recorded: float, replayed: float, noise: float) -> float:
    """Return |recorded - replayed| in units of noise; 0 for equal values, also for two NaNs."""
    if recorded == replayed or (math.isnan(recorded) and math.isnan(replayed)):
        return 0.0
    difference = abs(recorded - replayed)
    return difference / noise if noise > 0 and math.isfinite(difference) else math.inf


def judge_statistically(recorded: Trajectory, replayed: Trajectory) -> Verdict:
    """Compare paired over steps: mean differences in standard errors (Student's t).

    Fewer than five steps are inconclusive; more than four standard errors do not prove a defect
    either, because runs diverge.
    """
    names = sorted({name for _, name in shared(recorded, replayed)})
    steps = sorted(recorded.keys() & replayed.keys())
    if len(steps) < MIN_STEPS or not names:
        return Verdict("unclear", None, None, None)
    t, where = max((t_value([replayed[s][n] - recorded[s][n] for s in steps
                             if n in recorded[s] and n in replayed[s]]), n) for n in names)  # fmt: skip
    return Verdict("within" if t <= FAR_T else "unclear", t, where, None)


def t_value(differences: Sequence[float]) -> float:
    """Return |mean| over its standard error; 0 if nothing differs or there are too few values."""
    count = len(differences)
    if count < MIN_STEPS or not any(differences):
        return 0.0
    mean = sum(differences) / count
    variance = sum((d - mean) ** 2 for d in differences) / (count - 1)
    return abs(mean) / math.sqrt(variance / count) if variance > 0 else math.inf
