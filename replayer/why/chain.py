"""The order of questions that leads from two records to one sentence.

comparable? ─> first step, stage, tensor, row, token ─> pattern ─> what was set differently
   ─> what acts there: options, model files, code, environment ─> proven by running steps again
   ─> equal weights and prompts, other tokens: which engine     ─> verdict
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from recorder import Record
from replayer.check import member
from replayer.commits.outside import code_differences, unknown_code
from replayer.compare.patterns import causal_tensor, find_pattern, same_weights
from replayer.compare.relations import count, listed
from replayer.compare.stages import STAGES
from replayer.diff import DiffReport, common_steps, diff_records
from replayer.errors import ReplayError
from replayer.own_code import compare_own_code
from replayer.why.causes import (
    Case,
    History,
    commits_of,
    config_candidates,
    environment_candidates,
    model_candidates,
    outside_candidates,
    read_history,
    settings_of,
    unknown_finding,
)
from replayer.why.proofs import (
    Options,
    code_finding,
    engine_finding,
    is_replayable,
    option_finding,
    without_settings,
)
from replayer.why.report import Finding, Setting, WhyReport


def explain(left: Record, right: Record, options: Options, is_replay: bool = False) -> WhyReport:
    """Say why two records differ.

    Args:
        is_replay: `right` is a replay of `left`, made here.

    Raises DamagedRecord, RecordError.
    """
    try:
        report = diff_records(left, right, fast=options.fast)
    except ReplayError as error:
        return WhyReport(left.path, right.path, "not comparable", str(error), 0, 0)
    if report.first is None:
        return identical(left, right, report, is_replay)
    if report.unrelated is not None:
        reason = f"A and B are of different runs: {report.unrelated}"
        return WhyReport(
            left.path, right.path, "not comparable", reason, report.num_compared, report.num_shared
        )
    diverged_at, independent = first_weights(left, right, report)
    also: tuple[str, ...] = ()
    if independent is not None:
        also = (
            f"step {report.step} has other numbers before that, with equal weights: {report.first.name}, stage {report.first.stage}",
        )
        report = independent
    case = make_case(left, right, report, is_replay)
    settings = settings_of(case)
    finding = find_cause(case, settings, options)
    return report_of(case, settings, finding, diverged_at, also)


def identical(left: Record, right: Record, report: DiffReport, is_replay: bool) -> WhyReport:
    """Return that all common steps have the same bits, and what was set without effect."""
    compared = f"{report.num_compared} of {report.num_shared} common steps compared"
    what = "all that both records know has the same bits" if report.not_known else "all have the same bits"
    compared += " by their recorded checksums" * report.by_checksums
    header = report.set_differently
    settings = tuple(
        Setting(section, item.where, item.recorded, item.current, False, "had no effect on any number")
        for section in ("config", "model", "environment")
        for item in getattr(header, section)
    )
    only = [
        f"{side} alone has {count(len(steps), 'step')} ({listed(list(map(str, steps)))})"
        for side, steps in (("A", report.only_left), ("B", report.only_right))
        if steps
    ]
    return WhyReport(
        left.path,
        right.path,
        "identical",
        f"{compared}, {what}",
        report.num_compared,
        report.num_shared,
        settings=settings,
        also=(*only, *map(str, compare_own_code(left.header, right.header, is_replay))),
        not_known=report.not_known,
        not_compared=report.not_compared,
    )


def first_weights(left: Record, right: Record, report: DiffReport) -> tuple[int | None, DiffReport | None]:
    """Return the first common step after which the weights differ, None if none or not recorded.

    With the report on that step, if its first difference cannot follow from the one in `report`:
    the step began with equal weights, and differs at an earlier stage.
    """
    assert report.step is not None
    assert report.first is not None
    steps = [step for step in common_steps(left, right) if step >= report.step]
    equal = {step: same_weights(left.step(step), right.step(step)) for step in (steps[0], steps[-1])}
    if None in equal.values() or equal[steps[-1]]:
        return None, None
    found = steps[
        bisect_left(steps[:-1], True, key=lambda step: not same_weights(left.step(step), right.step(step)))
    ]
    if found == report.step:
        return found, None
    later = diff_records(left, right, found, fast=report.by_checksums)
    assert later.first is not None
    is_independent = STAGES.index(later.first.stage) < STAGES.index(report.first.stage)
    return found, later if is_independent else None


def make_case(left: Record, right: Record, report: DiffReport, is_replay: bool) -> Case:
    assert report.step is not None
    step, foreign = report.step, (left.header.trainer is not None, right.header.trainer is not None)
    here, there = left.step(step), right.step(step)
    first = causal_tensor(report.differences)
    pattern = find_pattern(here, there, first, foreign)
    outside = code_differences(left.header, right.header, is_replay)
    before = weights_before(left, right, step)
    return Case(left, right, step, first, pattern, report, outside, before, is_replay)


def weights_before(left: Record, right: Record, step: int) -> bool | None:
    """Return whether both started a step from equal weights, None if it is not recorded."""
    earlier = [number for number in left.steps if number in right.steps and number < step]
    if earlier:
        return same_weights(left.step(earlier[-1]), right.step(earlier[-1]))
    files = [record.header.model["files"] for record in (left, right)]
    critics = [member(record.header.config, "critic.path") for record in (left, right)]
    return files[0] == files[1] if step == 0 and all(files) and critics[0] == critics[1] else None


def find_cause(case: Case, settings: Sequence[Setting], options: Options) -> Finding:
    """Return the cause of a difference, as far as it can be shown."""
    config = [*model_candidates(case, settings), *config_candidates(case, settings)]
    config.sort(key=lambda candidate: candidate.distance)
    if case.weights_before is False and not config:
        unknown = unknown_finding(
            case, "the weights differ already before the first step that both records have"
        )
        what = "the runs had other weights before the first step that both records have"
        return replace(unknown, cause=replace(unknown.cause, what=what), confidence="high")
    around = [*outside_candidates(case), *environment_candidates(case, settings)]
    around.sort(key=lambda candidate: candidate.distance)
    if not config and around and around[0].distance < 0:  # the user's own code
        # a file without the function that differs may have another comment alone
        alone = len(around) == 1 and len(set(commits_of(case))) == 1 and around[0].cause.line is not None
        return around[0].sure("high" if alone else "medium")
    history = read_history(case, options.repository, commits_of(case))
    notes: tuple[str, ...] = (history,) if isinstance(history, str) else ()
    without_replay = replace(options, replay=None)
    can_replay = options.replay is not None and is_replayable(case)
    code = history if isinstance(history, History) and history.acting else None
    if isinstance(history, History) and not history.acting:
        notes = (
            f"{history.num_commits} commits are between A and B, and none changed what the {case.first.stage} runs",
        )
    if config:
        others = len(config) - 1 + len(around) + (code is not None)
        found = option_finding(case, config[0], others, options if can_replay else without_replay)
        if found is not None:
            return found.with_evidence(*notes)
        notes += (f"{config[0].evidence[0]}, but A replayed with it is as before",)
    if code is not None:
        found = code_finding(case, code, bool(around), options if can_replay else without_replay)
        if found is not None:
            engine = engine_finding(case, options)
            if engine is not None and engine.cause.kind == "engine":
                cause = replace(found.cause, kind="engine", what=f"{engine.cause.what}; {found.cause.what}")
                found = replace(engine, cause=cause, next=found.next).with_evidence(*found.evidence)
            return found.with_evidence(*notes)
        notes += ("A has the same numbers by the code of both commits",)
    if around:
        is_sure = len(around) == 1 and not notes and case.left.header.trainer is None
        return around[0].sure("high" if is_sure else "medium", *notes)
    if isinstance(history, History) and code is None and can_replay:
        # what a stage runs is read from its code, which may call what cannot be read
        found = code_finding(case, history, False, options)
        if found is not None:
            return found
        notes += ("A has the same numbers by the code of both commits",)
    return without_settings(case, options).with_evidence(*notes)


def report_of(
    case: Case,
    settings: Sequence[Setting],
    finding: Finding,
    diverged_at: int | None,
    also: tuple[str, ...],
) -> WhyReport:
    """Collect the answer."""
    report, pattern = case.report, case.pattern
    equal = ["weights before the step"] if case.weights_before else []
    own = compare_own_code(case.left.header, case.right.header, case.is_replay)
    equal += [one.whose for one in own if not one.changed]
    earlier = STAGES[: STAGES.index(case.first.stage)]
    equal += [stage for stage in earlier if stage not in report.not_compared]
    last = common_steps(case.left, case.right)[-1]
    ends_equal = same_weights(case.left.step(last), case.right.step(last))
    return WhyReport(
        left=case.left.path,
        right=case.right.path,
        verdict="same weights, other numbers" if ends_equal else "diverged",
        reason="",
        num_compared=report.num_compared,
        num_shared=report.num_shared,
        finding=finding,
        step=case.step,
        difference=case.first,
        diverged_at=diverged_at,
        pattern=None if pattern is None else pattern.kind,
        pattern_detail=None if pattern is None else pattern.why,
        pattern_value=None if pattern is None else pattern.value,
        settings=tuple(settings),
        also=also,
        not_known=(*report.not_known, *unknown_code(case.left.header, case.right.header)),
        not_compared=report.not_compared,
        equal=tuple(equal),
    )
