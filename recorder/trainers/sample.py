"""A sample as a trainer has it, and how what a user gives becomes one."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from areal_core.safety.printable import printable
from recorder.errors import RecordError
from recorder.format import BATCH_KEYS, IMAGE_DATA, IMAGE_KEYS, LARGEST_VALUES
from recorder.pictures.kinds import encoded

STOP, LENGTH, ABORT = 0, 1, 2
FINISH_REASONS = {
    "stop": STOP,
    "completed": STOP,
    "eos": STOP,
    "end_turn": STOP,
    "tool_calls": STOP,
    "length": LENGTH,
    "truncated": LENGTH,
    "max_tokens": LENGTH,
    "abort": ABORT,
    "aborted": ABORT,
    "failed": ABORT,
    "skipped": ABORT,
}
# what a user calls the inputs to the loss -> their names in learning-*.safetensors
LEARNING = {
    "advantages": "advantages",
    "old_logprobs": "prox_logp",
    "ref_logprobs": "ref_logp",
    "teacher_logprobs": "teacher_logp",
    "returns": "returns",
    "values": "values",
    "entropies": "entropy",
}
GIVEN = (
    *("tokens", "prompt_tokens", "completion_tokens", "prompt_length", "loss_mask", "logprobs", "reward"),
    *("group", "finish_reason", "versions", "prompt", "completion", "scores", "extras", "learning"),
    "images",
    *LEARNING,
)


NOTHING: Mapping[str, Any] = {}  # shared: each container of a sample makes the next collection come sooner


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence of T tokens, prompt and completion. What is None is not known.

    Attributes:
        tokens: [T] int32; None: there is text alone, or values per token of unknown tokens.
        loss_mask: [T] int32 or bool, 1 on tokens that are trained on.
        logprobs: [T] float32 of the engine, in nats; NaN for single tokens that are not known. Read
            where `loss_mask` is 1, as `versions`.
        reward: one scalar.
        group: equal for the answers to one prompt; None: the sample has a prompt of its own.
        finish_reason: 0 stop, 1 length, 2 abort.
        versions: [T] int32, the weight version that sampled each token.
        prompt_length: number of tokens before the completion.
        text: prompt and completion.
        learning: [T] float32 by name, inputs to the loss, aligned to the token itself:
            "advantages", "prox_logp", "ref_logp", "values", ...
        extras: [T, ...] by name, any further values per token, such as "routed_experts".
        scores: further numbers by name, such as the terms of the reward; None for unknown ones.
        images: the encoded files of its pictures, in the order of the prompt.
        pixels: `pixel_values` [units, ...] and `image_grid_thw` [images, 3] of pictures whose files
            are not known; a grid's product is the number of units of its picture.
    """

    tokens: np.ndarray | None
    loss_mask: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    reward: float | None = None
    group: Hashable | None = None
    finish_reason: int | None = None
    versions: np.ndarray | None = None
    prompt_length: int | None = None
    text: tuple[str, str] | None = None
    learning: Mapping[str, np.ndarray] = field(default_factory=dict)
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    scores: Mapping[str, float | None] = field(default_factory=dict)
    images: Sequence[bytes] = ()
    pixels: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """T, also where the tokens themselves are not known; 0 for text alone."""
        return next(
            (len(each) for each in (self.tokens, self.loss_mask, self.logprobs) if each is not None), 0
        )


