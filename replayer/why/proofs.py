"""Findings that steps, run again here, prove or refute.

options ──> A replayed with B's options has B's bits?
commits ──> A replayed by each commit (`code_causes`)
engine  ──> weights before the step, from a replay ─> which engine sampled otherwise
nothing ──> A replayed twice: are its own bits repeatable?
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from recorder import Record
from replayer.compare.stages import STAGES, StageDifference, compare_steps, prompts_of
from replayer.diff import INPUTS, judge_size
from replayer.errors import NothingToBisect, ReplayError
from replayer.own_code import is_allowed
from replayer.why.causes import (
    Case,
    History,
    Note,
    aligned_finding,
    bisected,
    data_finding,
    diff_command,
    finding,
    order_finding,
    replay_command,
    static_finding,
    unknown_finding,
)
from replayer.why.report import Cause, Confidence, Finding


@dataclass(frozen=True)
class Options:
    """How far an answer may go.

    Attributes:
        repository: has the recorded commits. model: of the runs, if it has moved.
        replay: called with a record, a step, settings, and whether to use a process that shares
            nothing with others'; returns the record of that, None if it fails. None: run nothing.
        ask_engines: called with both records, a step and `model`; says whose engine sampled
            otherwise. Raises RecordError, ValueError.
        note: called with a sentence before what takes time.
        fast: compare recorded checksums where they are equal, and not bytes.
    """

    repository: Path
    model: str | None = None
    replay: Callable[..., Record | None] | None = None
    ask_engines: Callable[[Record, Record, int, str | None], Any] | None = None
    note: Note = lambda text: None
    fast: bool = False


def first_of(left: Record, right: Record, step: int) -> StageDifference | None:
    """Return the first difference of a step of two records of ours."""
    return next(iter(compare_steps(left.step(step), right.step(step))), None)


def is_before(one: StageDifference | None, other: StageDifference) -> bool:
    return one is not None and STAGES.index(one.stage) <= STAGES.index(other.stage)


# patterns of a mask, which no layer computes
OF_MASKS = ("other support", "shifted")


def is_replayable(case: Case) -> bool:
    """Return whether a replay of A computes what differs: it takes the batch from the record."""
    header = case.left.header
    known = header.config_is_ours and is_allowed(case.left)
    return case.first.stage != "batch" and known and header.recording.has_plans


def option_finding(case: Case, candidate: Finding, others: int, options: Options) -> Finding | None:
    """Judge options, or model files, that were set differently; None if a replay refutes them.

    Args:
        others: what else is not the same and can act there.
    """
    alone = others == 0 and len(candidate.settings) <= 1
    run = options.replay
    if alone or run is None or not candidate.settings:
        is_likely = candidate.distance == 0 or not others
        confidence: Confidence = "high" if alone else "medium" if is_likely else "low"
        if case.left.header.trainer is not None and candidate.settings:  # where they act is not known
            confidence = "medium" if alone else "low"
        return candidate.sure(confidence)
    options.note(f"replaying step {case.step} of A with {' '.join(candidate.settings)}")
    changed = run(case.left, case.step, candidate.settings)
    if changed is None:
        return candidate.sure("medium", "A could not be replayed here with B's options")
    if not is_before(first_of(changed, case.right, case.step), case.first):
        proof = (
            f"A, replayed here with B's options, has B's bits at the {case.first.stage} of step {case.step}"
        )
        return isolated(case, candidate, run, options.note).sure("high", proof)
    plain = run(case.left, case.step)
    if plain is not None and not is_before(first_of(plain, changed, case.step), case.first):
        return None
    return candidate.sure("medium", "A, replayed here with B's options, has neither A's nor B's bits")


def isolated(case: Case, candidate: Finding, run: Callable[..., Record | None], note: Note) -> Finding:
    if len(candidate.settings) == 1:
        return candidate
    for setting in candidate.settings[:3]:
        note(f"replaying step {case.step} of A with {setting}")
        changed = run(case.left, case.step, (setting,))
        if changed is not None and not is_before(first_of(changed, case.right, case.step), case.first):
            what = f"{setting.partition('=')[0]} was set differently ({setting} in B)"
            return replace(candidate, cause=replace(candidate.cause, what=what), settings=(setting,))
    return candidate


def code_finding(case: Case, history: History, has_rivals: bool, options: Options) -> Finding | None:
    """Judge the commits between A and B; None if replays refute them."""
    if options.replay is None:
        found = static_finding(case, history)
        return replace(found, confidence="medium") if has_rivals and found.confidence == "high" else found
    try:
        changed = bisected(case, history, options.model, options.note)
        return changed and with_layer(case, changed, history, options)
    except NothingToBisect as error:
        found = static_finding(case, history)
        return replace(found, confidence="medium").with_evidence(f"no commit could be replayed: {error}")


def with_layer(case: Case, found: Finding, history: History, options: Options) -> Finding:
    """Add the first layer that differs, of log-probs that the model computes otherwise."""
    is_forward = case.first.stage == "logprobs" and case.first.name != "loss_mask"
    if not is_forward or (case.pattern is not None and case.pattern.kind in OF_MASKS):
        return found
    from replayer.commits.warm import layers_with_own_code

    options.note(f"tracing the layers of step {case.step} of A and B, each by its own commit")
    try:
        traced = layers_with_own_code(case.left, case.right, case.step, options.model, history.repository)
    except ReplayError as error:
        return found.with_evidence(f"layers could not be traced: {error}")
    if traced.name is None:
        return found
    given = "its input differs already" if traced.input_differs else "its input is the same"
    return replace(found, layer=traced.name).with_evidence(
        f"the first layer with another output is {traced.name} ({traced.kind}); {given}"
    )


def engine_finding(case: Case, options: Options) -> Finding | None:
    """Ask which engine is at fault where equal weights and prompts got other tokens.

    None if it cannot be asked: the batch differs in something else, or no weights can be made.
    """
    header = case.left.header
    if (
        case.kind_of_batch != "engine"
        or options.ask_engines is None
        or not (header.config_is_ours and header.recording.has_plans)
    ):
        return None
    from recorder.errors import RecordError

    options.note(f"making the weights of step {case.step}, and asking both engines")
    try:
        answer = options.ask_engines(case.left, case.right, case.step, options.model)
    except (RecordError, ValueError) as error:
        return unknown_finding(case, f"the engines could not be asked: {error}")
    if answer.side is None or answer.kind == "none":
        return by_chance(case, answer.evidence)
    whose = "the engines of both" if answer.side == "both" else f"the engine of {answer.side}"
    record = case.left if answer.side == "A" else case.right
    return Finding(
        Cause("engine", f"{whose} sampled otherwise: {answer.cause}"),
        answer.confidence,
        answer.evidence,
        f"{whose}, asked again with the weights of step {case.step}, returns the recorded log-probs",
        consistency_command(record, case.step),
    )


def consistency_command(record: Record, step: int) -> str:
    return f"areal-debug consistency {quote(record.path)} --step {step}"


def by_chance(case: Case, evidence: tuple[str, ...]) -> Finding:
    """Judge tokens that differ though neither engine is at fault."""
    header = case.left.header
    if header.trainer is not None:
        command = diff_command(case)
        if aligned := aligned_finding(case, command):
            return aligned
        here, there = prompts_of(case.left.step(case.step), case.right.step(case.step))
        if list(here.values()) != list(there.values()):
            return order_finding(case, command)
        return finding("sampling_of_others", command, *evidence)
    command = consistency_command(case.left, case.step)
    rollout = header.config["rollout"] if isinstance(header.config.get("rollout"), dict) else {}
    if rollout.get("max_head_offpolicyness"):
        return finding("asynchronous", command, *evidence)
    if not str(header.allocation).startswith("embedded"):
        return finding("server", command, *evidence)
    return unknown_finding(case, INPUTS.get(case.first.name, "the batch differs"), *evidence)


def without_settings(case: Case, options: Options) -> Finding:
    """Judge a difference of records whose settings, code and environment are the same."""
    found = data_finding(case)
    if found is None and case.kind_of_batch == "engine":
        found = engine_finding(case, options) or by_chance(case, ())
    if found is not None:
        return found
    same = "no option, model file, code or variable that could act differs, as far as they are recorded"
    if options.replay is not None and is_replayable(case):
        return repeated(case, options).with_evidence(same)
    return by_size(case).with_evidence(same)


def repeated(case: Case, options: Options) -> Finding:
    """Replay the step twice, and judge whether its bits are repeatable."""
    assert options.replay is not None
    options.note(f"replaying step {case.step} of A, twice")
    replays = [options.replay(case.left, case.step, apart=True) for _ in range(2)]
    if replays[0] is None or replays[1] is None:
        return by_size(case).with_evidence("A could not be replayed here")
    between = first_of(replays[0], replays[1], case.step)
    if between is not None:
        command = replay_command(case.left, case.step)
        return finding("not_deterministic", command, stage=between.stage, name=between.name)
    sides = [
        name
        for name, record in (("A", case.left), ("B", case.right))
        if not is_before(first_of(record, replays[0], case.step), case.first)
    ]
    said = f"two replays of A here have equal bits, and those of {' and '.join(sides) or 'neither record'}"
    return by_size(case).with_evidence(said)


def by_size(case: Case) -> Finding:
    """Return nondeterminism if rounding explains the size of the difference, else unknown."""
    verdict = judge_size(case.first, case.left.header.config)
    if verdict.cause != "kernel noise" or not is_rounding(case.first, case):
        return unknown_finding(case, verdict.why)
    return finding("rounding", replay_command(case.left, case.step), verdict.why)


def is_rounding(first: StageDifference, case: Case) -> bool:
    return first.largest is not None or (case.pattern is not None and case.pattern.kind == "rounding")
