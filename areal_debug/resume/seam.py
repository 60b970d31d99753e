"""What a resume changed: the last steps before it against the first ones after it, state by state.

    A, B ──> segments: steps, metrics, rows, options, optimizer ──> one judge a state ──> table

A judge compares both sides of the seam with how much the same quantity moves away from it. A state
without its quantities is unobserved, and the report says what to record (`seam.toml`).
"""

import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from areal_debug.doctor.names import words_of
from areal_debug.doctor.read import Run, flat, read_run
from areal_debug.doctor.rows import is_record
from areal_debug.doctor.samples.ends import COPIED_NATS, surprises
from areal_debug.doctor.samples.read import Rows, read_rows
from areal_debug.doctor.series import Floats, Series
from areal_debug.doctor.sources.plain_files import UnreadableRun
from areal_debug.render import count
from areal_debug.report.model import Cell, Facts, Level, Report, Row, Table, rows_of, tone_of
from recorder.errors import StepNotRecorded
from recorder.trainers.unpickle import load_pickle

BESIDE = 8  # steps on each side
JUMP = 6.0  # times what a quantity usually moves by from step to step
LEAST_SHARE = 0.02  # of a value: a smaller change is none
NOTHING_LEFT = 0.1  # of the KL before: below, the reference is the policy
FEWEST = 4  # prompts or samples that begin again
OPTIMIZERS = ("optimizer.pt", "optim.pt", "optimizer.pth", "optimizer_state.pt")
VERSIONS = ("version", "weight_version", "policy_version", "trainer_version", "weights_version")
SIZES = {"batch", "size", "parallel", "gpus", "nodes", "accumulation", "samples", "generations", "length", "world", "ranks"}  # fmt: skip
NO_SIZES = {"eval", "val", "validation", "test", "save", "log", "logging"}
IDLE = {"debug", "recover", "saver", "evaluator", "cluster", "stats_logger", "launcher", "scheduler"}
PLACES = {"dir", "path", "folder", "name", "output", "log", "logging", "save", "steps", "epochs"}
CLOCKS = ("_timestamp", "timestamp", "time", "wall_time")
CONTINUED = re.compile(r"^continuing at step (\d+) from ", re.MULTILINE)
SHOWN = {"unobserved": "not known"}
TEXTS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
PAUSE = 10  # times the usual time of a step


@dataclass(frozen=True)
class Segment:
    """One side of a seam: the metrics, rows and options of the run, and its optimizer's files."""

    path: Path
    run: Run
    rows: Rows | None
    config: dict[str, Any]
    optimizers: tuple[Path, ...] = ()

    def values(self, quantity: str) -> Floats:
        """Return the values of a quantity, none if it is not logged."""
        found = self.run.series.get(quantity)
        return np.zeros(0) if found is None else found.finite.values

    @property
    def steps(self) -> list[int]:
        return sorted({int(step) for series in self.run.by_name.values() for step in series.steps})


class Found(NamedTuple):
    """What a judge found: `kind` of change, "" for none, both values, fields of its sentence."""

    kind: str
    before: str
    after: str
    fields: dict[str, Any] = {}


@dataclass(frozen=True)
class State:
    """What became of a state: `verdict` is continues, changed or unobserved.

    `what` says how it changed, or what would show it.
    """

    id: str
    verdict: str
    before: str = ""
    after: str = ""
    what: str = ""


class Seam(NamedTuple):
    """Both sides, and every state."""

    before: Segment
    after: Segment
    states: tuple[State, ...]

    def having(self, verdict: str) -> list[State]:
        return [state for state in self.states if state.verdict == verdict]

    @property
    def verdict(self) -> str:
        """changed, continues, or unknown if little was observed or a record is damaged."""
        if self.having("changed"):
            return "changed"
        is_damaged = any(side.run.damage.found for side in (self.before, self.after))
        return "continues" if len(self.having("continues")) > 2 and not is_damaged else "unknown"


NEAR = 50  # steps whose rows a run reads at its own end, which a long record must not delay


