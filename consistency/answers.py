"""Compare greedy answers of both sides: needs no logprobs, and detects far less."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from areal_core.data.processor import VisionProcessor
from areal_core.engine.model import load_model
from areal_core.engine.vision_inputs import plain_inputs
from areal_core.errors import RewardError
from areal_core.reward.functions import RewardFn
from consistency.case import DTYPES
from consistency.engine.reply import SamplingParams
from consistency.live import Prompt, Vocabulary, query_engines


@dataclass(frozen=True)
class Answers:
    """Counts of right greedy answers by side, and of completions that are identical token by token.

    `diverges_after` is the median number of equal tokens before two completions diverge; None if
    none diverge.
    """

    num_prompts: int
    engine_right: int
    model_right: int
    identical: int
    diverges_after: float | None


def compare_answers(
    addresses: Sequence[str],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    vocabulary: Vocabulary,
    model: Any,
    reward: RewardFn,
    processor: VisionProcessor | None = None,
) -> Answers:
    """Score the greedy completions of engines and model by one reward; above 0.5 is right.

    Args:
        params: with temperature 0.
        model: loaded by `load_generating`.
        processor: of the images in prompts.

    Raises:
        EngineError: an address does not answer.
        RewardError: the reward function fails on a row.
    """
    replies = query_engines(addresses, prompts, 1, params, vocabulary).replies
    engine_ids = [list(reply.output_ids) for reply in replies]
    model_ids = [greedy(model, prompt, params.max_new_tokens, processor) for prompt in prompts]

    def num_right(completions: Sequence[list[int]]) -> int:
        return sum(
            reward_of(reward, prompt, ids, vocabulary) > 0.5
            for prompt, ids in zip(prompts, completions, strict=True)
        )

    diverged = [common_prefix_length(a, b) for a, b in zip(engine_ids, model_ids, strict=True) if a != b]
    return Answers(
        num_prompts=len(prompts),
        engine_right=num_right(engine_ids),
        model_right=num_right(model_ids),
        identical=sum(a == b for a, b in zip(engine_ids, model_ids, strict=True)),
        diverges_after=statistics.median(diverged) if diverged else None,
    )


def common_prefix_length(left: Sequence[int], right: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def reward_of(reward: RewardFn, prompt: Prompt, completion: list[int], vocabulary: Vocabulary) -> float:
    """Compute the reward of one completion.

    Raises:
        RewardError: the row lacks an argument of the function.
    """
    try:
        return reward(
            vocabulary.decode(list(prompt.ids)),
            vocabulary.decode(completion),
            list(prompt.ids),
            completion,
            **prompt.row,
        )
    except TypeError as error:
        raise RewardError(
            f"the reward function cannot score a row with {', '.join(prompt.row)}: {error}"
        ) from error


def load_generating(path: str, dtype: str, device: str) -> Any:
    """Load a model that generates with a key-value cache. Raises ModelError."""
    model: Any = load_model(path, dtype=DTYPES[dtype])
    model.set_attn_implementation("sdpa")
    return model.to(device).eval()


def greedy(
    model: Any, asked: Prompt, max_new_tokens: int, processor: VisionProcessor | None = None
) -> list[int]:
    """Decode greedily up to and including EOS; `processor` makes the pixels of the images."""
    prompt = torch.tensor([asked.ids], device=model.device)
    options: dict[str, torch.Tensor] = {}
    if asked.images and processor is not None:
        types = (prompt[0] == processor.image_token_id).long()
        options = plain_inputs(model, types, processor.pixels(asked.images))
    with torch.no_grad():
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
            **{name: tensor.to(model.device) for name, tensor in options.items()},
        )
    ids: list[int] = output[0, len(asked.ids) :].tolist()
    return ids
