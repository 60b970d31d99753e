"""Diagnose two columns of logprobs by structure, replayed hypotheses, shape and noise."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from consistency.case import Alternative, Case, Finding, Setting
from consistency.causes import alignment, architecture, definition, engine, numerics, weights
from consistency.causes.definition import in_logprobs, log_units
from consistency.derive import with_derived
from consistency.measure import Measurement, measure
from consistency.replay import Replays
from consistency.rescoring import Rescoring
from consistency.score import Scores
from consistency.third import TrainerCheck
from consistency.tokens import Sequences, TokenTable, compare_tokens

CONFIDENT = 0.5
CAUSES: tuple[Callable[[Case], Finding | None], ...] = (
    *alignment.CAUSES,
    *definition.CAUSES,
    *weights.CAUSES,
    *architecture.CAUSES,
    *engine.CAUSES,
    *numerics.CAUSES,
)


@dataclass(frozen=True)
class Diagnosis:
    """`verdict` is healthy, mismatch or unknown; `causes` come most likely first.

    `missing` lists data that would allow a more specific verdict.
    """

    verdict: str
    causes: tuple[Finding, ...]
    missing: tuple[str, ...]
    surprise: float
    table: TokenTable
    measurement: Measurement


def diagnose(
    sequences: Sequences,
    scores: Scores,
    setting: Setting,
    replays: Replays | None = None,
    alternatives: Sequence[Alternative] = (),
    rescoring: Rescoring | None = None,
    trainer_check: TrainerCheck | None = None,
) -> Diagnosis:
    """Compare an engine's logprobs with the trainer's and name the likely causes.

    Args:
        scores: of `sequences` at `setting.temperature`.
        replays: of the same sequences at the same temperature; without them only structure and
            shape are examined.
        alternatives: logprobs of the tokens of `replays.sample` under other conditions, which
            identify stale weights, BOS and dtypes.
        rescoring: second logprobs of the same tokens by engine and model.
        trainer_check: comparison with the trainer's own path.

    Raises:
        NothingToCompare: no token has a logprob on both sides.
    """
    findings: list[Finding] = []
    units = log_units(sequences.engine_logprobs[sequences.scored], scores.logprob)
    if units is not None:
        findings.append(units)
        sequences = replace(sequences, engine_logprobs=in_logprobs(units, sequences.engine_logprobs))
    table = compare_tokens(sequences, scores.logprob)
    if replays is not None:
        replays = with_derived(replays, sequences, alternatives)
    measurement = measure(table)
    assert all(identity.holds for identity in measurement.identities), measurement.identities
    case = Case(sequences, table, scores, measurement, setting, replays, rescoring, trainer_check)
    findings += [finding for cause in CAUSES if (finding := cause(case)) is not None]
    faults = any(is_accusation(finding) for finding in findings)
    # Ordinary noise (R35) and a policy that moved (R57) account for the difference.
    harmless = any(finding.id in ("R35", "R57") for finding in findings)
    verdict = "mismatch" if faults else "healthy" if harmless else "unknown"
    causes = sorted(findings, key=lambda finding: (not is_accusation(finding), -finding.confidence))
    missing = () if verdict != "unknown" else missing_columns(case, alternatives)
    return Diagnosis(verdict, tuple(causes), missing, case.surprise, table, case.measurement)


def is_accusation(finding: Finding) -> bool:
    """Return whether a finding alone makes the verdict a mismatch."""
    return finding.fault and finding.confidence >= CONFIDENT


def missing_columns(case: Case, alternatives: Sequence[Alternative]) -> tuple[str, ...]:
    """List missing data that would distinguish the remaining causes."""
    given = {alternative.cause for alternative in alternatives}
    wanted = {
        "full logits: a model to score with (--model)": case.replays is None,
        "the checkpoint before this one (--previous), to recognise stale weights": "R24" not in given,
        "versions: the weight version of each token": case.sequences.versions is None,
        "worker: the engine that answered each sequence": case.sequences.worker is None,
        "cached_tokens: how much of each prompt came from the prefix cache": case.sequences.cached_tokens
        is None,
    }
    return tuple(name for name, absent in wanted.items() if absent)