def read_segment(path: Path, near: int | None = None) -> Segment:
    """Read a record, a log, or a folder with both and with checkpoints. Raises UnreadableRun.

    With `near`, only rows of the `NEAR` steps before and after that one.
    """
    inside = (
        [path]
        if is_record(path) or path.is_file()
        else [one for one in sorted(path.iterdir()) if one.is_dir()]
    )
    record = next((one for one in inside if is_record(one)), None)
    run = read_run(record or path)
    if record not in (None, path):
        with suppress(UnreadableRun):  # a log beside the record has more metrics
            own = read_run(path)
            run = replace(run, series=own.series | run.series, by_name=own.by_name | run.by_name)
    if near is not None and run.record is not None:
        steps = tuple(step for step in run.record.steps if near - NEAR <= step < near + NEAR)
        run = replace(run, record=replace(run.record, steps=steps))
    found = [file for name in OPTIMIZERS for file in path.rglob(name)] if path.is_dir() else []
    files = sorted(found, key=lambda file: (number_of(file) or 0, file))
    rows = None if run.record is None else read_rows(run.record, run.damage)
    config = run.config if run.record is None else dict(flat(run.record.header.config))
    return Segment(path, run, rows, config, tuple(files))


def number_of(checkpoint: Path) -> int | None:
    """Return the last number in the name of a checkpoint's folder."""
    numbers = re.findall(r"\d+", checkpoint.parent.name)
    return int(numbers[-1]) if numbers else None


def cut(whole: Segment, step: int) -> tuple[Segment, Segment]:
    """Cut one segment before a step. Raises ValueError if one side is empty."""

    def side(keep: Callable[[np.ndarray], np.ndarray]) -> Segment:
        def kept(found: dict[str, Series]) -> dict[str, Series]:
            pairs = ((name, one, keep(one.steps)) for name, one in found.items())
            return {
                n: replace(one, steps=one.steps[k], values=one.values[k]) for n, one, k in pairs if k.any()
            }

        record = whole.run.record
        if record is not None:
            numbers = np.array(record.steps)
            record = replace(record, steps=tuple(numbers[keep(numbers)].tolist()))
        run = replace(
            whole.run, series=kept(whole.run.series), by_name=kept(whole.run.by_name), record=record
        )
        rows = None if whole.rows is None else whole.rows.among(keep(whole.rows.step))
        return replace(whole, run=run, rows=rows, optimizers=())

    found = side(lambda steps: steps < step), side(lambda steps: steps >= step)
    if not all(one.run.by_name for one in found):
        steps = whole.steps
        raise ValueError(
            f"--at {step}: {whole.path} has steps {steps[0]} to {steps[-1]}: give one between, "
            f"or also the record of the steps before: areal-debug record seam BEFORE {whole.path}"
        )
    return found


def place_of_seam(whole: Segment) -> int:
    """Return the step at which a run resumed, by its trainer.log or else its clock.

    Raises ValueError if nothing shows it, or several steps.
    """
    logs = whole.path.rglob("trainer.log") if whole.path.is_dir() else ()
    said = [int(at) for log in logs for at in CONTINUED.findall(log.read_text(errors="replace"))]
    if said:
        return said[-1]
    for name, series in whole.run.by_name.items():
        if name.split("/")[-1] in CLOCKS and len(series.values) > 4:
            gaps = np.diff(series.values)
            pauses = series.steps[1:][gaps > max(PAUSE * np.median(gaps), gaps.max() / 3)].tolist()
            if len(pauses) > 1:
                listed = ", ".join(map(str, pauses[:8]))
                raise ValueError(f"{whole.path} paused before steps {listed}: give one of them with --at")
            if pauses:
                return int(pauses[0])
    raise ValueError(
        f"{whole.path} does not show where it resumed: give the step with --at, or both segments"
    )


def judge_seam(before: Segment, after: Segment) -> Seam:
    """Judge every state. Raises ValueError if one side is inside the other."""
    before, dropped = without_dropped(before, after)
    states = []
    for judge in JUDGES:
        row = TEXTS[name := judge.__name__.removeprefix("judge_")]
        found = judge(before, after)
        if found is None:
            known = [
                max((len(side.values(one)) for one in row.get("by", ())), default=0)
                for side in (before, after)
            ]
            few = f"{count(known[0], 'step')} before the resume and {known[1]} after it are too few"
            states.append(State(name, "unobserved", what=few if all(known) else row["record"]))
        else:
            what = row["changed"][found.kind].format(**found.fields) if found.kind else ""
            states.append(State(name, "changed" if what else "continues", found.before, found.after, what))
    if dropped and states[0].verdict == "continues":
        states[0] = replace(states[0], before=f"{states[0].before}, {dropped} later ones left out")
    return Seam(before, after, tuple(states))


