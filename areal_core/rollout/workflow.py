"""Workflows: one row of data in, one dict of tensors out, with any number of engine calls.

A workflow is any object with `arun_episode(engine, data)`. `RLVRWorkflow` is the common one: one
completion, one verifiable reward. `WrittenWorkflow` wraps another one and writes its episodes as
readable text: one JSON line per row, in a folder per version of the weights.
"""

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from areal_core.data.batch import FINISH_REASONS
from areal_core.data.routed_experts import ROUTED_EXPERTS, UNKNOWN
from areal_core.errors import ImageError
from areal_core.rollout.types import (
    EpisodeSampler,
    ModelRequest,
    ModelResponse,
    Sampling,
    TokenSampler,
    sampling_from,
)
from areal_core.safety.durable import append_lines

RewardFn = Callable[..., Awaitable[float]]


class RolloutWorkflow(Protocol):
    """An object that turns a row of data into an episode."""

    async def arun_episode(self, engine: EpisodeSampler, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Run one episode.

        Returns:
            Tensors with the rows first, `[n, T]` or `[n]`, with the keys of ARCHITECTURE.md, "The
            batch" (`prompt_id` and `sample_id` are added by the caller); None to leave this sample
            out.
        """


class RLVRWorkflow:
    """One completion of the chat in `data["messages"]`, and its reward.

    Args:
        reward_fn: awaited as `reward_fn(prompt, completions, prompt_ids, completion_ids, **data)`,
            with two texts and two lists of token ids. A trainer that builds the workflow also takes
            an ordinary function or its import path, and runs it in a `RewardPool`.
        gconfig: an object with the attributes of `Sampling`; the tokenizer's end and pad tokens
            become stop tokens.
        tokenizer: a Transformers tokenizer with a chat template.
        enable_thinking: passed to the chat template.
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        gconfig: Any,
        tokenizer: PreTrainedTokenizerBase,
        enable_thinking: bool = False,
    ) -> None:
        self.sampling = episode_sampling(gconfig, tokenizer)
        self.reward_fn = reward_fn
        self.tokenizer = tokenizer
        self.enable_thinking = enable_thinking

    async def arun_episode(self, engine: TokenSampler, data: dict[str, Any]) -> dict[str, Tensor]:
        """Sample one completion and compute its reward. Returns the row of `episode_tensors`.

        Raises:
            ImageError: the chat has pictures.
        """
        options = {"enable_thinking": self.enable_thinking}
        prompt_ids = prompt_tokens(self.tokenizer, data["messages"], options)
        response = await engine.agenerate(ModelRequest(input_ids=prompt_ids, sampling=self.sampling))
        reward = await reward_of(self.reward_fn, self.tokenizer, self.sampling, response, data)
        return episode_tensors(response, reward)


def episode_sampling(
    gconfig: Any, tokenizer: PreTrainedTokenizerBase, *ends: int, **changes: Any
) -> Sampling:
    """Return the sampling of one completion, which also ends at the tokenizer's end and padding.

    Args:
        ends: further stop tokens.
        changes: other options by name.
    """
    stops = {tokenizer.eos_token_id, tokenizer.pad_token_id, *gconfig.stop_token_ids, *ends} - {None}
    return sampling_from(gconfig, n_samples=1, stop_token_ids=sorted(stops), **changes)


async def reward_of(
    reward_fn: RewardFn,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    response: ModelResponse,
    data: dict[str, Any],
) -> float:
    """Await the reward function for a completion: two texts, their tokens, fields of the row."""
    prompt, completion = response.input_tokens, response.output_tokens
    text = tokenizer.decode(completion, skip_special_tokens=sampling.skip_special_tokens)
    return await reward_fn(tokenizer.decode(prompt), text, prompt, completion, **data)


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], options: dict[str, Any]
) -> list[int]:
    """Return the tokens of a chat up to the next reply.

    Args:
        tokenizer: with a chat template.
        messages: with a role and a content, a text or a list of parts of text.
        options: variables of the template, such as `{"enable_thinking": False}`.

    Raises:
        ImageError: a message has an image, whose placeholder alone would be sampled from.
    """
    contents: list[Any] = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if any(part["type"] != "text" for part in parts):
        raise ImageError(
            "the row has images or other parts, and this workflow sends text alone: use "
            "areal_core.rollout.vision_workflow.VisionRLVRWorkflow, or an agent"
        )
    tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
    return cast(list[int], tokens)  # with return_dict=False and one chat


