"""Further looks at the same tokens, each of some passes over the sample, taken only while the verdict is in doubt."""

from collections.abc import Callable
from dataclasses import replace

from consistency.alternatives import (
    architecture_alternatives,
    bos_alternatives,
    checkpoint_alternative,
    partial_alternatives,
    quantized_alternatives,
)
from consistency.case import Alternative, Setting
from consistency.diagnose import Diagnosis, is_accusation
from consistency.noise import noise_of_model
from consistency.replay import Replays
from consistency.request import DTYPES, Request
from consistency.score import Scorer, load_scorer
from consistency.tokens import Sequences

SURE = 0.85
Judge = Callable[..., Diagnosis]  # judge(setting, alternatives=...)


def look_further(
    judge: Judge,
    setting: Setting,
    scorer: Scorer,
    rows: Sequences,
    replays: Replays,
    request: Request,
    dtype: str,
) -> tuple[Diagnosis, Setting]:
    """The diagnosis when no doubt is left or nothing is left to look at, and the setting with the model's own noise."""
    found = judge(setting)
    given: list[Alternative] = []
    for look in LOOKS:
        if settled(found):
            break
        given += look(scorer, rows, request, setting, dtype)
        if look is other_dtype:
            setting = replace(setting, noise=noise_of_model(setting.noise, given[0], replays))
        found = judge(setting, alternatives=given)
    return found, setting


def settled(found: Diagnosis) -> bool:
    """Whether another look could hardly change the verdict."""
    return found.verdict == "healthy" or any(is_accusation(c) and c.confidence > SURE for c in found.causes)


def other_dtype(
    scorer: Scorer, rows: Sequences, request: Request, setting: Setting, dtype: str
) -> list[Alternative]:
    """The same model in the other dtype."""
    other = "bfloat16" if dtype == "float32" else "float32"
    model = load_scorer(request.model, DTYPES[other], request.device)
    return [checkpoint_alternative(model, rows, "R38", f"scoring in {other}", setting.temperature)]


def other_prompts(
    scorer: Scorer, rows: Sequences, request: Request, setting: Setting, dtype: str
) -> list[Alternative]:
    """With and without BOS."""
    if setting.bos_token_id is None:
        return []
    return bos_alternatives(scorer, rows, setting.bos_token_id, setting.temperature)


def quantised_weights(
    scorer: Scorer, rows: Sequences, request: Request, setting: Setting, dtype: str
) -> list[Alternative]:
    """As weight-only quantisation would leave the model."""
    return quantized_alternatives(scorer, rows, setting.temperature)


def other_checkpoints(
    scorer: Scorer, rows: Sequences, request: Request, setting: Setting, dtype: str
) -> list[Alternative]:
    """By the checkpoints that were given."""
    wanted = (("R24", "the previous checkpoint", request.previous), ("R32", "the base model", request.base))
    return [
        checkpoint_alternative(
            load_scorer(path, DTYPES[dtype], request.device), rows, cause, name, setting.temperature
        )
        for cause, name, path in wanted
        if path is not None
    ]


def partly_stale(
    scorer: Scorer, rows: Sequences, request: Request, setting: Setting, dtype: str
) -> list[Alternative]:
    """By parts of the previous checkpoint, if it was given."""
    if request.previous is None:
        return []
    previous = load_scorer(request.previous, DTYPES[dtype], request.device)
    return partial_alternatives(scorer, previous, rows, setting.temperature)


def other_details(
    scorer: Scorer, rows: Sequences, request: Request, setting: Setting, dtype: str
) -> list[Alternative]:
    """As other model families would compute it."""
    return architecture_alternatives(scorer, rows, setting.temperature)


LOOKS = (other_dtype, other_prompts, other_checkpoints, quantised_weights, other_details, partly_stale)