def without_dropped(before: Segment, after: Segment) -> tuple[Segment, int]:
    """Leave out the steps that a crash dropped: B repeats them from the checkpoint before them.

    A version counter that did not go back with the step shows that nothing was dropped.
    """
    first, steps = after.steps[0], before.steps
    if first <= steps[0] < after.steps[-1] and steps[-1] < after.steps[-1] and is_inside(before, after):
        raise ValueError(
            f"{after.path} has the first step of {before.path}: if one run wrote both, give it alone, "
            "with --at STEP; else it did not resume but began again"
        )
    if not steps[0] < first <= steps[-1]:
        return before, 0
    one, other = versions_of(before), versions_of(after)
    if len(one) and len(other) and other[0] > one[-1]:
        return before, 0
    files = tuple(one for one in before.optimizers if (number_of(one) or 0) <= first)
    return replace(cut(before, first)[0], optimizers=files), sum(step >= first for step in steps)


def is_inside(before: Segment, after: Segment) -> bool:
    """Return whether B has the rows, or else the metrics, of A's first step."""
    first = before.steps[0]
    if before.rows is not None and after.rows is not None:
        one, other = (rows.among(rows.step == first) for rows in (before.rows, after.rows))
        return 0 < len(one.step) == len(other.step) and samples_of(one).keys() == samples_of(other).keys()
    logged = [
        {name: one.values[one.steps == first].tolist() for name, one in side.run.by_name.items()}
        for side in (before, after)
    ]
    return len(logged[0]) > 2 and logged[0] == logged[1]


def options_changed(before: Segment, after: Segment) -> list[str]:
    """Return the options that differ, without those of places, names, lengths and recording."""
    return [
        f"{name} {value} -> {after.config[name]}"
        for name, value in before.config.items()
        if after.config.get(name, value) != value
        and name.partition(".")[0] not in IDLE
        and not PLACES & set(words_of(name))
    ]


def usual_move(*sides: Floats) -> float:
    """Return the largest change from one step to the next away from the seam."""
    return max((float(np.abs(np.diff(side)).max()) for side in sides if len(side) > 1), default=0.0)


def judge_step(before: Segment, after: Segment) -> Found | None:
    last, first = before.steps[-1], after.steps[0]
    stride = int(np.median(np.diff(before.steps))) if len(before.steps) > 1 else 1
    gap = first - last - stride
    kind = "again" if first <= last else "missing" if gap >= stride else ""
    return Found(kind, f"last {last}", f"first {first}", {"first": first, "last": last, "gap": gap})


def judge_learning_rate(before: Segment, after: Segment) -> Found | None:
    one, other = before.values("lr"), after.values("lr")
    if not len(one) or not len(other):
        return None
    last, first = float(one[-1]), float(other[0])
    if first != last and len(one) < 3 and len(other) < 4:
        return None  # a schedule that moves looks the same
    moves = usual_move(one[-BESIDE:], other[1:BESIDE])
    alike = np.concatenate([np.diff(one), np.diff(other)]) * np.sign(first - last)  # warm restarts
    is_changed = abs(first - last) > max(
        2.5 * moves, LEAST_SHARE * max(abs(last), abs(first)), 1.5 * alike.max(initial=0)
    )
    size = min(len(one), len(other), FEWEST)
    begins = size > 1 and np.allclose(one[:size], other[:size], rtol=1e-3)
    kind = "" if not is_changed else "begins" if begins else "jumps"
    return Found(kind, f"{last:.4g}", f"{first:.4g}")


def moments_of(file: Path) -> tuple[float, float] | None:
    """Return Adam's step and the mean of its second moments; None for another file."""
    steps, sums, count = [0.0], 0.0, 0
    for name, value in leaves(load_pickle(file)):
        if name == "step" and np.size(value) == 1:
            steps.append(float(np.ravel(value)[0]))
        elif name in ("exp_avg_sq", "exp_avg_sqs", "v") and np.size(value):
            sums, count = sums + float(np.asarray(value, np.float64).sum()), count + int(np.size(value))
    return (max(steps), sums / count) if count else None