def episode_tensors(response: ModelResponse, reward: float) -> dict[str, Tensor]:
    """Return one row of a batch from one completion.

    Args:
        response: with T tokens, prompt and completion.
        reward: of the completion.

    Returns:
        `input_ids`, `loss_mask` (1 on the completion) and `versions` (-1 on the prompt) int32,
        `attention_mask` bool and `logprobs` (0 on the prompt) float32, all [1, T]; `rewards`
        float32 and `finish_reason` int32 (0 stop, 1 length, 2 abort), both [1]. Of an engine that
        returns them also `routed_experts` [1, T, layers, width].
    """
    return conversation_row([response], reward)


def conversation_row(turns: Sequence[ModelResponse], reward: float, num_shared: int = 0) -> dict[str, Tensor]:
    """Return one row, `[1, T]` per token and `[1]` per row, of turns that each continue the last.

    The tokens that a prompt adds (a tool's output, a user's answer) are outside of the loss mask:
    mask 0, logprob 0, version -1. So are those of the first `num_shared` turns, which another row
    trains.
    """
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for number, turn in enumerate(turns):
        assert turn.input_tokens[: len(tokens)] == tokens
        num_masked = len(turn.input_tokens) - len(tokens)
        tokens = turn.input_tokens + turn.output_tokens
        if number < num_shared:
            num_masked += len(turn.output_tokens)
        num_trained = len(tokens) - len(mask) - num_masked
        mask += [0] * num_masked + [1] * num_trained
        logprobs += [0.0] * num_masked + turn.output_logprobs[:num_trained]
        versions += [-1] * num_masked + turn.output_versions[:num_trained]
    row = {
        "input_ids": torch.tensor([tokens], dtype=torch.int32),
        "attention_mask": torch.ones(1, len(tokens), dtype=torch.bool),
        "loss_mask": torch.tensor([mask], dtype=torch.int32),
        "logprobs": torch.tensor([logprobs], dtype=torch.float32),
        "versions": torch.tensor([versions], dtype=torch.int32),
        "rewards": torch.tensor([reward], dtype=torch.float32),
        "finish_reason": torch.tensor([FINISH_REASONS.index(turns[-1].stop_reason)], dtype=torch.int32),
    }
    return row | experts_of_row(turns)


def experts_of_row(turns: Sequence[ModelResponse]) -> dict[str, Tensor]:
    """Return `routed_experts`, [1, T, layers, width], of turns that each continue the last.

    A token has the experts of the turn that computed it first. Empty where the engine returns none.
    """
    known: list[np.ndarray] = []
    for turn in turns:
        if turn.routed_experts is None:
            return {}
        known.append(turn.routed_experts[sum(map(len, known)) :])
    num_tokens = len(turns[-1].input_tokens) + len(turns[-1].output_tokens)
    chosen = np.full((1, num_tokens, *known[0].shape[1:]), UNKNOWN, known[0].dtype)
    chosen[0, : sum(map(len, known))] = np.concatenate(known)
    return {ROUTED_EXPERTS: torch.from_numpy(chosen)}


class WrittenWorkflow:
    """A workflow that also writes its episodes to `folder/{version}/{prompt_id}.jsonl`.

    Rejected prompts are included. All samples of a prompt run on one rank, in one thread, so its
    file has only one writer.
    """

    def __init__(self, workflow: RolloutWorkflow, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self._workflow, self._folder, self._tokenizer = workflow, folder, tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workflow, name)

    async def arun_episode(self, engine: EpisodeSampler, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Run the workflow's episode and write its rows."""
        version = engine.version
        rows = await self._workflow.arun_episode(engine, data)
        if rows is not None:
            file = self._folder / str(version) / f"{engine.prompt_id}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            sample = {"prompt_id": engine.prompt_id, "sample_id": engine.sample_id}
            lines = [sample | line for line in text_lines(rows, self._tokenizer)]
            append_lines(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        return rows


def text_lines(rows: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the prompt, completion, reward and finish reason of each row.

    The prompt is the text before the first token in the loss mask.
    """
    lines = []
    reasons = rows.get("finish_reason")  # which a workflow of AReaL does not return
    for row in range(rows["input_ids"].shape[0]):
        real = rows["attention_mask"][row]
        ids, sampled = rows["input_ids"][row][real], rows["loss_mask"][row][real].bool()
        begin = int(sampled.int().argmax()) if sampled.any() else len(ids)
        lines.append(
            {
                "reward": float(rows["rewards"][row]),
                "finish_reason": None if reasons is None else FINISH_REASONS[int(reasons[row])],
                "num_sampled": int(sampled.sum()),
                "prompt": tokenizer.decode(ids[:begin]),
                "completion": tokenizer.decode(ids[begin:]),
            }
        )
    return lines
