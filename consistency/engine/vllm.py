"""vLLM's completions with ids (`return_token_ids`).

Logprobs are those of raw logits unless vLLM runs with `--logprobs-mode processed_logprobs`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from consistency.engine.http import HttpClient, refuse_pictures
from consistency.engine.reply import NUM_TOPS, EngineIdentity, Pictures, Reply, SamplingParams, Top
from consistency.errors import EngineError


@dataclass(frozen=True)
class VLLM:
    """A vLLM server; `model` is the served model name."""

    client: HttpClient
    identity: EngineIdentity
    model: str

    @property
    def address(self) -> str:
        """Base URL."""
        return self.client.address

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, pictures: Pictures | None = None
    ) -> Reply:
        """Sample one completion."""
        refuse_pictures(self.address, pictures)
        payload = {
            "model": self.model,
            "prompt": list(prompt_ids),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": -1 if params.top_k is None else params.top_k,
            "max_tokens": params.max_new_tokens,
            "skip_special_tokens": False,
            "logprobs": NUM_TOPS,
            "return_token_ids": True,
            # Top tokens are returned as "token_id:123" instead of text.
            "return_tokens_as_token_ids": True,
        }
        return parse_reply(self.address, await self.client.post("/v1/completions", payload))

    async def rescore(
        self, input_ids: Sequence[int], num_prompt: int, pictures: Pictures | None = None
    ) -> tuple[float, ...]:
        """Compute prefill logprobs; the one token that vLLM must generate as well is discarded."""
        refuse_pictures(self.address, pictures)
        payload = {
            "model": self.model,
            "prompt": list(input_ids),
            "temperature": 1.0,
            "max_tokens": 1,
            "prompt_logprobs": 0,
        }
        answer = await self.client.post("/v1/completions", payload)
        return parse_rescored(self.address, answer, list(input_ids), num_prompt)


def parse_identity(address: str, version: Any, models: Any) -> tuple[EngineIdentity, str]:
    """Parse `/version` and `/v1/models` into identity and model name. Raises EngineError."""
    try:
        card = models["data"][0]
        identity = EngineIdentity(
            software=f"vLLM {version['version']}",
            model=str(card["root"]),
        )
        return identity, str(card["id"])
    except (IndexError, KeyError, TypeError) as error:
        raise EngineError(f"{address}/v1/models is not what vLLM sends: it lacks {error}") from error


def parse_reply(address: str, answer: Any) -> Reply:
    """Parse a completion with `token_ids`. Raises EngineError."""
    try:
        choice = answer["choices"][0]
        usage = answer.get("usage") or {}
        return Reply(
            output_ids=tuple(int(i) for i in choice["token_ids"]),
            logprobs=tuple(
                float("nan") if value is None else float(value)
                for value in choice["logprobs"]["token_logprobs"]
            ),
            tops=tuple(parse_top(top) for top in choice["logprobs"]["top_logprobs"]),
            num_prompt=usage.get("prompt_tokens"),
            num_output=usage.get("completion_tokens"),
            text=choice.get("text"),
            finish=choice.get("finish_reason"),
        )
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise EngineError(
            f"{address}/v1/completions returned no ids with logprobs ({error!r}): use vLLM 0.10.2 or newer"
        ) from error


def parse_top(entry: Any) -> Top:
    """Parse a dict of "token_id:123" to logprob: the most likely tokens and the sampled one."""
    return tuple((int(token.removeprefix("token_id:")), float(value)) for token, value in entry.items())


def parse_rescored(address: str, answer: Any, input_ids: list[int], num_prompt: int) -> tuple[float, ...]:
    """Parse one dict of id to `{logprob, ...}` per position, the first null. Raises EngineError."""
    try:
        rows = answer["choices"][0]["prompt_logprobs"]
        return tuple(
            float(row[str(token)]["logprob"])
            for row, token in zip(rows[num_prompt:], input_ids[num_prompt:], strict=True)
        )
    except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise EngineError(
            f"{address}/v1/completions returned no logprobs of its prompt ({error!r})"
        ) from error