def leaves(document: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(document, dict | list):
        pairs = document.items() if isinstance(document, dict) else ((name, value) for value in document)
        for key, value in pairs:
            yield from leaves(value, str(key))
    else:
        yield name, document


def judge_optimizer(before: Segment, after: Segment) -> Found | None:
    if not before.optimizers or not after.optimizers:
        return None
    one, other = moments_of(before.optimizers[-1]), moments_of(after.optimizers[0])
    if one is None or other is None:
        return None
    is_new = other[0] < one[0] or other[1] < 0.01 * one[1]
    kind = "zero" if other[1] == 0 < one[1] else "begins" if is_new else ""
    was, is_now = (f"step {step:g}, second moment {second:.3g}" for step, second in (one, other))
    return Found(kind, was, is_now)


def judge_rng(before: Segment, after: Segment) -> Found | None:
    own, other = rng_of(before), rng_of(after)
    if other and len(set(own)) == len(own) > 1:  # else they are not used
        kind, now = ("states", "one of them again") if other[0] in own else ("", "another")
        return Found(kind, "states of the generators", now)
    if before.rows is None or after.rows is None:
        return None
    first, later = samples_of(before.rows), samples_of(after.rows)
    prompts = {prompt for prompt, _ in first} & {prompt for prompt, _ in later}
    if len(prompts) < FEWEST:
        return None
    again = [
        (first[key][0], step) for key, (step, nats) in later.items() if key in first and nats > COPIED_NATS
    ]
    if len(again) < FEWEST:
        return Found("", f"{len(prompts)} prompts on both sides", "other samples")
    shift = int(np.median([step - earlier for earlier, step in again]))
    fields = {"count": len(again), "shift": shift, "nats": COPIED_NATS}
    return Found("samples", f"step {again[0][0]}", f"step {again[0][1]}", fields)


def rng_of(side: Segment) -> list[str]:
    """Return the recorded states of the generators of each step, as text."""
    record = side.run.record
    with suppress(StepNotRecorded):
        states = [] if record is None else [record.step(number).plan(0).rng for number in record.steps]
        return [str(sorted(state.items())) for state in states] if all(states) else []
    return []


def samples_of(rows: Rows) -> dict[tuple[int, bytes], tuple[int, float]]:
    """Return step and nats of each sample, by prompt and tokens."""
    nats = surprises(rows)
    known = np.flatnonzero(rows.content != 0).tolist()
    return {
        (int(rows.content[at]), rows.tokens(at).tobytes()): (int(rows.step[at]), float(nats[at]))
        for at in known
    }


def versions_of(side: Segment) -> Floats:
    """Return the newest version that sampled each step, or as logged; empty if unknown."""
    logged = [one for name, one in side.run.by_name.items() if name.split("/")[-1] in VERSIONS]
    if logged or side.run.record is None:
        return logged[0].finite.values if logged else np.zeros(0)
    newest = []
    for step in map(side.run.record.step, side.run.record.steps):
        ranks = [rank for rank in step.ranks if step.known(rank, "versions").all()]
        found = [int(step.batch(rank, ["versions"])["versions"].max(initial=-1)) for rank in ranks]
        newest.append(max(found, default=-1))
    return np.array([version for version in newest if version >= 0], np.float64)


def judge_version(before: Segment, after: Segment) -> Found | None:
    one, other = versions_of(before), versions_of(after)
    if not len(one) or not len(other) or not (one.any() or other.any()):
        return None
    last, first = float(one.max()), float(other[0])
    # a version for each step: a resume leaves the samples of older weights
    bound = before.config.get("rollout.max_head_offpolicyness")
    is_bounded = isinstance(bound, int) and before.steps[-1] - last <= bound
    counts_steps = is_bounded or one[-1] - one[0] >= (before.steps[-1] - before.steps[0]) / 2
    most = max(last + max(2.0, 3 * usual_move(one)), after.steps[0] + 1 if counts_steps else 0)
    is_changed = last - first > max(2.0, usual_move(one)) or first > most
    return Found(
        "" if not is_changed else "zero" if first == 0 else "jumps", f"last {last:g}", f"first {first:g}"
    )


def kl_of(side: Segment) -> Floats:
    """Return the KL to the reference before each step, of rows, or else as logged."""
    rows = side.rows
    known = np.zeros(0, bool) if rows is None else np.isfinite(rows.apart)
    if rows is None or not known.any():
        return side.values("reference_kl")
    steps = np.unique(rows.step[known])
    return np.array([rows.apart[known & (rows.step == step)].mean() for step in steps])


def judge_reference(before: Segment, after: Segment) -> Found | None:
    one, other = kl_of(before), kl_of(after)
    if not len(one) or not len(other) or not (one.any() or other.any()):
        return None
    tail, first = one[-BESIDE:], float(other[0])
    if len(tail) < 3:
        return None
    level = float(np.median(tail))
    is_policy = level > 1e-6 and first < NOTHING_LEFT * level and first < 0.5 * tail.min()
    is_far = first > 10 * max(level, 1e-4) and first - level > JUMP * usual_move(tail, other[:BESIDE])
    return Found("policy" if is_policy else "jumps" if is_far else "", f"{level:.4g}", f"{first:.4g}")


def jump(before: Segment, after: Segment, quantity: str) -> tuple[float, float, bool] | None:
    """Return the level before, the first value after, and whether it is far; None for few steps."""
    one, other = before.values(quantity), after.values(quantity)
    if len(one) < FEWEST or len(other) < 3:
        return None
    tail, level, first = one[-BESIDE:], float(np.median(one[-BESIDE:])), float(other[0])
    usual = max(usual_move(tail), usual_move(other[1:BESIDE]) / 2, 1e-9)
    return level, first, abs(first - level) > JUMP * usual


def judge_engine(before: Segment, after: Segment) -> Found | None:
    for name in ("logprob_difference", "k3", "behave_kl"):
        if (found := jump(before, after, name)) is not None:
            level, first, is_far = found
            is_changed = is_far and first > 3 * level and first > 1e-3
            fields = {"name": before.run.series[name].name, "ratio": first / max(level, 1e-12)}
            return Found("jumps" if is_changed else "", f"{level:.4g}", f"{first:.4g}", fields)
    return None


def prompts_of(rows: Rows) -> tuple[list[int], int]:
    """Return the known prompts of all groups, in order, and the number of those of a step."""
    at = np.sort(np.unique(rows.group, return_index=True)[1])
    at = at[(rows.content[at] != 0) & (rows.group[at] >= 0)]
    return rows.content[at].tolist(), len(at) // max(1, len(np.unique(rows.step)))


def judge_data(before: Segment, after: Segment) -> Found | None:
    if before.rows is None or after.rows is None:
        return None
    (one, batch), (other, _) = prompts_of(before.rows), prompts_of(after.rows)
    if min(len(one), len(other)) < FEWEST:
        return None
    same = [a == b for a, b in zip(one, other, strict=False)]
    count = same.index(False) if False in same else len(same)
    repeats = len(set(one)) < len(one) or not set(one).isdisjoint(other)
    shown = "prompts repeat" if repeats else f"{len(one)} prompts"
    if is_periodic(one, other):
        return Found("", "prompts in a cycle", "the cycle continues")
    if count >= FEWEST:
        return Found("begins", shown, f"{count} again", {"count": count})
    if batch >= FEWEST and other[:batch] == one[-batch:]:
        return Found("again", shown, f"{batch} again")
    return Found("", shown, "in another order" if repeats else f"{len(other)} others")


def is_periodic(one: list[int], other: list[int]) -> bool:
    """Return whether the same few prompts are read in a cycle that continues after the resume.

    One whole cycle before is enough only if another one begins after the first one after it.
    """
    both = one + other
    fits = (size for size in range(1, len(one) + 1) if both[size:] == both[:-size])
    return any(size < len(one) or len(other) > len(one) for size in fits)


def judge_staleness(before: Segment, after: Segment) -> Found | None:
    one, other = before.values("staleness"), after.values("staleness")
    if len(one) < BESIDE or len(other) < 3:
        return None  # an asynchronous run begins without stale samples
    most, later = max(float(one[len(one) // 4 :].max()), 0.0), max(float(other[-BESIDE:].max()), 0.0)
    bound = before.config.get("rollout.max_head_offpolicyness")
    is_bounded = isinstance(bound, int | float) and later <= bound
    return Found(
        "grows" if later > most + 1.5 and not is_bounded else "",
        f"at most {most:g} versions",
        f"up to {later:g}",
    )


def judge_layout(before: Segment, after: Segment) -> Found | None:
    differ = {
        name: (value, after.config[name])
        for name, value in before.config.items()
        if after.config.get(name, value) != value
        and type(value) is int
        and SIZES & set(words_of(name.rpartition(".")[2]))
        and not NO_SIZES & set(words_of(name))
    }
    if differ:
        one, other = next(iter(differ.values()))
        listed = "; ".join(f"{name} {a} -> {b}" for name, (a, b) in differ.items())
        return Found("options", str(one), str(other), {"options": listed})
    if before.rows is None or after.rows is None:
        return Found("", "options of sizes", "equal") if before.config and after.config else None
    counts = [
        np.unique(rows.step, return_counts=True)[1].astype(np.float64) for rows in (before.rows, after.rows)
    ]
    level, first = float(np.median(counts[0])), float(counts[1][0])
    ranks = [one.rows.record.step(one.rows.step[0]).manifest.num_ranks for one in (before, after) if one.rows]
    is_changed = abs(first - level) > max(usual_move(counts[0]), 0.2 * level) or ranks[0] != ranks[1]
    was, is_now = (
        f"{rows:g} rows a step, {count(n, 'rank')}" for rows, n in zip((level, first), ranks, strict=True)
    )
    return Found("rows" if is_changed else "", was, is_now)


def judge_reward(before: Segment, after: Segment) -> Found | None:
    if (found := jump(before, after, "reward")) is None:
        return None
    level, first, is_far = found
    stays = abs(float(np.median(after.values("reward")[:BESIDE])) - level)
    is_changed = is_far and stays > 3 * usual_move(before.values("reward")[-2 * BESIDE :])
    return Found("jumps" if is_changed else "", f"{level:.4g}", f"{first:.4g}")


JUDGES: tuple[Callable[[Segment, Segment], Found | None], ...] = (
    *(judge_step, judge_learning_rate, judge_optimizer, judge_rng, judge_version, judge_reference),
    *(judge_engine, judge_data, judge_staleness, judge_layout, judge_reward),
)
LEVELS: dict[str, Level] = {"changed": "bad", "continues": "good", "unobserved": "dim"}


def document_of(found: Seam) -> dict[str, Any]:
    """Return the report as JSON types, what changed first."""

    def state(one: State) -> dict[str, str]:
        row = TEXTS[one.id]
        facts = {
            "id": one.id,
            "title": row["title"],
            "state": one.verdict,
            "before": one.before,
            "after": one.after,
        }
        more = {"changed": {"what": one.what, "fix": row["fix"]}, "unobserved": {"record": one.what}}
        return facts | more.get(one.verdict, {})

    return {
        "verdict": found.verdict,
        "before": {"path": str(found.before.path), "last_step": found.before.steps[-1]},
        "after": {"path": str(found.after.path), "first_step": found.after.steps[0]},
        "states": [state(one) for verdict in LEVELS for one in found.having(verdict)],
        "options": options_changed(found.before, found.after),
    }


def line_of(record: Path, step: int) -> str:
    """Return what a resume at a step of a record changed, one line; never raises for the record."""
    last = f"steps/{step - 1:06d}"
    if not (record / last).exists():  # it has the steps behind the resume only
        others = [folder.parents[1] for folder in record.parent.glob(f"*/{last}")]
        before = max(others, key=lambda folder: folder.stat().st_mtime, default="RECORD_BEFORE")
        return f"resumed at step {step}: areal-debug record seam {before} {record} says what that changed"
    try:
        found = judge_seam(*cut(read_segment(record, step), step))
    except (ValueError, OSError, UnreadableRun) as error:
        return f"resumed at step {step}: what that changed is unknown ({error})"
    report, command = report_of(found), f"areal-debug record seam {record} --at {step}"
    return f"resumed at step {step}: {report.verdict}: {report.sentence}; {report.notes[0]} ({command})"


def report_of(found: Seam) -> Report:
    """Return the verdict, the table of all states, and what to restore and to record."""
    changed, unseen = found.having("changed"), found.having("unobserved")
    seam = f"between step {found.before.steps[-1]} and step {found.after.steps[0]}"
    observed = f"{count(len(found.states) - len(unseen), 'state')} that could be checked"
    titles = ", ".join(TEXTS[one.id]["title"] for one in changed)
    word = "Inconclusive" if found.verdict == "unknown" else found.verdict.capitalize()
    options = options_changed(found.before, found.after)
    also = f", but options differ: {len(options)}" if options else ""
    cells = [
        (
            TEXTS[one.id]["title"],
            Cell(SHOWN.get(one.verdict, one.verdict), LEVELS[one.verdict]),
            one.before,
            one.after,
        )
        for one in found.states
    ]
    rows = rows_of("changed", [f"{one.what}; {TEXTS[one.id]['fix']}" for one in changed], "bad")
    rows += rows_of("options", options, "unsure")
    rows += rows_of("to show it", [f"{TEXTS[one.id]['title']}: {one.what}" for one in unseen], "dim")
    rows.append(
        Row("refuted if", "an unbroken run of the same options shows the same jump at this step", "dim")
    )
    return Report(
        word,
        f"{titles}, {seam}" if changed else f"nothing changed in the {observed} {seam}{also}",
        tone_of(found.verdict),
        [Table(("state", "verdict", "before", "after"), cells), Facts(rows)],
        [f"{len(unseen)} of {len(found.states)} states could not be checked"] if unseen else [],
    )