def parse_sample(given: Any, where: str) -> Sample:
    """Return the sample that a user gives: a Sample, or a mapping with members of GIVEN.

    `tokens` are the whole sequence; `prompt_tokens` and `completion_tokens` can be given instead.
    Values per token cover the whole sequence or the completion alone; they may be lists, NumPy or
    torch. Without `loss_mask`, all tokens of the completion are trained on if it is known where it
    begins. Arrays are copies. Raises RecordError, which names `where`.
    """
    if isinstance(given, Sample):
        arrays = {name: copied(getattr(given, name)) for name in OF_ARRAYS}
        return replace(given, **arrays)
    if not isinstance(given, Mapping):
        raise RecordError(f"{where} is {type(given).__name__}: give a dict or a Sample")
    if unknown := [name for name in given if name not in GIVEN]:
        raise RecordError(
            f"{where} has {printable(str(unknown[0]), 60)!r}; a sample may have {', '.join(GIVEN)}"
        )
    values = {name: value for name, value in given.items() if value is not None}
    tokens, prompt_length = tokens_of(values, where)
    size = next((np.size(values[name]) for name in ("loss_mask", "logprobs") if name in values), 0)
    rows = PerToken(size if tokens is None else len(tokens), prompt_length, where)
    mask = None
    if "loss_mask" in values:
        mask = rows.array("loss_mask", values["loss_mask"], np.int32)
    elif tokens is not None and prompt_length is not None:
        mask = np.ones(len(tokens), bool)
        mask[:prompt_length] = False
    learning = values.get("learning", {}) | {name: values[name] for name in LEARNING.keys() & values.keys()}
    sample = Sample(
        tokens=tokens,
        loss_mask=mask,
        logprobs=rows.array("logprobs", values["logprobs"], np.float32) if "logprobs" in values else None,
        reward=number(values["reward"], f"{where}, reward") if "reward" in values else None,
        group=values.get("group"),
        finish_reason=finish_reason_of(values.get("finish_reason"), where),
        versions=rows.array("versions", values["versions"], np.int32) if "versions" in values else None,
        prompt_length=prompt_length,
        text=text_of(values, where),
        learning={
            LEARNING.get(name, name): rows.array(name, item, np.float32) for name, item in learning.items()
        }
        or NOTHING,
        extras={name: rows.extra(name, value) for name, value in values.get("extras", {}).items()} or NOTHING,
        scores={
            str(name): None if value is None else number(value, f"{where}, score {name}")
            for name, value in values.get("scores", {}).items()
        }
        or NOTHING,
        images=pictures_of(values.get("images", ()), where),
    )
    if not isinstance(sample.group, Hashable):
        raise RecordError(f"{where}: the group is a {type(sample.group).__name__}: give a number or text")
    return sample


OF_ARRAYS = ("tokens", "loss_mask", "logprobs", "versions", "learning", "extras", "pixels")


def copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: copied(item) for name, item in value.items()}
    return None if value is None else np.array(value)


@dataclass(frozen=True)
class PerToken:
    """Values per token of a sample of `size` tokens."""

    size: int
    prompt_length: int | None
    where: str

    def array(self, name: str, values: Any, dtype: type) -> np.ndarray:
        """Return [T] values, 0 (-1 for versions) before the completion if only it was given.

        A single number holds for every token of the completion.
        """
        array = as_numpy(values, f"{self.where}, {name}", dtype)
        fill = -1 if name == "versions" else 0
        if array.ndim == 0:
            array = np.full(self.size - (self.prompt_length or 0), array)
        return self.whole(name, array, fill)

    def extra(self, name: str, values: Any) -> np.ndarray:
        """Return [T, ...] values of any type."""
        if name in BATCH_KEYS or name in RESERVED:
            raise RecordError(f"{self.where}: extras may not have {name!r}, which is a member of its own")
        return self.whole(name, as_numpy(values, f"{self.where}, {name}"), 0)

    def whole(self, name: str, array: np.ndarray, fill: int) -> np.ndarray:
        """Return values that cover the whole sequence. Raises RecordError for other lengths."""
        before = self.size - len(array) if array.ndim else -1
        if before and (before < 0 or before != self.prompt_length):
            completion = "" if self.prompt_length is None else f" or {self.size - self.prompt_length}"
            found = len(array) if array.ndim else "one"
            raise RecordError(f"{self.where}: {name} has {found} values: give {self.size}{completion}")
        if not before:
            return array
        return np.concatenate([np.full((before, *array.shape[1:]), fill, array.dtype), array])


