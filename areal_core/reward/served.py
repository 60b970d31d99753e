"""Rewards from a server: SGLang's `/classify` of a reward model, and the JSON calls of a judge.

A server keeps a large reward model off the trainer's devices, and gives a completion its reward
while others are still sampled. `RewardServer` is an asynchronous reward function.
"""

import asyncio
import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import aiohttp
from jinja2 import TemplateError

from areal_core.errors import RewardError

SHOWN = 300  # characters of a reply in an error
RETRIED = (408, 429, 500, 502, 503, 504)


async def post_json(
    url: str,
    payload: Mapping[str, Any],
    *,
    timeout_s: float,
    num_retries: int,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Return the JSON of a 200 reply; a server that is busy or does not answer is asked again.

    Raises:
        RewardError: it refused the request, or gave no reply in `num_retries + 1` attempts.
    """
    timeout, problem = aiohttp.ClientTimeout(total=timeout_s), ""
    for attempt in range(num_retries + 1):
        if attempt:
            await asyncio.sleep(min(2.0**attempt, 30.0) / 4)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.post(url, json=payload) as reply,
            ):
                body = await reply.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            problem = f"did not answer: {str(error) or type(error).__name__}"
            continue
        if reply.status == 200:
            return parsed(url, body)
        problem = f"answered {reply.status}: {body[:SHOWN]}"
        if reply.status not in RETRIED:
            break
    raise RewardError(f"{url} {problem}")


def parsed(url: str, body: str) -> Any:
    """Return the JSON of a reply. Raises RewardError."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"{url} answered {body[:SHOWN]!r}, which is not JSON: {error}") from None


class RewardServer:
    """The score of a reward model on a server, as a reward function that is awaited.

    Args:
        url: of SGLang's `/classify`, such as `http://host:30000/classify`.
        tokenizer_path: the reward model's folder or name. Its chat template renders the row's
            `messages` and the completion. Empty: the model has the policy's tokens, which are sent
            as they are.
        timeout_s: maximum seconds for one score.
        num_retries: further attempts where the server is busy or does not answer.

    Raises:
        RewardError: `url` does not begin with http:// or https://.
    """

    def __init__(
        self, url: str, tokenizer_path: str = "", timeout_s: float = 120.0, num_retries: int = 3
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise RewardError(
                f"the URL of the reward model is {url!r}; give one such as 'http://localhost:30000/classify'"
            )
        self.url, self.tokenizer_path = url, tokenizer_path
        self.timeout_s, self.num_retries = timeout_s, num_retries

    async def __call__(
        self, prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any
    ) -> float:
        """Return the score of a completion.

        Raises:
            RewardError: the server gave no finite score, or the tokenizer cannot be loaded or
                refuses the conversation.
        """
        if self.tokenizer_path:
            reply = {"role": "assistant", "content": completions}
            tokens = conversation_tokens(self.tokenizer_path, [*row["messages"], reply])
        else:
            tokens = [*prompt_ids, *completion_ids]
        found = await post_json(
            self.url, {"input_ids": tokens}, timeout_s=self.timeout_s, num_retries=self.num_retries
        )
        return score_of(self.url, found)


def score_of(url: str, reply: Any) -> float:
    match reply:
        case {"embedding": [int() | float() as score]} if math.isfinite(score):
            return float(score)
        case {"embedding": [_, _, *_] as scores}:
            raise RewardError(
                f"{url} has {len(scores)} scores for a text; expected 1: serve a model with one label"
            )
        case _:
            raise RewardError(
                f"{url} answered {str(reply)[:SHOWN]}; expected an object whose embedding is one finite number"
            )


@cache
def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer  # here: a worker of reward functions must not import it

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise RewardError(
            f"cannot load the reward model's tokenizer at {path!r}: {str(error).splitlines()[0]}"
        ) from error


def conversation_tokens(tokenizer_path: str, messages: list[dict[str, Any]]) -> list[int]:
    """Return the tokens of a finished conversation in the chat template of a tokenizer.

    Raises:
        RewardError: it has no chat template, or one that refuses the conversation.
    """
    try:
        tokens: list[int] = _tokenizer(tokenizer_path).apply_chat_template(messages, return_dict=False)
    except (ValueError, TemplateError) as error:
        raise RewardError(
            f"the tokenizer at {tokenizer_path!r} cannot render the conversation: {str(error).splitlines()[0]}"
        ) from error
    return tokens
