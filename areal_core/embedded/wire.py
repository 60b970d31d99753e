"""The server side of SGLang's `/generate`: parse a request's JSON, build a reply's JSON."""

import itertools
import json
import uuid
from collections.abc import Sequence
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from areal_core.data.images import bytes_of_url
from areal_core.data.processor import VisionProcessor
from areal_core.embedded.engine import Sampled
from areal_core.errors import ImageError
from areal_core.rollout.types import TOP_K_OFF, ModelRequest, Sampling

GENERATE_FIELDS = {
    "input_ids",
    "image_data",
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
KINDS: dict[str, type] = {
    "top_p": float,
    "stop_token_ids": list,
    "ignore_eos": bool,
    "skip_special_tokens": bool,
    "frequency_penalty": float,
}
REQUIRED: Any = object()
T = TypeVar("T")


class BadRequest(ValueError):
    """A request that this server refuses."""


def succeeded(message: str) -> dict[str, Any]:
    """Return the body of a successful reply."""
    return {"success": True, "message": message}


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parse a request's JSON. Raises `BadRequest` unless it is an object of texts in UTF-8."""
    try:
        body = json.loads(raw)
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"the body is a {type(body).__name__}; expected a JSON object")
    return body


def take(body: dict[str, Any], name: str, kind: type[T], default: Any = REQUIRED) -> Any:
    """Return the value of a field; the default if it is absent or null. Raises `BadRequest`."""
    value = body.get(name)
    if value is None:
        if default is REQUIRED:
            raise BadRequest(f"field '{name}' is missing")
        return default
    is_right = isinstance(value, (int, float) if kind is float else kind)
    if not is_right or (kind in (int, float) and isinstance(value, bool)):
        raise BadRequest(f"{name} is {str(value)[:100]!r}; expected a value of type {kind.__name__}")
    return value


def parse_request(
    body: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    vocab_size: int,
    processor: VisionProcessor | None = None,
) -> ModelRequest:
    """A `/generate` body. Raises `BadRequest` for anything unsupported."""
    if unknown := set(body) - GENERATE_FIELDS:
        raise BadRequest(f"the embedded engine does not support {', '.join(sorted(unknown))}")
    if body.get("stream"):
        raise BadRequest("stream is true; the embedded engine answers in one piece")
    text = take(body, "text", str, None)
    input_ids = take(body, "input_ids", list) if text is None else tokenizer(text)["input_ids"]
    if not input_ids or not all(type(token) is int and 0 <= token < vocab_size for token in input_ids):
        raise BadRequest(f"input_ids must be one list of token ids below {vocab_size}, not empty")
    images = parse_images(body)
    if images and processor is None:
        raise BadRequest("image_data is given, and the model reads text only")
    if processor is not None:
        input_ids = expanded(input_ids, images, processor)
    params = take(body, "sampling_params", dict, {})
    if unknown := set(params) - RENAMED - PLAIN:
        raise BadRequest(f"the embedded engine does not support sampling_params.{', '.join(sorted(unknown))}")
    for name, kind in KINDS.items():
        take(params, name, kind, None)
    if not all(type(token) is int for token in params.get("stop_token_ids") or ()):
        raise BadRequest("sampling_params.stop_token_ids must be a list of token ids")
    wanted = take(params, "max_new_tokens", int, 128)
    if len(input_ids) + wanted > context_length:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {context_length} tokens: "
            f"{len(input_ids)} of the prompt and {wanted} of the completion"
        )
    temperature = take(params, "temperature", float, 1.0)
    sampling = Sampling(
        max_new_tokens=wanted,
        min_new_tokens=take(params, "min_new_tokens", int, 0),
        max_tokens=context_length,
        greedy=temperature == 0,
        temperature=temperature or 1.0,
        top_k=top_k if (top_k := take(params, "top_k", int, -1)) >= 1 else TOP_K_OFF,
        **{name: value for name, value in params.items() if name in PLAIN and value is not None},
    )
    return ModelRequest(
        input_ids=input_ids,
        sampling=sampling,
        rid=take(body, "rid", str, "") or uuid.uuid4().hex,
        images=images,
        image_token_id=-1 if processor is None else processor.image_token_id,
    )


def parse_images(body: dict[str, Any]) -> tuple[bytes, ...]:
    """Return the pictures of `image_data`, data: URLs or base64. Raises `BadRequest`."""
    pictures = []
    for text in take(body, "image_data", list, []):
        if not isinstance(text, str):
            raise BadRequest(f"image_data contains {str(text)[:80]!r}; expected data: URLs or base64")
        try:
            pictures.append(bytes_of_url(text if ":" in text[:6] else f"data:image;base64,{text}"))
        except ImageError as error:
            raise BadRequest(str(error)) from error
    return tuple(pictures)


def expanded(input_ids: list[int], images: Sequence[bytes], processor: VisionProcessor) -> list[int]:
    """Return ids with a placeholder for each vision token, as SGLang expands them.

    Raises `BadRequest` unless there is one for each picture.
    """
    token = processor.image_token_id
    if input_ids.count(token) != len(images):
        raise BadRequest(
            f"input_ids have {input_ids.count(token)} image tokens and there are {len(images)} images"
        )
    message = {"role": "user", "content": [{"type": "image"}]}
    sizes = iter([sum(processor.prompt([message], [image]).mm_token_type_ids) for image in images])
    return [one for id in input_ids for one in ([token] * next(sizes) if id == token else [id])]


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
            "cached_tokens": sampled.cached_tokens,
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
