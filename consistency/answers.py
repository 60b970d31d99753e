"""Greedy answers of both sides, right or wrong: the comparison that needs no logprobs, and sees far less."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from areal_core.engine.model import load_model
from areal_core.errors import RewardError
from areal_core.reward.functions import RewardFn
from consistency.engine.reply import Law
from consistency.live import Words, ask_engines
from consistency.prompts import Prompt
from consistency.request import DTYPES


@dataclass(frozen=True)
class Answers:
    """How many greedy answers of each side are right, how many completions are the same tokens, and where the others part first.

    `parts_after` is the median number of tokens that both sides agree on before they part; None where none parts.
    """

    num_prompts: int
    engine_right: int
    model_right: int
    identical: int
    parts_after: float | None


def compare_answers(
    addresses: Sequence[str], prompts: Sequence[Prompt], law: Law, words: Words, model: Any, reward: RewardFn
) -> Answers:
    """Judge the greedy completions of engines and model by one reward; more than half a point is right.

    Args:
        law: at temperature 0.
        model: one that `load_generating` loaded.

    Raises:
        EngineError: an address does not answer. RewardError: the reward function fails on a row.
    """
    replies = ask_engines(addresses, prompts, 1, law, words).replies
    engine_ids = [list(reply.output_ids) for reply in replies]
    model_ids = [greedy(model, prompt.ids, law.max_new_tokens) for prompt in prompts]

    def num_right(completions: Sequence[list[int]]) -> int:
        return sum(
            judge(reward, prompt, ids, words) > 0.5 for prompt, ids in zip(prompts, completions, strict=True)
        )

    parted = [agreed(a, b) for a, b in zip(engine_ids, model_ids, strict=True) if a != b]
    return Answers(
        num_prompts=len(prompts),
        engine_right=num_right(engine_ids),
        model_right=num_right(model_ids),
        identical=sum(a == b for a, b in zip(engine_ids, model_ids, strict=True)),
        parts_after=statistics.median(parted) if parted else None,
    )


def agreed(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens that two completions have in common at their beginning."""
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def judge(reward: RewardFn, prompt: Prompt, completion: list[int], words: Words) -> float:
    """The reward of one completion. Raises RewardError when the row lacks what the function reads."""
    try:
        return reward(
            words.decode(list(prompt.ids)),
            words.decode(completion),
            list(prompt.ids),
            completion,
            **prompt.row,
        )
    except TypeError as error:
        raise RewardError(
            f"the reward function cannot judge a row with {', '.join(prompt.row)}: {error}"
        ) from error


def load_generating(path: str, dtype: str, device: str) -> Any:
    """A model that generates with its own key-value cache. Raises ModelError."""
    model: Any = load_model(path, dtype=DTYPES[dtype])
    model.set_attn_implementation("sdpa")
    return model.to(device).eval()


def greedy(model: Any, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """The likeliest token again and again, up to and with EOS."""
    prompt = torch.tensor([list(prompt_ids)], device=model.device)
    with torch.no_grad():
        whole = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
        )
    ids: list[int] = whole[0, len(prompt_ids) :].tolist()
    return ids
