"""SGLang's native API: `/generate` with ids in both directions.

Logprobs of sampled tokens are under softmax(logits / temperature).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from consistency.engine.http import HttpClient
from consistency.engine.reply import NUM_TOPS, EngineIdentity, Reply, SamplingParams
from consistency.errors import EngineError


@dataclass(frozen=True)
class SGLang:
    """An SGLang server."""

    client: HttpClient
    identity: EngineIdentity

    @property
    def address(self) -> str:
        """Base URL."""
        return self.client.address

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Reply:
        """Sample one completion."""
        sampling = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": -1 if params.top_k is None else params.top_k,
            "max_new_tokens": params.max_new_tokens,
            "skip_special_tokens": False,
        }
        payload = {"input_ids": list(prompt_ids), "sampling_params": sampling, "return_logprob": True}
        payload["top_logprobs_num"] = NUM_TOPS
        return parse_reply(self.address, await self.client.post("/generate", payload))

    async def rescore(self, input_ids: Sequence[int], num_prompt: int) -> tuple[float, ...]:
        """Compute prefill logprobs, which SGLang never scales by a temperature."""
        payload = {
            "input_ids": list(input_ids),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 0},
            "return_logprob": True,
            # The first row of the reply has no predecessor in the slice and is null.
            "logprob_start_len": num_prompt - 1,
        }
        answer = await self.client.post("/generate", payload)
        return parse_rescored(self.address, answer, list(input_ids[num_prompt:]))


def parse_identity(address: str, info: Any, model: Any) -> EngineIdentity:
    """Parse `/server_info` and `/model_info`. Raises EngineError."""
    try:
        return EngineIdentity(
            software=f"SGLang {info['version']}",
            model=str(model["model_path"]),
            dtype=None if info["dtype"] == "auto" else str(info["dtype"]),
            quantization=info["quantization"],
            kv_cache_dtype=None if info["kv_cache_dtype"] == "auto" else str(info["kv_cache_dtype"]),
        )
    except (KeyError, TypeError) as error:
        raise EngineError(
            f"{address}/server_info is not what SGLang 0.5 sends: it lacks {error}; use SGLang 0.5.6 or newer"
        ) from error


def parse_reply(address: str, answer: Any) -> Reply:
    """Parse a reply of `/generate`: rows are [logprob, id, text]. Raises EngineError."""
    try:
        meta = answer["meta_info"]
        rows = meta["output_token_logprobs"]
        version = str(meta["weight_version"])
        return Reply(
            output_ids=tuple(int(row[1]) for row in rows),
            logprobs=tuple(float("nan") if row[0] is None else float(row[0]) for row in rows),
            tops=tuple(
                tuple((int(i), float(value)) for value, i, _ in top) for top in meta["output_top_logprobs"]
            ),
            version=int(version) if version.isdecimal() else None,
            cached_tokens=int(meta["cached_tokens"]),
        )
    except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise EngineError(
            f"{address}/generate returned no logprobs ({error!r}); it must support return_logprob"
        ) from error


def parse_rescored(address: str, answer: Any, expected: list[int]) -> tuple[float, ...]:
    """Parse the logprobs of the `expected` last tokens of a prefill.

    Raises:
        EngineError: they belong to other tokens than those sent.
    """
    try:
        rows = answer["meta_info"]["input_token_logprobs"][-len(expected) :]
        ids = [int(row[1]) for row in rows]
        logprobs = tuple(float(row[0]) for row in rows)
    except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise EngineError(f"{address}/generate returned no logprobs of its prompt ({error!r})") from error
    # SGLang 0.5.23 reports the last id of the vocabulary as 0 here, with the right logprob.
    if len(ids) != len(expected) or any(
        reported not in (token, 0) for reported, token in zip(ids, expected, strict=True)
    ):
        raise EngineError(
            f"{address}/generate scored {len(ids)} tokens that are not the {len(expected)} it was sent"
        )
    return logprobs
