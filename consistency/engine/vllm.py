"""vLLM's completions with ids: `return_token_ids`, and logprobs of raw logits unless started with `--logprobs-mode processed_logprobs`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from consistency.engine.reply import NUM_TOPS, Identity, Law, Reply, Top
from consistency.engine.wire import Wire
from consistency.errors import EngineError


@dataclass(frozen=True)
class VLLM:
    """A vLLM server; `model` is the name under which it serves."""

    wire: Wire
    identity: Identity
    model: str

    @property
    def address(self) -> str:
        """Where it is."""
        return self.wire.address

    async def sample(self, prompt_ids: Sequence[int], law: Law) -> Reply:
        """One completion."""
        payload = {
            "model": self.model,
            "prompt": list(prompt_ids),
            "temperature": law.temperature,
            "top_p": law.top_p,
            "top_k": -1 if law.top_k is None else law.top_k,
            "max_tokens": law.max_new_tokens,
            "skip_special_tokens": False,
            "logprobs": NUM_TOPS,
            "return_token_ids": True,
            # Tokens are told as "token_id:123" instead of as text.
            "return_tokens_as_token_ids": True,
        }
        return parse_reply(self.address, await self.wire.post("/v1/completions", payload))

    async def rescore(self, input_ids: Sequence[int], num_prompt: int) -> tuple[float, ...]:
        """Prefill logprobs; the token that must be generated beside them is thrown away."""
        payload = {
            "model": self.model,
            "prompt": list(input_ids),
            "temperature": 1.0,
            "max_tokens": 1,
            "prompt_logprobs": 0,
        }
        answer = await self.wire.post("/v1/completions", payload)
        return parse_rescored(self.address, answer, list(input_ids), num_prompt)


def parse_identity(address: str, version: Any, models: Any) -> tuple[Identity, str]:
    """From `/version` and `/v1/models`: the identity, and the name to ask for. Raises EngineError."""
    try:
        card = models["data"][0]
        identity = Identity(
            software=f"vLLM {version['version']}",
            model=str(card["root"]),
            has_adapter=any(entry["parent"] for entry in models["data"]),
        )
        return identity, str(card["id"])
    except (IndexError, KeyError, TypeError) as error:
        raise EngineError(f"{address}/v1/models is not what vLLM sends: it lacks {error}") from error


def parse_reply(address: str, answer: Any) -> Reply:
    """A completion with `token_ids`. Raises EngineError."""
    try:
        choice = answer["choices"][0]
        return Reply(
            output_ids=tuple(int(i) for i in choice["token_ids"]),
            logprobs=tuple(
                float("nan") if value is None else float(value)
                for value in choice["logprobs"]["token_logprobs"]
            ),
            tops=tuple(parse_top(top) for top in choice["logprobs"]["top_logprobs"]),
        )
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"{address}/v1/completions gave no ids with logprobs ({error!r}): use vLLM 0.10.2 or newer"
        ) from error


def parse_top(told: Any) -> Top:
    """From a dict of "token_id:123" to logprob; the sampled token is in it beside the likeliest."""
    return tuple((int(token.removeprefix("token_id:")), float(value)) for token, value in told.items())


def parse_rescored(address: str, answer: Any, input_ids: list[int], num_prompt: int) -> tuple[float, ...]:
    """Of each position a dict from id to `{logprob, ...}`, the first one null. Raises EngineError."""
    try:
        rows = answer["choices"][0]["prompt_logprobs"]
        return tuple(
            float(row[str(token)]["logprob"])
            for row, token in zip(rows[num_prompt:], input_ids[num_prompt:], strict=True)
        )
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{address}/v1/completions gave no logprobs of its prompt ({error!r})") from error
