"""SGLang's native API: `/generate` with ids in both directions.

Logprobs of sampled tokens are under softmax(logits / temperature).
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal_core.data.images import data_url
from areal_core.servers.sglang import collapsed
from consistency.engine.http import HttpClient
from consistency.engine.reply import NUM_TOPS, EngineIdentity, Pictures, Reply, SamplingParams
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

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, pictures: Pictures | None = None
    ) -> Reply:
        """Sample one completion."""
        sampling = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": -1 if params.top_k is None else params.top_k,
            "max_new_tokens": params.max_new_tokens,
            "skip_special_tokens": False,
        }
        payload: dict[str, Any] = {
            **prompt_fields(prompt_ids, (), pictures),
            "sampling_params": sampling,
            "return_logprob": True,
        }
        payload |= {"top_logprobs_num": NUM_TOPS, "rid": uuid.uuid4().hex}
        reply = parse_reply(self.address, await self.client.post("/generate", payload))
        return replace(reply, sent_id=payload["rid"])

    async def rescore(
        self, input_ids: Sequence[int], num_prompt: int, pictures: Pictures | None = None
    ) -> tuple[float, ...]:
        """Compute prefill logprobs, which SGLang never scales by a temperature."""
        payload = {
            **prompt_fields(input_ids[:num_prompt], input_ids[num_prompt:], pictures),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 0},
            "return_logprob": True,
            # The first row of the reply has no predecessor in the slice and is null.
            "logprob_start_len": num_prompt - 1,
        }
        answer = await self.client.post("/generate", payload)
        return parse_rescored(self.address, answer, list(input_ids[num_prompt:]))


def prompt_fields(
    prompt_ids: Sequence[int], completion_ids: Sequence[int], pictures: Pictures | None
) -> dict[str, Any]:
    """Return the fields of ids and images: SGLang expands one placeholder for each image."""
    if pictures is None:
        return {"input_ids": [*prompt_ids, *completion_ids]}
    prompt = collapsed(prompt_ids, pictures.placeholder, len(pictures.images))
    return {"input_ids": [*prompt, *completion_ids], "image_data": list(map(data_url, pictures.images))}


# What SGLang reports of itself besides its version; a server that only has its routes does not.
OWN_FIELDS = frozenset({"internal_states", "schedule_policy", "mem_fraction_static", "chunked_prefill_size"})


def parse_identity(address: str, info: Any, model: Any) -> EngineIdentity:
    """Parse `/server_info` and `/model_info`; what a version lacks is unknown. Raises EngineError.

    A server is called SGLang for its scheduler's fields, not for the version that it claims.
    """
    if not isinstance(info, dict) or not ("version" in info or info.keys() & OWN_FIELDS):
        raise EngineError(
            f"{address}/server_info names neither a version nor an option of SGLang: is it an inference server?"
        )
    model = model if isinstance(model, dict) else {}
    path = model.get("model_path", info.get("model_path"))
    return EngineIdentity(
        software=software_of(info),
        model="an unknown model" if path is None else str(path),
        dtype=known(info, "dtype"),
        quantization=known(info, "quantization"),
        kv_cache_dtype=known(info, "kv_cache_dtype"),
    )


def software_of(info: dict[str, Any]) -> str:
    version = known(info, "version") or "unknown"
    if info.get("engine") is not None:
        return f"{info['engine']} engine with the API of SGLang {version}"
    if len(info.keys() & OWN_FIELDS) > 1:
        return f"SGLang {version}"
    return (
        f"a server with the API of SGLang (it claims version {version}, without the fields of its scheduler)"
    )


def known(info: dict[str, Any], name: str) -> str | None:
    """Return a field as text; None if it is missing, null, empty or automatic."""
    value = info.get(name)
    return None if value in (None, "", "auto") else str(value)


def parse_reply(address: str, answer: Any) -> Reply:
    """Parse a reply of `/generate`: rows are [logprob, id, text]. Raises EngineError."""
    try:
        meta = answer["meta_info"]
        rows = meta["output_token_logprobs"]
        version = str(meta.get("weight_version"))
        tops = meta.get("output_top_logprobs")
        finish = meta.get("finish_reason") or {}
        matched = finish.get("matched")
        return Reply(
            output_ids=tuple(int(row[1]) for row in rows),
            logprobs=tuple(float("nan") if row[0] is None else float(row[0]) for row in rows),
            tops=None
            if tops is None
            else tuple(tuple((int(i), float(value)) for value, i, _ in top or ()) for top in tops),
            version=int(version) if version.isdecimal() else None,
            cached_tokens=integer(meta.get("cached_tokens")),
            num_prompt=integer(meta.get("prompt_tokens")),
            num_output=integer(meta.get("completion_tokens")),
            ids=None if answer.get("output_ids") is None else tuple(map(int, answer["output_ids"])),
            text=answer.get("text"),
            finish=finish.get("type"),
            matched=matched if isinstance(matched, int) else None,
            returned_id=meta.get("id"),
        )
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise EngineError(
            f"{address}/generate returned no logprobs ({error!r}); it must support return_logprob"
        ) from error


def integer(value: Any) -> int | None:
    """Return a count; None if it is missing."""
    return None if value is None else int(value)


def parse_rescored(address: str, answer: Any, expected: list[int]) -> tuple[float, ...]:
    """Parse the logprobs of the `expected` last tokens of a prefill.

    Raises:
        EngineError: they belong to other tokens than those sent.
    """
    try:
        found = answer["meta_info"]["input_token_logprobs"]
        rows = found[len(found) - len(expected) :]
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
