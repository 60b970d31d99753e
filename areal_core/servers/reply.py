"""One reply of a server: its tokens, and the rules that hold before they may become data.

A server that breaks a rule is quarantined (`health.py`) and its request is sent elsewhere: one NaN
among the behaviour log-probs makes every later loss NaN, and an id outside the vocabulary ends the
training step with an error that names neither the server nor the reply.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from areal_core.data.routed_experts import RoutingSizes
from areal_core.rollout.errors import MalformedReply

FINISH = ("stop", "length", "abort")
# A log-softmax in float32 may exceed 0 by rounding; such a log-prob becomes 0.
ROUNDING = 1e-5
SHOWN_BYTES = 200  # of a reply in an error message


@dataclass(frozen=True)
class Chunk:
    """The tokens of one reply, and the reason for its end."""

    tokens: list[int]
    logprobs: list[float]  # log_softmax(logits / temperature), before top-k and top-p
    versions: list[int | None]  # None where the server has no numbered weights yet
    finish: str  # "stop", "length" or "abort"
    rid: str  # of the request that it answers
    experts: np.ndarray | None = None  # int [tokens * layers * top_k]; [tokens, layers, top_k] once checked


@dataclass(frozen=True)
class Scored:
    """The log-probs of given tokens, at temperature 1, and the version of the weights."""

    logprobs: list[float]
    version: int | None  # None where the server has no numbered weights yet


def parse_version(text: str) -> int | None:
    """Return the number of a weight version; None before the first weight update ("default")."""
    return int(text) if text.isdecimal() else None


def json_of(body: bytes | str) -> Any:
    """Parse the JSON of a reply. Raises ValueError, also where it is nested too deeply."""
    try:
        return json.loads(body)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


def malformed(engine: str, route: str, error: Exception, body: bytes | str) -> MalformedReply:
    return MalformedReply(
        f"a {route} reply is not what {engine} sends ({error!r}); it begins {body[:SHOWN_BYTES]!r}"
    )


def versions_of(spans: Sequence[dict[str, Any]], count: int) -> list[int | None]:
    """Return the version of each of `count` tokens from spans `{version, start, end}`.

    Raises `MalformedReply` if they are of another number of tokens, or not one after the other.
    """
    if [span["start"] for span in spans] != [0, *(span["end"] for span in spans)][: len(spans)]:
        raise MalformedReply(
            f"a reply holds versions of spans with gaps: {spans}"[:SHOWN_BYTES], "counts_agree"
        )
    lengths = [span["end"] - span["start"] for span in spans]
    if sum(lengths) != count or min(lengths, default=0) < 0:
        raise MalformedReply(f"a reply holds versions of {sum(lengths)} tokens for {count}", "counts_agree")
    return [
        version
        for span, length in zip(spans, lengths, strict=True)
        for version in [parse_version(span["version"])] * length
    ]


@dataclass(frozen=True)
class Asked:
    """What was asked, as far as a reply must agree with it.

    `vocab_size` and `newest`, the newest version that a server may hold, are None if not known.
    `sizes` are of the experts, None if they are not asked; they are asked for `num_before` tokens
    before the last one of the prompt, for that one, and for the completion but its last token.
    """

    rid: str
    num_new_tokens: int
    vocab_size: int | None
    newest: int | None
    sizes: RoutingSizes | None = None
    num_before: int = 0


def checked(chunk: Chunk, asked: Asked) -> Chunk:
    """Return the reply, its log-probs at or below 0, its experts int16 [tokens, layers, top_k].

    Experts that an aborted reply lacks are None.

    Raises:
        MalformedReply: it breaks a rule; the error names the rule and the value.
    """
    if found := broken_rule(chunk, asked):
        raise broken(*found)
    experts = experts_of(chunk, asked)
    return replace(chunk, logprobs=[min(logprob, 0.0) for logprob in chunk.logprobs], experts=experts)


def experts_of(chunk: Chunk, asked: Asked) -> np.ndarray | None:
    """Return the experts of a reply, int16 [tokens, layers, top_k]; None if it may lack them.

    Raises:
        MalformedReply: they are not those of its tokens, or of another model.
    """
    sizes = asked.sizes
    if sizes is None or (chunk.experts is None and chunk.finish == "abort"):
        return None
    if chunk.experts is None:
        raise broken("routed_experts", "it has none; start the server with --enable-return-routed-experts")
    shape = (asked.num_before + len(chunk.tokens), sizes.num_layers, sizes.top_k)
    if chunk.experts.size != math.prod(shape):
        seen = f"{chunk.experts.size} numbers, and {list(shape)} were expected"
        raise broken("routed_experts", seen)
    experts = chunk.experts.reshape(shape)
    if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < sizes.num_experts:
        seen = f"experts from {experts.min()} to {experts.max()}, and the model has {sizes.num_experts}"
        raise broken("routed_experts", seen)
    return experts.astype(np.int16)


def broken(rule: str, seen: str) -> MalformedReply:
    return MalformedReply(f"a reply breaks the rule {rule}: {seen}", rule)


def broken_rule(chunk: Chunk, asked: Asked) -> tuple[str, str] | None:
    tokens, logprobs = chunk.tokens, chunk.logprobs
    if chunk.rid != asked.rid:
        return "request_id", f"it answers {chunk.rid!r}, and {asked.rid!r} was asked"
    if chunk.finish not in FINISH:
        return "finish_reason", f"{chunk.finish!r} is none of {', '.join(FINISH)}"
    if not len(tokens) == len(logprobs) == len(chunk.versions):
        counts = f"{len(tokens)} tokens, {len(logprobs)} logprobs, {len(chunk.versions)} versions"
        return "counts_agree", counts
    if not tokens and chunk.finish != "abort":
        return "not_empty", f"no token, and finish reason {chunk.finish!r}"
    if len(tokens) > asked.num_new_tokens:
        return "max_new_tokens", f"{len(tokens)} tokens, and {asked.num_new_tokens} were asked"
    if not all(map(math.isfinite, logprobs)):
        return "logprobs_finite", first_wrong(logprobs, lambda logprob: not math.isfinite(logprob))
    if max(logprobs, default=0.0) > ROUNDING:
        return "logprobs_at_most_0", first_wrong(logprobs, lambda logprob: logprob > ROUNDING)
    size = math.inf if asked.vocab_size is None else asked.vocab_size
    if tokens and not 0 <= min(tokens) <= max(tokens) < size:
        wrong = first_wrong(tokens, lambda token: not 0 <= token < size)
        return "ids_in_vocabulary", f"{wrong}, and the vocabulary has {size} ids"
    versions = [version for version in chunk.versions if version is not None]
    newest = max(versions, default=0)
    if versions != sorted(versions):
        return "weight_version", f"versions from {min(versions)} to {newest} that fall within the reply"
    if asked.newest is not None and newest > asked.newest:
        return "weight_version", f"version {newest}, and the newest is {asked.newest}"
    return None


def first_wrong(values: Sequence[float], is_wrong: Callable[[float], bool]) -> str:
    return next(f"{value} at token {i}" for i, value in enumerate(values) if is_wrong(value))