# names in a batch that no extra values may have
RESERVED = frozenset(
    {
        "attention_mask",
        "cu_seqlens",
        "unknown",
        "prompt_length",
        "turns",
        IMAGE_DATA,
        *IMAGE_KEYS,
        *LARGEST_VALUES,
    }
)


def tokens_of(values: Mapping[str, Any], where: str) -> tuple[np.ndarray | None, int | None]:
    """Return the tokens of a sample, and where its completion begins."""
    pair = [values.get("prompt_tokens"), values.get("completion_tokens")]
    if "tokens" in values:
        if any(item is not None for item in pair):
            raise RecordError(
                f"{where} has tokens and prompt_tokens or completion_tokens: give one of the two"
            )
        tokens = token_ids(values["tokens"], f"{where}, tokens")
        length = values.get("prompt_length")
        if length is not None and not 0 <= int(length) <= len(tokens):
            raise RecordError(f"{where}: prompt_length is {length}, and there are {len(tokens)} tokens")
        return tokens, None if length is None else int(length)
    if all(item is None for item in pair):
        if not {"prompt", "completion", "loss_mask", "logprobs"} & values.keys():
            raise RecordError(f"{where} has neither tokens nor text: give tokens, or prompt and completion")
        return None, None
    if any(item is None for item in pair):
        raise RecordError(f"{where} has prompt_tokens or completion_tokens alone: give both, or tokens")
    prompt, completion = (token_ids(item, f"{where}, tokens") for item in pair)
    return np.concatenate([prompt, completion]), len(prompt)


def token_ids(values: Any, where: str, error: type[RecordError] = RecordError) -> np.ndarray:
    """Return [T] int32. Raises `error` for ids that no vocabulary has."""
    array = as_numpy(values, where)
    if array.size and array.dtype.kind not in "iu":
        raise error(f"{where}: {array.dtype} instead of integers")
    if array.ndim != 1:
        raise error(f"{where}: shape {array.shape}, one dimension expected")
    if array.size and not 0 <= array.min() <= array.max() < 2**31:
        raise error(f"{where}: token ids from {array.min()} to {array.max()}, 0 to {2**31 - 1} expected")
    return array.astype(np.int32, copy=False)


def as_numpy(values: Any, where: str, dtype: type | None = None) -> np.ndarray:
    """Return a copy of a list, NumPy array or torch tensor as an array; None in a list is NaN."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.float() if "bfloat16" in str(values.dtype) else values).numpy()
    try:
        return np.array(values, dtype)
    except (TypeError, ValueError) as error:
        raise RecordError(f"{where}: {printable(str(error), 100)}: give a list of numbers") from None


def number(value: Any, where: str) -> float:
    """Return a float of a number or a tensor with one. Raises RecordError."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise RecordError(
            f"{where} is {printable(repr(value), 60)}: give a number, or None if unknown"
        ) from None


def finish_reason_of(value: Any, where: str) -> int | None:
    """Return the number of a finish reason. Raises RecordError for an unknown name."""
    if value is None or (isinstance(value, int) and value in FINISH_REASONS.values()):
        return value
    if str(value).lower() not in FINISH_REASONS:
        known = ", ".join(FINISH_REASONS)
        raise RecordError(f"{where}: finish reason {printable(repr(value), 60)}, known are {known}, or None")
    return FINISH_REASONS[str(value).lower()]


def pictures_of(values: Any, where: str) -> tuple[bytes, ...]:
    """Return the encoded files of pictures. Raises RecordError for what is none."""
    if not isinstance(values, list | tuple):
        raise RecordError(f"{where}: images are {type(values).__name__}: give a list of encoded files, bytes")
    return tuple(encoded(value, f"{where}, image {number}") for number, value in enumerate(values))


def text_of(values: Mapping[str, Any], where: str) -> tuple[str, str] | None:
    """Return prompt and completion as text."""
    given = [values[name] for name in ("prompt", "completion") if name in values]
    if not given:
        return None
    if len(given) == 1 or not all(isinstance(item, str) for item in given):
        raise RecordError(f"{where}: prompt and completion are the text of the sample: give both as text")
    return given[0], given[1]
