"""What a difference is worth: beside the machine's own noise, and beside what the replay's shape lets one expect.

Three promises, from strong to weak. *bitwise*: same machine, same shape, deterministic. *noise*: the same sums in another order (other
kernels, other ranks, other micro-batches), so numbers lie within a few times of what this machine's own reordering moves them.
*statistical*: other rows meet in an optimizer step, so only many steps together can be compared. A fourth, *changed*: an option was set
differently, and the numbers are meant to follow. A fifth, *unrecorded*: the record holds rollouts only, and there is nothing to compare.

Own noise is measured, never guessed: the same steps are run again with their rows divided into other micro-batches (and, where the run is
not deterministic, once more as they were). Rounding differs, mathematics does not.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from areal_core.allocation import parse_allocation
from recorder.difference import Difference, find_differences
from recorder.format import RecordHeader

Kind = Literal["bitwise", "noise", "statistical", "changed", "unrecorded"]
Finding = Literal["identical", "within", "unclear", "different", "changed"]
Trajectory = dict[int, dict[str, float]]  # step -> statistic -> value

WITHIN_K, BEYOND_K = (
    10.0,
    100.0,
)  # up to the first: within noise; above the second: different; between: not told
ROUNDING = 2.0**-23  # of float32: a floor, for a statistic that the own runs happened to leave alone
# A token more or less moves these by a quantum, however small the noise; times are of the machine.
NOT_SMOOTH = ("timeperf/", "clip", "filtered", "__count", "num_micro_batches", "update_successful")
MIN_STEPS, FAR_T = 5, 4.0  # of a statistical comparison
# Options of the shape: they change the order of sums, not what is summed.
DIVISION = ("mb_spec.max_tokens_per_mb", "mb_spec.n_mbs")
DEVICE = "device"


@dataclass(frozen=True)
class Promise:
    """How close a replay can come to its record, and why not closer. `reasons` is empty for "bitwise"."""

    kind: Kind
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What the numbers say. `k` counts own noises (or, statistically, standard errors) at `where` in `step`, the worst place.

    `exit_code`: 0 as promised, 1 a difference that the promise does not cover, 2 not told.
    """

    finding: Finding
    k: float | None
    where: str | None
    step: int | None

    @property
    def exit_code(self) -> int:
        """Of a command that ends with this verdict."""
        return {"identical": 0, "within": 0, "changed": 0, "different": 1, "unclear": 2}[self.finding]


def other_machine(recorded: RecordHeader, current: RecordHeader) -> tuple[Difference, ...]:
    """What differs in the fingerprint apart from our own code, whose changes must show as what they are."""
    return find_differences(machine(recorded.environment), machine(current.environment))


