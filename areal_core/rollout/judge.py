"""A generative judge: a language model reads a completion and writes a score, which is the reward.

    completion ── template ──> judge ──> reply ── score pattern ──> reward
                               │         └── no score: asked again, at last the sample is left out
                               └── the run's engine, another server, or the journal of a run

A reply without a score never becomes a number. Each call is a line of a journal: prompt, reply and
score. The journal of a run can answer for the judge, as long as the prompts are the same.
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from areal_core.errors import RewardError
from areal_core.reward.served import SHOWN, post_json
from areal_core.rollout.judge_journal import Journal, JournalReader, JudgeCall
from areal_core.rollout.types import EpisodeSampler, ModelRequest, Sampling, sampling_from
from areal_core.rollout.workflow import episode_tensors, prompt_tokens

TEMPLATE = """You grade answers.

Question:
{prompt}

Answer:
{completion}

How good is the answer, from 0 (useless) to 10 (perfect)? Write one line of reasons, then a last line \
of the form "Score: N"."""
PATTERN = r"(?i)\bscore\s*[:=]\s*(-?\d+(?:\.\d+)?)"
logger = logging.getLogger(__name__)


class Judge(Protocol):
    """A language model that answers a message."""

    async def reply(self, engine: EpisodeSampler, text: str, attempt: int) -> str:
        """Return the reply to a text.

        Args:
            engine: of the episode that is judged.
            attempt: 0, or the number of replies to this text that had no score.
        """
        ...


class EngineJudge:
    """The run's own engine, with the weights that sample now: the policy judges itself.

    Args:
        tokenizer: of the policy.
        sampling: of the replies, an object with the attributes of `Sampling`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sampling: Any) -> None:
        ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, *sampling.stop_token_ids} - {None}
        self.sampling = sampling_from(sampling, n_samples=1, stop_token_ids=sorted(ends))
        self.tokenizer = tokenizer

    async def reply(self, engine: EpisodeSampler, text: str, attempt: int) -> str:
        """Return the reply of the engine."""
        tokens = prompt_tokens(self.tokenizer, [{"role": "user", "content": text}], {})
        response = await engine.agenerate(ModelRequest(input_ids=tokens, sampling=self.sampling))
        return str(self.tokenizer.decode(response.output_tokens, skip_special_tokens=True))


@dataclass(frozen=True)
class ServerJudge:
    """A judge behind an OpenAI-compatible API, such as an SGLang or vLLM server.

    Args:
        url: of the API, such as `http://host:30000/v1`.
        model: its name there.
        sampling: further fields of each request, such as `max_tokens` and `temperature`.
        api_key_variable: variable of the environment that holds the key, if the server wants one.
        timeout_s: maximum seconds for one reply.
        num_retries: further attempts where the server is busy or does not answer.
    """

    url: str
    model: str = "default"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    api_key_variable: str = ""
    timeout_s: float = 300.0
    num_retries: int = 3

    async def reply(self, engine: EpisodeSampler, text: str, attempt: int) -> str:
        """Return the reply of the server.

        Raises:
            RewardError: it refused the request, gave no reply in `num_retries + 1` attempts, or one
                without a message.
        """
        key = os.environ.get(self.api_key_variable, "")
        found = await post_json(
            f"{self.url.rstrip('/')}/chat/completions",
            {"model": self.model, "messages": [{"role": "user", "content": text}], **self.sampling},
            timeout_s=self.timeout_s,
            num_retries=self.num_retries,
            headers={"Authorization": f"Bearer {key}"} if key else None,
        )
        match found:
            case {"choices": [{"message": {"content": str() as content}}, *_]}:
                return content
        raise RewardError(
            f"{self.url} answered {str(found)[:SHOWN]}; expected choices with a message and its content"
        )


class JournalJudge:
    """A judge that repeats the replies of an earlier run, from its journal: no model is asked.

    Args:
        folder: the `journal` of that run.

    Raises:
        RewardError: there is no such folder.
    """

    def __init__(self, folder: Path | str) -> None:
        self.calls = JournalReader(Path(folder))

    async def reply(self, engine: EpisodeSampler, text: str, attempt: int) -> str:
        """Return the recorded reply.

        Raises:
            RewardError: it was to another text, or is missing.
        """
        return self.calls.find(engine.prompt_id, engine.sample_id, attempt, text).reply


