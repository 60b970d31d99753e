"""Judge a replay; if noise may explain a difference, measure the noise floor by replaying again.

replay ─> identical? ─yes─> done
             no ─> bitwise guarantee      ─> different
                   noise guarantee        ─> replay with other micro-batches ─> noise floor ─> k
                   statistical guarantee  ─> paired over steps
                   settings were changed  ─> numbers next to each other, no verdict
"""

from collections.abc import Callable
from dataclasses import replace

from areal_core.telemetry.loggers import NUM_MICRO_BATCHES
from recorder import Record, open_record
from replayer.check import ReplayReport, number_of
from replayer.noise import Finding, Verdict, judge_by_noise, judge_statistically, noise_floor
from replayer.request import Request


def replay_and_judge(
    request: Request,
    run: Callable[[Request], ReplayReport],
    before_rerun: Callable[[str], None] = lambda why: None,
) -> ReplayReport:
    """Replay, and return the report with its verdict.

    Args:
        request: record, steps, and what is changed.
        run: replays (`replayer.replay_and_compare`, or on several ranks); called again to measure
            noise.
        before_rerun: called with the reason, a sentence, before that.

    Raises:
        Exception: what `run` raises.
    """
    report = run(request)
    report.verdict = verdict_at_once(report)
    if report.verdict is None:
        before_rerun(
            "bits differ, as the guarantee allows: the steps run again to measure the effect of rounding alone"
        )
        others = [run(other) for other in noise_reruns(open_record(request.record), request, report)]
        noise = noise_floor(report.replayed, [other.replayed for other in others])
        report.verdict = judge_by_noise(report.recorded, report.replayed, noise)
        if not others and report.verdict.finding == "different":
            # only rounding was known of the noise
            report.verdict = replace(report.verdict, finding="unclear")
    return report


def verdict_at_once(report: ReplayReport) -> Verdict | None:
    """Return the verdict if it needs no other run, else None."""
    if report.guarantee.kind == "unrecorded":
        return Verdict("unclear", None, None, None)
    if report.identical:
        return Verdict("identical", 0.0, None, None)
    first = report.first_different
    if first is None:
        return Verdict("unclear", None, None, None)
    if report.guarantee.kind == "statistical":
        return judge_statistically(report.recorded, report.replayed)
    if report.guarantee.kind in ("bitwise", "changed"):
        finding: Finding = "different" if report.guarantee.kind == "bitwise" else "changed"
        return Verdict(finding, None, first.differences[0].where, first.step)
    return None


def noise_reruns(record: Record, request: Request, report: ReplayReport) -> list[Request]:
    """Return requests for the same steps with other rounding.

    Rows are divided into twice as many micro-batches, or, if each has one row already, into one. A
    run that was not deterministic also runs once more unchanged. Empty if a minibatch is a single
    row.
    """
    request = replace(request, locate=False)
    reruns = [] if record.header.config["deterministic"] else [request]
    num_micro_batches = max(round(number_of(result.replayed, NUM_MICRO_BATCHES)) for result in report.steps)
    recorded = record.step(report.steps[0].step)
    plans = [recorded.plan(rank).details for rank in range(recorded.manifest.num_ranks)]
    if num_micro_batches < min(len(m["rows"]) for plan in plans for m in plan["minibatches"]):
        other: tuple[str, ...] = (f"mb_spec.n_mbs={2 * num_micro_batches}",)
    elif num_micro_batches > 1:
        other = ("mb_spec.n_mbs=1", "mb_spec.max_tokens_per_mb=null")
    else:
        return reruns
    config = record.header.config
    learning = ("actor", "critic") if "critic" in config and config["critic"] is not None else ("actor",)
    settings = tuple(f"{model}.{option}" for model in learning for option in other)
    return [*reruns, replace(request, settings=request.settings + settings, stop_at_difference=False)]
