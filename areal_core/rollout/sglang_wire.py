"""The wire format of SGLang's `/generate`: a request's JSON, and the parsed reply."""

import json
from dataclasses import dataclass
from typing import Any

from areal_core.rollout.errors import MalformedReply
from areal_core.rollout.types import Sampling


@dataclass(frozen=True)
class Chunk:
    """The tokens of one reply, and the reason for its end."""

    tokens: list[int]
    logprobs: list[float]  # log_softmax(logits / temperature) before top-k, top-p (SGLang >= 0.4.6)
    versions: list[int | None]  # None where the server has no numbered weights yet
    finish: str  # "stop", "length" or "abort"


def adapter_name(name: str, version: int | str) -> str:
    """Return the name of one version of an adapter on the servers."""
    return f"{name}-v{version}"


def generate_payload(
    input_ids: list[int], sampling: Sampling, num_new_tokens: int, num_sampled: int
) -> dict[str, Any]:
    """Return a request's JSON; the last `num_sampled` of `input_ids` are of the completion."""
    params = {
        "max_new_tokens": num_new_tokens,
        "min_new_tokens": max(0, sampling.min_new_tokens - num_sampled),
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if sampling.stop:
        params["stop"] = sampling.stop
    return {
        "input_ids": input_ids,
        "sampling_params": params,
        "return_logprob": True,
        "stream": False,
    }


def parse_generate(body: bytes, version: int | None = None) -> Chunk:
    """Parse a reply of `/generate`.

    Args:
        version: version of all tokens, if the request named it; None for those in the reply.

    Raises:
        MalformedReply: a field is missing, or the lists differ in length.
    """
    try:
        meta = json.loads(body)["meta_info"]
        finish = meta["finish_reason"]
        if finish["type"] == "abort" and not meta.get(
            "output_token_logprobs"
        ):  # aborted before its first token
            return Chunk([], [], [], "abort")
        logprobs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
        tokens = [int(entry[1]) for entry in meta["output_token_logprobs"]]
        count = int(meta["completion_tokens"])
        spans = meta.get("weight_versions") or [
            {"version": meta.get("weight_version", ""), "start": 0, "end": count}
        ]
        versions: list[int | None] = []
        for span in spans:
            of_span = parse_version(span["version"]) if version is None else version
            versions += [of_span] * (span["end"] - span["start"])
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise MalformedReply(
            f"a /generate reply is not what SGLang 0.5 sends ({error!r}); it begins {body[:200]!r}"
        ) from error
    if len(tokens) != count or len(versions) != count:
        raise MalformedReply(
            f"a /generate reply holds {len(tokens)} logprobs and {len(versions)} versions for {count} tokens"
        )
    return Chunk(tokens, logprobs, versions, str(finish["type"]))


def parse_version(text: str) -> int | None:
    """Return the number of a weight version; None before the first weight update ("default")."""
    return int(text) if text.isdecimal() else None
