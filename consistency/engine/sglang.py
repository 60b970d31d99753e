"""SGLang's native routes: `/generate` with ids both ways. Logprobs of sampled tokens are under softmax(logits / temperature)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from consistency.engine.reply import NUM_TOPS, Identity, Law, Reply
from consistency.engine.wire import Wire
from consistency.errors import EngineError


@dataclass(frozen=True)
class SGLang:
    """An SGLang server."""

    wire: Wire
    identity: Identity

    @property
    def address(self) -> str:
        """Where it is."""
        return self.wire.address

    async def sample(self, prompt_ids: Sequence[int], law: Law) -> Reply:
        """One completion."""
        params = {
            "temperature": law.temperature,
            "top_p": law.top_p,
            "top_k": -1 if law.top_k is None else law.top_k,
            "max_new_tokens": law.max_new_tokens,
            "skip_special_tokens": False,
        }
        payload = {"input_ids": list(prompt_ids), "sampling_params": params, "return_logprob": True}
        payload["top_logprobs_num"] = NUM_TOPS
        return parse_reply(self.address, await self.wire.post("/generate", payload))

    async def rescore(self, input_ids: Sequence[int], num_prompt: int) -> tuple[float, ...]:
        """Prefill logprobs, which SGLang never scales by a temperature."""
        payload = {
            "input_ids": list(input_ids),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 0},
            "return_logprob": True,
            # The first row of the answer has no predecessor in the slice and is null.
            "logprob_start_len": num_prompt - 1,
        }
        answer = await self.wire.post("/generate", payload)
        return parse_rescored(self.address, answer, list(input_ids[num_prompt:]))


def parse_identity(address: str, info: Any, model: Any) -> Identity:
    """From `/server_info` and `/model_info`. Raises EngineError."""
    try:
        return Identity(
            software=f"SGLang {info['version']}",
            model=str(model["model_path"]),
            dtype=None if info["dtype"] == "auto" else str(info["dtype"]),
            quantization=info["quantization"],
            has_adapter=bool(info["enable_lora"]),
            kv_cache_dtype=None if info["kv_cache_dtype"] == "auto" else str(info["kv_cache_dtype"]),
        )
    except (KeyError, TypeError) as error:
        raise EngineError(
            f"{address}/server_info is not what SGLang 0.5 sends: it lacks {error}; use SGLang 0.5.6 or newer"
        ) from error


def parse_reply(address: str, answer: Any) -> Reply:
    """A reply of `/generate`: rows are [logprob, id, text]. Raises EngineError."""
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
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise EngineError(
            f"{address}/generate gave no logprobs ({error!r}); it must answer return_logprob"
        ) from error


def parse_rescored(address: str, answer: Any, expected: list[int]) -> tuple[float, ...]:
    """The last rows of a prefill's logprobs. Raises EngineError when they are not of the tokens that were sent."""
    try:
        rows = answer["meta_info"]["input_token_logprobs"][-len(expected) :]
        ids = [int(row[1]) for row in rows]
        logprobs = tuple(float(row[0]) for row in rows)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise EngineError(f"{address}/generate gave no logprobs of its prompt ({error!r})") from error
    # SGLang 0.5.23 names the last id of the vocabulary 0 here, and gives its own logprob.
    if len(ids) != len(expected) or any(
        told not in (token, 0) for told, token in zip(ids, expected, strict=True)
    ):
        raise EngineError(
            f"{address}/generate scored {len(ids)} tokens that are not the {len(expected)} it was sent"
        )
    return logprobs