def machine(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint without our own code."""
    kept = {name: value for name, value in environment.items() if name != "code"}
    if "libraries" in kept:
        kept["libraries"] = {n: v for n, v in kept["libraries"].items() if n != "areal-debug"}
    return kept


def is_division(option: str) -> bool:
    """Whether an option says how rows are divided into micro-batches."""
    return option.endswith(DIVISION)


def promise(
    recorded: RecordHeader,
    current: RecordHeader,
    changed: Sequence[Difference] = (),
    edits: Sequence[str] = (),
) -> Promise:
    """What may be expected of a replay of `recorded` that runs as `current`.

    Args:
        changed: options with an effect that differ; those of shape are told apart here.
        edits: what was done to the recorded rows, a phrase each.
    """
    if recorded.recording.scope == "rollout":
        return Promise(
            "unrecorded", ("only rollouts were recorded, and not what came out of training on them",)
        )
    effects = [d.where for d in changed if not is_division(d.where) and d.where != DEVICE]
    if effects or edits:
        return Promise("changed", (*edits, *(f"{name} was set differently" for name in effects)))
    reasons = [f"{d.where} is {d.current}, recorded with {d.recorded}" for d in changed]
    if current.num_ranks != recorded.num_ranks:
        reasons.append(f"{current.num_ranks} ranks, recorded with {recorded.num_ranks}")
        minibatches = recorded.config["actor"]["ppo_n_minibatches"]
        if minibatches > 1:
            because = f"rows are dealt anew into {minibatches} minibatches on other ranks"
            return Promise("statistical", (*reasons, because))
    elif layout(current) != layout(recorded):
        reasons.append(f"{layout(current)}, recorded with {layout(recorded)}")
    reasons += [f"{d.where}: {d.current}, recorded {d.recorded}" for d in other_machine(recorded, current)]
    if not recorded.config["deterministic"]:
        reasons.append("recorded without deterministic=true")
    return Promise("noise" if reasons else "bitwise", tuple(reasons))


def layout(header: RecordHeader) -> str:
    """How ranks shared the rows."""
    trainer = parse_allocation(header.allocation).trainer if header.allocation else ""
    return f"{header.world_size} ranks" + (f" as {trainer}" if trainer else "")


def smooth(stats: Mapping[str, float]) -> dict[str, float]:
    """The statistics that noise moves a little: no times, no counts."""
    return {name: v for name, v in stats.items() if not any(part in name for part in NOT_SMOOTH)}


def own_noise(run: Trajectory, others: Sequence[Trajectory]) -> Trajectory:
    """How far own runs of the same steps lie apart, for each statistic: the most that was seen up to each step.

    Noise grows as runs part, so the steps behind bound it from below; so do relatives (`x/avg`, `x/max`), and rounding of the largest
    of them: the mean of normalised advantages is 1e-9 and made of sums of ones.
    """
    noise: Trajectory = {}
    seen: dict[str, float] = {}
    for step in sorted(run):
        for name, value in run[step].items():
            apart = [abs(other[step][name] - value) for other in others if name in other[step]]
            spread = max([a for a in apart if math.isfinite(a)], default=0.0)
            seen[family(name)] = max(seen[family(name)], spread) if family(name) in seen else spread
        sizes = rounding_sizes(run[step])
        noise[step] = {name: max(seen[family(name)], ROUNDING * sizes[name]) for name in run[step]}
    return noise


def rounding_sizes(stats: Mapping[str, float]) -> dict[str, float]:
    """The size of the numbers that each statistic is made of, which is what rounding is relative to.

    That of its largest relative, and for a divergence that of the logprobs whose difference it is: where two logprobs of -5 agree, other
    kernels move their difference by 5e-7 and not by a part of 0.
    """
    logprobs = max([abs(value) for name, value in stats.items() if "logp" in name], default=0.0)
    sizes: dict[str, float] = {}
    for name, value in stats.items():
        sizes[family(name)] = max(abs(value), sizes.get(family(name), 0.0))
    return {name: max(sizes[family(name)], logprobs if "kl" in name else 0.0) for name in stats}


def family(name: str) -> str:
    """`loss` for `loss/avg`, `loss/max` and `loss/min`."""
    head, _, last = name.rpartition("/")
    return head if last in ("avg", "max", "min") else name


def judge(recorded: Trajectory, replayed: Trajectory, noise: Trajectory) -> Verdict:
    """The distance of a replay from its record in own noises, at the worst place of the steps that both have."""
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
    """(step, statistic) that both have, in order."""
    return [
        (s, n) for s in sorted(recorded.keys() & replayed.keys()) for n in recorded[s] if n in replayed[s]
    ]


def distance(recorded: float, replayed: float, noise: float) -> float:
    """|recorded - replayed| in units of noise; 0 for equal values, NaN beside NaN included."""
    if recorded == replayed or (math.isnan(recorded) and math.isnan(replayed)):
        return 0.0
    apart = abs(recorded - replayed)
    return apart / noise if noise > 0 and math.isfinite(apart) else math.inf


def judge_statistically(recorded: Trajectory, replayed: Trajectory) -> Verdict:
    """A paired comparison over steps: the mean difference of each statistic in its standard errors (Student's t).

    Fewer than five steps tell nothing; neither does more than four standard errors prove a defect, because runs part.
    """
    names = sorted({name for _, name in shared(recorded, replayed)})
    steps = sorted(recorded.keys() & replayed.keys())
    if len(steps) < MIN_STEPS or not names:
        return Verdict("unclear", None, None, None)
    t, where = max((t_value([replayed[s][n] - recorded[s][n] for s in steps
                             if n in recorded[s] and n in replayed[s]]), n) for n in names)  # fmt: skip
    return Verdict("within" if t <= FAR_T else "unclear", t, where, None)


def t_value(differences: Sequence[float]) -> float:
    """|mean| over its standard error; 0 where nothing differs or there are too few."""
    count = len(differences)
    if count < MIN_STEPS or not any(differences):
        return 0.0
    mean = sum(differences) / count
    variance = sum((d - mean) ** 2 for d in differences) / (count - 1)
    return abs(mean) / math.sqrt(variance / count) if variance > 0 else math.inf
