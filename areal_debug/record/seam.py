"""What a resume changed: the last steps before it against the first ones after it, state by state.

    A, B ──> segments: steps, metrics, rows, configuration, optimizer ──> one judge a state ──> table

A judge compares both sides of the seam with how much the same quantity moves away from it. A state
without its quantities is unobserved, and the report says what to record.
"""

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from areal_debug.doctor.read import Run, UnreadableRun, read_run
from areal_debug.doctor.rows import is_record
from areal_debug.doctor.rules.terms import options
from areal_debug.doctor.samples.read import Rows, read_rows
from areal_debug.doctor.series import Floats, Series
from areal_debug.report.model import Cell, Facts, Level, Report, Row, Table, rows_of
from recorder.errors import StepNotRecorded
from recorder.trainers.unpickle import load_pickle

BESIDE = 8  # steps on each side
JUMP = 6.0  # times what a quantity usually moves by from step to step
LEAST_SHARE = 0.02  # of a value: a smaller change is none
NOTHING_LEFT = 0.1  # of the KL before: below, the reference is the policy
FEWEST_PROMPTS = 4  # that begin again
COPIED_NATS = 12.0
OPTIMIZERS = ("optimizer.pt", "optim.pt", "optimizer.pth", "optimizer_state.pt")


@dataclass(frozen=True)
class Segment:
    """One side of a seam: the metrics, the rows and the options of the run, and its optimizer's files."""

    path: Path
    run: Run
    rows: Rows | None
    config: dict[str, Any]
    optimizers: tuple[Path, ...] = ()

    def series(self, *quantities: str) -> Series | None:
        """Return the first of some quantities that is logged."""
        found = (self.run.series.get(name) for name in quantities)
        return next((one.finite for one in found if one is not None and len(one.finite.values)), None)

    @property
    def steps(self) -> list[int]:
        """All steps, ascending."""
        return sorted({int(step) for series in self.run.by_name.values() for step in series.steps})


@dataclass(frozen=True)
class State:
    """What became of a state. `verdict` is continues, changed or unobserved."""

    id: str
    verdict: str
    before: str = ""
    after: str = ""
    evidence: str = ""


class Seam(NamedTuple):
    """Both sides, and every state."""

    before: Segment
    after: Segment
    states: tuple[State, ...]

    def having(self, verdict: str) -> list[State]:
        """Return the states with a verdict."""
        return [state for state in self.states if state.verdict == verdict]

    @property
    def verdict(self) -> str:
        """changed, continues, or unknown if nothing was observed."""
        if self.having("changed"):
            return "changed"
        return "continues" if len(self.having("continues")) > 2 else "unknown"


