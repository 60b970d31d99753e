"""The common result of every importer: steps of samples, and notes on missing data.

A sample is one sequence, prompt and completion; its per-token values are aligned to the token
itself. What a format does not have stays None.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recorder.errors import ForeignFormat
from recorder.trainers.batches import unknown_value
from recorder.trainers.sample import FINISH_REASONS, Sample

NO_WEIGHTS = "weights and optimizer are not in the file: choose the model for a replay"
NO_VERSIONS = "weight versions are not in the file"
NO_VERSIONS_OR_REASONS = "weight versions and finish reasons are not in the file"
FROM_REWARDS = "advantages are not in the file: they are computed again from the rewards, by group"
BY_PROMPT = "the file does not name groups, they are derived: samples with the same prompt are a group"
BY_MASK = (
    "the file does not say where a completion begins, it is derived: at the first token in the loss mask"
)
TEXT_ONLY = (
    "the dump has text and no tokens: the record is for inspection only, it can be listed and read, "
    "but not replayed"
)


@dataclass(frozen=True)
class Step:
    """One batch; `name` is its name in the source."""

    name: str
    samples: Sequence[Sample]


@dataclass(frozen=True)
class Foreign:
    """Content of a source: format, steps, and notes on missing data and assumptions."""

    format: str
    steps: Sequence[Step]
    notes: Sequence[str] = field(default_factory=tuple)


def completion_sample(
    prompt: Any,
    completion: Any,
    *,
    where: str,
    loss_mask: Any = None,
    logprobs: Any = None,
    versions: Any = None,
    learning: Mapping[str, Any] | None = None,
    **known: Any,
) -> Sample:
    """Build a sample whose values per token cover the completion alone.

    Without a mask, all tokens of the completion are trained on. `known` are further members of
    Sample. Raises ForeignFormat if lengths differ.
    """
    prompt, completion = as_tokens(prompt, where), as_tokens(completion, where)
    mask = np.ones(len(completion), np.int32) if loss_mask is None else loss_mask

    def whole(values: Any, fill: int = 0) -> Any:
        if values is None:
            return None
        if len(values) != len(completion):
            raise ForeignFormat(
                f"{where}: {len(values)} values per token for {len(completion)} tokens of completion"
            )
        return np.concatenate([np.full(len(prompt), fill), np.asarray(values, np.float64)])

    return sequence_sample(
        np.concatenate([prompt, completion]),
        whole(mask),
        where=where,
        logprobs=whole(logprobs),
        versions=whole(versions, -1),
        learning={name: whole(values) for name, values in (learning or {}).items()},
        prompt_length=len(prompt),
        **known,
    )


def sequence_sample(
    tokens: Any,
    loss_mask: Any,
    *,
    where: str,
    logprobs: Any = None,
    versions: Any = None,
    learning: Mapping[str, Any] | None = None,
    **known: Any,
) -> Sample:
    """Build a sample whose values per token cover the whole sequence.

    Values of `learning` that are None are left out. Without `prompt_length`, the completion begins
    at the first token in the mask. Raises ForeignFormat if lengths differ.
    """
    ids = as_tokens(tokens, where)

    def per_token(values: Any, dtype: type) -> Any:
        if values is not None and len(values) != len(ids):
            raise ForeignFormat(f"{where}: {len(values)} values per token for {len(ids)} tokens")
        return None if values is None else np.asarray(values, dtype)

    mask = per_token(loss_mask, np.int32)
    if "prompt_length" not in known and mask is not None and mask.any():
        known["prompt_length"] = int((mask != 0).argmax())
    return Sample(
        tokens=ids,
        loss_mask=mask,
        logprobs=per_token(logprobs, np.float32),
        versions=per_token(versions, np.int32),
        learning={
            name: per_token(values, np.float32)
            for name, values in (learning or {}).items()
            if values is not None
        },
        **known,
    )


def experts_of(values: Any, num_tokens: int, where: str) -> dict[str, np.ndarray]:
    """Return routed experts [T, layers, k] as extras of a sample.

    Engines report them for the tokens that they read: the last ones may be missing, and are
    unknown then. Raises ForeignFormat for another shape.
    """
    experts: np.ndarray = np.asarray(values)
    missing = num_tokens - len(experts) if experts.ndim == 3 else -1
    if missing < 0 or experts.dtype.kind not in "iu":
        raise ForeignFormat(f"{where}: routed experts of shape {experts.shape} for {num_tokens} tokens")
    rest = np.full((missing, *experts.shape[1:]), unknown_value(experts.dtype), experts.dtype)
    return {"routed_experts": np.concatenate([experts, rest])}


def prompt_group(tokens: np.ndarray, loss_mask: np.ndarray) -> Hashable:
    """Return the tokens before the first one in the mask as a group; None without such a token."""
    return tokens[: int((loss_mask != 0).argmax())].tobytes() if loss_mask.any() else None


def as_tokens(ids: Any, where: str) -> np.ndarray:
    """Convert token ids to int32. Raises ForeignFormat for ids that no vocabulary has."""
    array: np.ndarray = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ForeignFormat(f"{where}: token ids of type {array.dtype} and shape {array.shape}")
    if array.size and not 0 <= array.min() <= array.max() < 2**31:
        raise ForeignFormat(f"{where}: token ids from {array.min()} to {array.max()}")
    return array.astype(np.int32)


def member(document: Mapping[str, Any], name: str, where: str) -> Any:
    """Return a mandatory member.

    Raises ForeignFormat, which lists the present ones, if it is absent.
    """
    if name not in document:
        raise ForeignFormat(f"{where} has no {name!r}, only {sorted(map(str, document))[:20]}")
    return document[name]


def optional(document: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return an optional member; `default` if it is absent or None."""
    value = document.get(name)
    return default if value is None else value


def number_or_none(value: Any) -> float | None:
    """Return a float, None for None and NaN."""
    return None if value is None or value != value else float(value)


def finish_reason_of(name: str | None) -> int | None:
    """Return the number of a finish reason; None for one that is unknown or absent."""
    return None if name is None else FINISH_REASONS.get(str(name).lower())
