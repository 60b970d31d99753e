"""The experts that the engine reports: whether they explain its log-probs."""

from dataclasses import replace

from areal_core.engine.routers import Routers
from areal_core.errors import ModelError
from consistency.case import Alternative
from consistency.score import Scorer, score_logprobs
from consistency.tokens import Sequences


def expert_alternatives(scorer: Scorer, rows: Sequences, temperature: float) -> list[Alternative]:
    """Score with the engine's experts (R42).

    Nothing where they are not known or of another model, or rows are scored one at a time.
    """
    if rows.experts is None or not scorer.packs_rows:
        return []
    try:
        routers = Routers(scorer.model)
        routers.sizes.check(rows.experts)
        replaying = replace(scorer, routers=routers)
        logprobs = score_logprobs(replaying, rows, temperature=temperature)
    except (ModelError, ValueError):
        return []
    routers.replay(None, scorer.device)
    return [Alternative("R42", "the engine's experts", logprobs)]
