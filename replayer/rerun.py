"""Judges a replay, and where noise may explain what differs, measures that noise by replaying once more.

replay ─> identical? ─yes─> done
             no ─> bits were promised  ─> different
                   noise was promised  ─> replay divided into other micro-batches ─> own noise ─> k
                   steps, statistically ─> paired over steps
                   something was set differently ─> numbers beside each other, no verdict
"""

from collections.abc import Callable
from dataclasses import replace

from recorder import Record, open_record
from replayer.check import ReplayReport
from replayer.noise import Finding, Verdict, judge, judge_statistically, own_noise
from replayer.request import Request

NUM_MICRO_BATCHES = "ppo_actor/update/num_micro_batches"


def replay_and_judge(
    request: Request,
    run: Callable[[Request], ReplayReport],
    before_rerun: Callable[[str], None] = lambda why: None,
) -> ReplayReport:
    """The report of a replay with its verdict.

    Args:
        run: replays (`replayer.run.replay_here`, or on several ranks); called again where noise must be measured.
        before_rerun: told why, in a sentence.
    """
    report = run(request)
    report.verdict = verdict_at_once(report)
    if report.verdict is None:
        before_rerun(
            "bits differ, as they may: the steps run again, to see how far rounding alone moves them"
        )
        others = [run(other) for other in own_reruns(open_record(request.record), request, report)]
        noise = own_noise(report.replayed, [other.replayed for other in others])
        report.verdict = judge(report.recorded, report.replayed, noise)
        if not others and report.verdict.finding == "different":
            report.verdict = replace(report.verdict, finding="unclear")  # nothing but a floor was known
    return report


def verdict_at_once(report: ReplayReport) -> Verdict | None:
    """The verdict that needs no other run, or None."""
    if report.promise.kind == "unrecorded":
        return Verdict("unclear", None, None, None)
    if report.identical:
        return Verdict("identical", 0.0, None, None)
    first = report.first_different
    if first is None:
        return Verdict("unclear", None, None, None)
    if report.promise.kind == "statistical":
        return judge_statistically(report.recorded, report.replayed)
    if report.promise.kind in ("bitwise", "changed"):
        finding: Finding = "different" if report.promise.kind == "bitwise" else "changed"
        return Verdict(finding, None, first.differences[0].where, first.step)
    return None


def own_reruns(record: Record, request: Request, report: ReplayReport) -> list[Request]:
    """The same steps with other rounding: rows in twice as many micro-batches, or, where each has one already, in one.

    A run that was not deterministic runs once more as it was, too. Nothing, where a minibatch is a single row.
    """
    reruns = [] if record.header.config["deterministic"] else [request]
    num_micro_batches = max(round(result.replayed[NUM_MICRO_BATCHES]) for result in report.steps)
    if num_micro_batches < smallest_minibatch(record, report.steps[0].step):
        other: tuple[str, ...] = (f"mb_spec.n_mbs={2 * num_micro_batches}",)
    elif num_micro_batches > 1:
        other = ("mb_spec.n_mbs=1", "mb_spec.max_tokens_per_mb=null")
    else:
        return reruns
    config = record.header.config
    learning = ("actor", "critic") if "critic" in config and config["critic"] is not None else ("actor",)
    settings = tuple(f"{model}.{option}" for model in learning for option in other)
    return [*reruns, replace(request, settings=request.settings + settings, stop_at_difference=False)]


def smallest_minibatch(record: Record, step: int) -> int:
    """Rows of the smallest minibatch on any rank."""
    recorded = record.step(step)
    ranks = range(recorded.manifest.num_ranks)
    return min(len(m["rows"]) for rank in ranks for m in recorded.plan(rank).details["minibatches"])