@cache
def texts() -> dict[str, dict[str, str]]:
    """Return the rows of `seam.toml`."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def read_segment(path: Path) -> Segment:
    """Read a record, a log, or a folder with both and with checkpoints. Raises UnreadableRun."""
    inner = [path] if is_record(path) or path.is_file() else [one for one in sorted(path.iterdir()) if one.is_dir()]
    record = next((one for one in inner if is_record(one)), None)
    run = read_run(path if record is None else record)
    if record is not None and record != path:
        try:  # a log beside the record has more metrics
            own = read_run(path)
            run = replace(run, series=own.series | run.series, by_name=own.by_name | run.by_name)
        except UnreadableRun:
            pass
    files = sorted(file for name in OPTIMIZERS for file in path.rglob(name)) if path.is_dir() else []
    rows = None if run.record is None else read_rows(run.record, run.damage)
    config = run.config if run.record is None else dict(options(run.record.header.config))
    return Segment(path, run, rows, config, tuple(files))


def cut(whole: Segment, step: int) -> tuple[Segment, Segment]:
    """Cut one segment before a step. Raises ValueError if one side is empty."""

    def side(keep: Callable[[np.ndarray], np.ndarray]) -> Segment:
        def kept(found: dict[str, Series]) -> dict[str, Series]:
            every = {
                name: replace(one, steps=one.steps[keep(one.steps)], values=one.values[keep(one.steps)])
                for name, one in found.items()
            }
            return {name: one for name, one in every.items() if len(one.steps)}

        run = replace(whole.run, series=kept(whole.run.series), by_name=kept(whole.run.by_name))
        rows = whole.rows if whole.rows is None else whole.rows.among(keep(whole.rows.step))
        return replace(whole, run=run, rows=rows, optimizers=())

    found = side(lambda steps: steps < step), side(lambda steps: steps >= step)
    if not all(one.run.by_name for one in found):
        raise ValueError(f"--at {step}: {whole.path} has steps {whole.steps[0]} to {whole.steps[-1]}: give one between")
    return found


def place_of_seam(whole: Segment) -> int:
    """Return the step at which a run resumed, by its clock. Raises ValueError if nothing shows it."""
    for name, series in whole.run.by_name.items():
        if name.split("/")[-1] in ("_timestamp", "timestamp", "time", "wall_time") and len(series.values) > 4:
            gaps = np.diff(series.values)
            if gaps.max() > 10 * np.median(gaps):
                return int(series.steps[int(gaps.argmax()) + 1])
    raise ValueError(f"{whole.path} does not show where it resumed: give the step with --at, or both segments")


def judge_seam(before: Segment, after: Segment) -> Seam:
    """Judge every state."""
    found = []
    for name in texts():
        state = JUDGES[name](before, after)
        found.append(state or State(name, "unobserved"))
    return Seam(before, after, tuple(found))


def number(value: float) -> str:
    return f"{value:.4g}"


def same_or_not(id: str, is_changed: bool, before: object, after: object, evidence: str = "") -> State:
    return State(id, "changed" if is_changed else "continues", str(before), str(after), evidence if is_changed else "")


def usual_move(*sides: Floats) -> float:
    """Return the largest change from one step to the next away from the seam."""
    moves = [np.abs(np.diff(side)).max(initial=0.0) for side in sides if len(side) > 1]
    return float(max(moves, default=0.0))


def judge_step(before: Segment, after: Segment) -> State | None:
    last, first = before.steps[-1], after.steps[0]
    stride = int(np.median(np.diff(before.steps))) if len(before.steps) > 1 else 1
    gap = first - last - stride
    what = f"steps {first} to {last} are trained on again" if gap < 0 else f"{gap} steps are missing"
    return same_or_not("step", gap != 0, f"last {last}", f"first {first}", what)


def judge_learning_rate(before: Segment, after: Segment) -> State | None:
    one, other = before.series("lr"), after.series("lr")
    if one is None or other is None:
        return None
    last, first = float(one.values[-1]), float(other.values[0])
    tail, head = one.values[-BESIDE:], other.values[:BESIDE]
    moved = abs(first - last)
    is_changed = moved > max(2.5 * usual_move(tail, head[1:]), LEAST_SHARE * max(abs(last), abs(first)))
    size = min(len(one.values), len(other.values), 4)
    begins = is_changed and size > 1 and np.allclose(one.values[:size], other.values[:size], rtol=1e-3)
    how = "the scheduler begins again: the first values after the resume are those of the run's first steps"
    return same_or_not("learning_rate", is_changed, number(last), number(first), how if begins else "the learning rate jumps")


class Moments(NamedTuple):
    """Adam's state in one file: its step, and the mean of the second moments."""

    step: float
    second: float


def moments_of(file: Path) -> Moments | None:
    steps, sums, count = [], 0.0, 0
    for name, value in leaves(load_pickle(file)):
        if name == "step" and np.size(value) == 1:
            steps.append(float(np.ravel(value)[0]))
        elif name in ("exp_avg_sq", "exp_avg_sqs", "v") and np.size(value):
            sums, count = sums + float(np.asarray(value, np.float64).sum()), count + int(np.size(value))
    return None if not count else Moments(max(steps, default=float("nan")), sums / count)


