"""The server side of SGLang's `/generate`: parse a request's JSON, build a reply's JSON."""

import itertools
import uuid
from typing import Any

from transformers import PreTrainedTokenizerBase

from areal_core.embedded.engine import Sampled
from areal_core.rollout.types import TOP_K_OFF, ModelRequest, Sampling

GENERATE_FIELDS = {
    "input_ids",
    "text",
    "sampling_params",
    "return_logprob",
    "top_logprobs_num",
    "stream",
    "rid",
    "lora_path",
}
RENAMED = {"temperature", "top_k", "min_new_tokens", "max_new_tokens"}
PLAIN = {"top_p", "stop_token_ids", "stop", "ignore_eos", "skip_special_tokens", "frequency_penalty"}


class BadRequest(ValueError):
    """A request that this server refuses."""


def succeeded(message: str) -> dict[str, Any]:
    """Return the body of a successful reply."""
    return {"success": True, "message": message}


def parse_request(
    body: dict[str, Any], tokenizer: PreTrainedTokenizerBase, context_length: int
) -> ModelRequest:
    """A `/generate` body. Raises `BadRequest` for anything unsupported."""
    if unknown := set(body) - GENERATE_FIELDS:
        raise BadRequest(f"the embedded engine does not support {', '.join(sorted(unknown))}")
    if body.get("stream"):
        raise BadRequest("stream is true; the embedded engine answers in one piece")
    input_ids = tokenizer(body["text"])["input_ids"] if "text" in body else body["input_ids"]
    if not input_ids or not all(isinstance(token, int) for token in input_ids):
        raise BadRequest("input_ids must be one list of token ids, not empty")
    params = body.get("sampling_params", {})
    if unknown := set(params) - RENAMED - PLAIN:
        raise BadRequest(f"the embedded engine does not support sampling_params.{', '.join(sorted(unknown))}")
    wanted = params.get("max_new_tokens", 128)
    if len(input_ids) + wanted > context_length:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens: "
            f"{len(input_ids)} of the prompt and {wanted} of the completion"
        )
    temperature = params.get("temperature", 1.0)
    sampling = Sampling(
        max_new_tokens=wanted,
        min_new_tokens=params.get("min_new_tokens", 0),
        max_tokens=context_length,
        greedy=temperature == 0,
        temperature=temperature or 1.0,
        top_k=TOP_K_OFF if params.get("top_k", -1) < 1 else params["top_k"],
        **{name: value for name, value in params.items() if name in PLAIN and value is not None},
    )
    return ModelRequest(input_ids=input_ids, sampling=sampling, rid=body.get("rid") or uuid.uuid4().hex)


def generate_reply(
    request: ModelRequest, sampled: Sampled, version: str, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """The JSON of a completion, with the spans of tokens that each version sampled."""
    ends = [(name, len(list(run))) for name, run in itertools.groupby(sampled.versions)] or [(version, 0)]
    starts = itertools.accumulate((count for _, count in ends), initial=0)
    spans = [
        {"version": name, "start": start, "end": start + count}
        for (name, count), start in zip(ends, starts, strict=False)
    ]
    skip = request.sampling.skip_special_tokens
    return {
        "text": tokenizer.decode(sampled.tokens, skip_special_tokens=skip),
        "output_ids": sampled.tokens,
        "meta_info": {
            "id": request.rid,
            "finish_reason": finish_reason(sampled),
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(sampled.tokens),
            "cached_tokens": 0,
            "weight_version": spans[-1]["version"],
            "weight_versions": spans,
            "output_token_logprobs": [
                [logprob, token, None]
                for logprob, token in zip(sampled.logprobs, sampled.tokens, strict=True)
            ],
            "output_top_logprobs": [[] for _ in sampled.tokens],  # not kept for other tokens
        },
    }


def finish_reason(sampled: Sampled) -> dict[str, Any]:
    if sampled.finish == "stop":
        return {"type": "stop", "matched": sampled.tokens[-1]}
    if sampled.finish == "length":
        return {"type": "length", "length": len(sampled.tokens)}
    return {"type": "abort", "message": "Aborted" if sampled.tokens else "Abort in waiting queue"}