class JudgedWorkflow:
    """One completion of the chat in `data["messages"]`, and its score by a judge as the reward.

    Args:
        gconfig: an object with the attributes of `Sampling`; the tokenizer's end and pad tokens
            become stop tokens.
        tokenizer: a Transformers tokenizer with a chat template.
        judge: `ServerJudge`, `JournalJudge` or another object with their method `reply`; by default
            the run's own engine, sampled as `judge_sampling` says.
        template: the judge's text; `{prompt}` (the last message), `{completion}` and `{NAME}`, a
            field of the row, are filled in.
        pattern: regular expression whose only group is the score; its last match counts.
        lowest: a lower score is none.
        highest: a higher score is none.
        max_attempts: replies until one has a score; then the sample is left out.
        judge_sampling: an object with the attributes of `Sampling`, of the run's engine as a judge.
        journal: folder for the calls: prompt, reply and score of each, one JSON line.
        enable_thinking: passed to the chat template.

    Raises:
        ValueError: `pattern` has not one group, or `max_attempts` is below 1.
        re.error: `pattern` is no regular expression.
    """

    def __init__(
        self,
        gconfig: Any,
        tokenizer: PreTrainedTokenizerBase,
        judge: Judge | None = None,
        *,
        template: str = TEMPLATE,
        pattern: str = PATTERN,
        lowest: float = 0.0,
        highest: float = 10.0,
        max_attempts: int = 3,
        judge_sampling: Any = Sampling(max_new_tokens=256),
        journal: Path | str | None = None,
        enable_thinking: bool = False,
    ) -> None:
        self.pattern = re.compile(pattern)
        if self.pattern.groups != 1 or max_attempts < 1:
            raise ValueError(
                f"pattern {pattern!r} has {self.pattern.groups} groups and max_attempts is {max_attempts}; "
                "expected 1 group, the score, and at least 1 attempt"
            )
        ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, *gconfig.stop_token_ids} - {None}
        self.sampling = sampling_from(gconfig, n_samples=1, stop_token_ids=sorted(ends))
        self.tokenizer, self.enable_thinking = tokenizer, enable_thinking
        self.judge = judge or EngineJudge(tokenizer, judge_sampling)
        self.template, self.lowest, self.highest = template, lowest, highest
        self.max_attempts = max_attempts
        self.journal = None if journal is None else Journal(Path(journal))
        self.counts: Counter[str] = Counter()  # "scored", "unparsed" replies; samples "left_out"

    async def arun_episode(self, engine: EpisodeSampler, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Sample one completion and let it be judged.

        Returns:
            The row of `episode_tensors`, with `scores.judge`, the score, and
            `scores.judge_unparsed`, the number of replies without one, float32 [1]. None if no
            reply had a score.

        Raises:
            RewardError: of the judge.
            ImageError: the chat has pictures.
        """
        options = {"enable_thinking": self.enable_thinking}
        prompt_ids = prompt_tokens(self.tokenizer, data["messages"], options)
        response = await engine.agenerate(ModelRequest(input_ids=prompt_ids, sampling=self.sampling))
        completion = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        text = filled(
            self.template,
            {**data, "prompt": data["messages"][-1]["content"], "completion": completion},
        )
        for attempt in range(self.max_attempts):
            version = engine.version
            reply = await self.judge.reply(engine, text, attempt)
            score = self.score_in(reply)
            call = JudgeCall(engine.prompt_id, engine.sample_id, attempt, version, text, reply, score)
            if self.journal is not None:
                self.journal.write(call)
            self.counts["unparsed" if score is None else "scored"] += 1
            if score is not None:
                judged = {"judge": score, "judge_unparsed": float(attempt)}
                return episode_tensors(response, score) | {
                    f"scores.{name}": torch.tensor([value]) for name, value in judged.items()
                }
        self.counts["left_out"] += 1
        logger.warning(
            "the judge gave prompt %s, sample %s no score in %s replies, so that it is left out; the last: %.200r",
            engine.prompt_id,
            engine.sample_id,
            self.max_attempts,
            reply,
        )
        return None

    def score_in(self, reply: str) -> float | None:
        found = self.pattern.findall(reply)
        try:
            score = float(found[-1]) if found else None
        except ValueError:  # of a pattern that matches other texts than numbers
            return None
        return score if score is not None and self.lowest <= score <= self.highest else None


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Replace each `{name}` of a value; other braces, as in JSON, stay.

    Values are not searched again, so that a completion cannot fill in fields of the row.
    """
    names = "|".join(re.escape(name) for name in values)
    return re.sub(rf"\{{({names})\}}", lambda match: str(values[match[1]]), template)