def leaves(document: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(document, dict):
        for key, value in document.items():
            yield from leaves(value, str(key))
    elif isinstance(document, list):
        for value in document:
            yield from leaves(value, name)
    else:
        yield name, document


def judge_optimizer(before: Segment, after: Segment) -> State | None:
    if not before.optimizers or not after.optimizers:
        return None
    one, other = moments_of(before.optimizers[-1]), moments_of(after.optimizers[0])
    if one is None or other is None:
        return None
    shown = [f"Adam's step {side.step:g}, second moment {side.second:.3g}" for side in (one, other)]
    if other.second == 0.0 and one.second > 0:
        return same_or_not("optimizer", True, *shown, "Adam's moments are 0")
    is_back = other.step < one.step
    is_small = other.step <= 2 < one.step or other.second < 0.01 * one.second
    return same_or_not("optimizer", is_back or is_small, *shown, "the optimizer's state was not loaded: its moments begin again")


def samples_by_prompt(rows: Rows) -> dict[tuple[int, bytes], tuple[int, float]]:
    """Return step and surprise of each sample, by prompt and tokens."""
    surprise = np.zeros(len(rows))
    np.subtract.at(surprise, rows.row_of_token, np.nan_to_num(rows.logprobs))
    return {
        (int(rows.content[row]), rows.tokens(row).tobytes()): (int(rows.step[row]), float(surprise[row]))
        for row in range(len(rows))
        if rows.content[row]
    }


def judge_rng(before: Segment, after: Segment) -> State | None:
    states = [rng_of(side) for side in (before, after)]
    if all(states):
        own, other = states
        if set(other[:1]) & set(own):
            return State("rng", "changed", "states of the generators", "one of them again", "the first state after the resume was there before")
        return State("rng", "continues", "states of the generators", "another state")
    if before.rows is None or after.rows is None:
        return None
    one, other = samples_by_prompt(before.rows), samples_by_prompt(after.rows)
    comparable = {key[0] for key in one} & {key[0] for key in other}
    if not comparable:
        return None
    again = [(one[key][0], step) for key, (step, nats) in other.items() if key in one and nats > COPIED_NATS]
    if len(again) >= FEWEST_PROMPTS:
        shift = int(np.median([step - earlier for earlier, step in again]))
        text = f"{len(again)} samples of equal prompts are the same tokens as {shift} steps before, each of {COPIED_NATS:g} nats or more: the seeds begin again"
        return State("rng", "changed", f"step {again[0][0]}", f"step {again[0][1]}", text)
    return State("rng", "continues", f"{len(comparable)} prompts on both sides", "other samples") if len(comparable) >= FEWEST_PROMPTS else None


def rng_of(side: Segment) -> list[str]:
    """Return the recorded states of the generators of each step, as text."""
    if side.run.record is None:
        return []
    found = []
    for step in side.run.record.steps:
        try:
            states = side.run.record.step(step).plan(0).rng
        except StepNotRecorded:
            return []
        if not states:
            return []
        found.append(str(sorted(states.items())))
    return found


def versions_of(side: Segment) -> tuple[Floats, Floats]:
    """Return (steps, newest version that sampled each); empty if unknown."""
    metric = next((one for name, one in side.run.by_name.items() if name.split("/")[-1] in VERSION_NAMES), None)
    if metric is not None:
        return metric.finite.steps.astype(np.float64), metric.finite.values
    if side.run.record is None:
        return np.zeros(0), np.zeros(0)
    found = []
    for number_ in side.run.record.steps:
        step = side.run.record.step(number_)
        newest = [
            int(versions.max())
            for rank in range(step.manifest.num_ranks)
            if step.known(rank, "versions").all() and len(versions := step.batch(rank, ["versions"])["versions"])
        ]
        if newest and max(newest) >= 0:
            found.append((number_, max(newest)))
    return np.array([one[0] for one in found], np.float64), np.array([one[1] for one in found], np.float64)


VERSION_NAMES = ("version", "weight_version", "policy_version", "trainer_version", "weights_version")


def judge_version(before: Segment, after: Segment) -> State | None:
    (_, one), (_, other) = versions_of(before), versions_of(after)
    if not len(one) or not len(other) or (not one.any() and not other.any()):
        return None
    last, first = float(one.max()), float(other[0])
    back = last - first > max(2.0, usual_move(one))
    ahead = first - last > max(2.0, 3 * usual_move(one))
    text = "the version counter is 0 again" if first == 0 else "the version counter jumps"
    return same_or_not("version", back or ahead, f"last {last:g}", f"first {first:g}", text)


def kl_of(side: Segment) -> Series | None:
    """Return the KL from the policy before each step to the reference, of rows or as logged."""
    if side.run.record is not None:
        steps, values = [], []
        for number_ in side.run.record.steps:
            step = side.run.record.step(number_)
            found = []
            for rank in range(step.manifest.num_ranks):
                try:
                    own = step.learning(rank, ["prox_logp", "ref_logp"])
                except (StepNotRecorded, KeyError):
                    return side.series("reference_kl")
                mask = np.roll(step.batch(rank, ["loss_mask"])["loss_mask"].astype(bool), -1)
                mask[-1:] = False
                d = (own["prox_logp"].astype(np.float64) - own["ref_logp"])[mask]
                found.append(np.expm1(-d) + d)
            joined = np.concatenate(found)
            if len(joined) and np.isfinite(joined).all():
                steps.append(number_)
                values.append(float(joined.mean()))
        if values:
            return Series("KL of the recorded log-probs", np.array(steps), np.array(values))
    return side.series("reference_kl")


def judge_reference(before: Segment, after: Segment) -> State | None:
    one, other = kl_of(before), kl_of(after)
    if one is None or other is None or not (one.values.any() or other.values.any()):
        return None
    tail, first = one.values[-BESIDE:], float(other.values[0])
    level = float(np.median(tail))
    is_reset = first < NOTHING_LEFT * level and first < 0.5 * tail.min() and level > 1e-6
    is_far = first > 10 * max(level, 1e-4) and first - level > JUMP * usual_move(tail, other.values[:BESIDE])
    shown = number(level), number(first)
    if is_reset:
        return same_or_not("reference", True, *shown, "the reference changed: the KL begins again at 0, so the reference is the resumed policy")
    return same_or_not("reference", is_far, *shown, "the reference changed: the KL jumps to another level")


def jumps(before: Segment, after: Segment, *quantities: str) -> tuple[float, float, bool, str] | None:
    """Return level before, value after, whether it jumps, and the name of the first quantity."""
    one, other = before.series(*quantities), after.series(*quantities)
    if one is None or other is None or len(one.values) < 2:
        return None
    tail, head = one.values[-BESIDE:], other.values[:BESIDE]
    level, first = float(np.median(tail)), float(head[0])
    return level, first, abs(first - level) > JUMP * max(usual_move(tail), usual_move(tail, head[1:]) / 2, 1e-9), one.name


def judge_engine(before: Segment, after: Segment) -> State | None:
    found = jumps(before, after, "logprob_difference", "k3", "behave_kl")
    if found is None:
        return None
    level, first, is_jump, name = found
    is_changed = is_jump and first > 3 * level and first > 1e-3
    text = f"{name} is {first / max(level, 1e-12):.0f} times larger in the first step: the engine sampled with other weights; areal-debug consistency RECORD --model CHECKPOINT --base FIRST names them"
    return same_or_not("engine", is_changed, number(level), number(first), text)


def prompts_in_order(rows: Rows) -> list[int]:
    """Return the prompts of each group, in order."""
    _, at = np.unique(rows.group, return_index=True)
    return [int(rows.content[row]) for row in sorted(at.tolist()) if rows.content[row]]


def judge_data(before: Segment, after: Segment) -> State | None:
    if before.rows is None or after.rows is None:
        return None
    one, other = prompts_in_order(before.rows), prompts_in_order(after.rows)
    if len(one) < FEWEST_PROMPTS or len(other) < FEWEST_PROMPTS:
        return None
    size = min(len(one), len(other))
    same = [a == b for a, b in zip(one[:size], other[:size], strict=True)]
    first = same.index(False) if False in same else size
    if first >= FEWEST_PROMPTS:
        text = f"the first {first} prompts after the resume are those of the run's beginning, in the same order: the data is read again"
        return State("data", "changed", f"{len(set(one))} prompts", f"{first} again", text)
    tail = one[-(len(other) // max(1, len(set(after.rows.step.tolist())))) :] or one[-1:]
    if len(tail) >= FEWEST_PROMPTS and other[: len(tail)] == tail:
        return State("data", "changed", "the last step's prompts", "the same", "the prompts of the last step are trained on again")
    if len(set(one)) < len(one) or set(one) & set(other):  # prompts come again by themselves
        return State("data", "continues", "prompts repeat", "in another order than the run's beginning")
    return State("data", "continues", f"{len(set(one))} prompts", f"{len(set(other))} others")


def judge_staleness(before: Segment, after: Segment) -> State | None:
    one, other = before.series("staleness"), after.series("staleness")
    if one is None or other is None or len(one.values) < 3 or len(other.values) < 3:
        return None
    most, later = float(one.values[len(one.values) // 4 :].max()), float(other.values[-BESIDE:].max())
    most, later = max(most, 0.0), max(later, 0.0)
    return same_or_not("staleness", later > most + 1.5, f"at most {most:g} versions", f"up to {later:g}", "samples become staler than ever before the resume: the bound counts from another start")


def judge_layout(before: Segment, after: Segment) -> State | None:
    differing = {
        name: (before.config.get(name), after.config.get(name))
        for name in sorted(before.config.keys() | after.config.keys())
        if before.config.get(name) != after.config.get(name) and not OF_PATHS & set(name.lower().split("."))
    }
    if differing:
        shown = "; ".join(f"{name} {one} -> {other}" for name, (one, other) in list(differing.items())[:6])
        first = next(iter(differing.values()))
        return State("layout", "changed", str(first[0]), str(first[1]), f"options differ: {shown}")
    if before.rows is None or after.rows is None:
        return State("layout", "continues", "options", "equal") if before.config and after.config else None
    counts = [np.unique(side.rows.step, return_counts=True)[1] for side in (before, after) if side.rows is not None]
    ranks = [{side.run.record.step(n).manifest.num_ranks for n in side.run.record.steps[:1]} for side in (before, after) if side.run.record]
    level, first = int(np.median(counts[0])), int(counts[1][0])
    is_changed = abs(first - level) > max(usual_move(counts[0].astype(float)), 0.2 * level) or ranks[0] != ranks[-1]
    return same_or_not("layout", is_changed, f"{level} rows a step, {ranks[0]} ranks", f"{first} rows, {ranks[-1]} ranks", "rows of a step or ranks differ")


OF_PATHS = {"path", "folder", "output_dir", "save", "load", "experiment_name", "trial_name", "run_name", "name", "resume", "recover", "resume_from_checkpoint", "resume_mode"}


def judge_reward(before: Segment, after: Segment) -> State | None:
    found = jumps(before, after, "reward")
    if found is None:
        return None
    level, first, is_jump, _ = found
    one, other = before.series("reward"), after.series("reward")
    assert one is not None and other is not None
    stays = abs(float(np.median(other.values[:BESIDE])) - level) > 3 * usual_move(one.values[-2 * BESIDE :])
    return same_or_not("reward", is_jump and stays, number(level), number(first), "the level of the reward jumps")


JUDGES: dict[str, Callable[[Segment, Segment], State | None]] = {
    "step": judge_step,
    "learning_rate": judge_learning_rate,
    "optimizer": judge_optimizer,
    "rng": judge_rng,
    "version": judge_version,
    "reference": judge_reference,
    "engine": judge_engine,
    "data": judge_data,
    "staleness": judge_staleness,
    "layout": judge_layout,
    "reward": judge_reward,
}

LEVELS: dict[str, Level] = {"changed": "bad", "continues": "good", "unobserved": "dim"}


def document_of(found: Seam) -> dict[str, Any]:
    """Return the report as JSON types, what changed first."""

    def state(one: State) -> dict[str, str]:
        row = texts()[one.id]
        facts = {"title": row["title"], "state": one.verdict, "before": one.before, "after": one.after}
        more = {"changed": {"what": one.evidence, "fix": row["fix"]}, "unobserved": {"record": row["record"]}}
        return {"id": one.id} | facts | more.get(one.verdict, {})

    order = sorted(found.states, key=lambda one: list(LEVELS).index(one.verdict))
    return {
        "verdict": found.verdict,
        "before": {"path": str(found.before.path), "last_step": found.before.steps[-1]},
        "after": {"path": str(found.after.path), "first_step": found.after.steps[0]},
        "states": [state(one) for one in order],
    }


def report_of(found: Seam) -> Report:
    """Return the verdict, the table of all states, and what to restore and to record."""
    changed, unseen = found.having("changed"), found.having("unobserved")
    titles = ", ".join(texts()[one.id]["title"] for one in changed)
    seam = f"between step {found.before.steps[-1]} and step {found.after.steps[0]}"
    word, level = {"changed": ("Changed", "bad"), "continues": ("Continues", "good")}.get(found.verdict, ("Inconclusive", "unsure"))
    sentence = f"{titles}, {seam}" if changed else f"no state that is observed changed {seam}"
    cells = [
        [texts()[one.id]["title"], Cell(one.verdict, LEVELS[one.verdict]), one.before, one.after] for one in found.states
    ]
    rows = [Row(texts()[one.id]["title"], one.evidence, "bad") for one in changed]
    rows += [Row("restore", texts()[one.id]["fix"]) for one in changed]
    rows += rows_of("to observe", [f"{texts()[one.id]['title']}: {texts()[one.id]['record']}" for one in unseen], "dim")
    rows.append(Row("refuted if", "an unbroken run of the same options shows the same jump at this step", "dim"))
    note = f"{len(unseen)} of {len(found.states)} states are unobserved"
    return Report(word, sentence, level, [Table(("state", "verdict", "before", "after"), cells), Facts(rows)], [note])
