"""Samples as a step of a record: the flat batch, the inputs to the loss, and the text.

Rows are sorted by group. What a sample does not know is a bit of `unknown` and a value that no
reader can mistake for one: NaN, -1, or a prompt of its own (FORMAT.md).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recorder.documents import json_text
from recorder.errors import RecordError
from recorder.format import IMAGE_DATA, UNKNOWN_BITS
from recorder.tensors import FlatBatch, flatten
from recorder.trainers.sample import Sample

Place = tuple[int, int]  # the numbers of a row's prompt in the run, and of the sample of this prompt


@dataclass(frozen=True)
class Content:
    """What the samples of a step on a rank become."""

    batch: FlatBatch
    learning: FlatBatch | None
    text: bytes | None


def number_groups(
    ranks: Sequence[Sequence[Hashable | None]], first_prompt: int
) -> tuple[list[list[Place]], int]:
    """Number the samples of a step by group.

    Args:
        ranks: the group of each sample of each rank; None is a prompt of its own.
        first_prompt: the number of the step's first prompt.

    Returns:
        The places of each rank's samples, and the number that follows the step's last prompt.
    """
    prompts: dict[Hashable, int] = {}
    counts: list[int] = []
    places: list[list[Place]] = []
    for groups in ranks:
        places.append([])
        for group in groups:
            prompt = len(counts) if group is None else prompts.setdefault(group, len(counts))
            if prompt == len(counts):
                counts.append(0)
            places[-1].append((first_prompt + prompt, counts[prompt]))
            counts[prompt] += 1
    return places, first_prompt + len(counts)


def check_kinds(samples: Sequence[Sample]) -> None:
    """Raise RecordError unless values of a name have one shape and type in all samples of a step.

    Apart from `content_of`, so that a rank finds it out before others wait for it.
    """
    has_pixels = any(sample.pixels and not sample.images for sample in samples)  # else files are stored
    kinds: dict[str, set[tuple[tuple[int, ...], np.dtype]]] = {}
    for sample in samples:
        pixels = {"pixel_values": sample.pixels["pixel_values"]} if has_pixels and sample.pixels else {}
        for name, array in {**sample.extras, **pixels}.items():
            kinds.setdefault(name, set()).add((array.shape[1:], array.dtype))
    for name in sorted(kinds):
        if len(kinds[name]) > 1:
            raise RecordError(
                f"samples of one step have {name} of shapes and types {sorted(map(str, kinds[name]))[:4]}"
            )


def content_of(samples: Sequence[Sample], places: Sequence[Place]) -> Content:
    """Return the content of a step; rows are sorted by place. `check_kinds` comes before it."""
    order = sorted(range(len(samples)), key=places.__getitem__)
    rows = [samples[index] for index in order]
    batch = pad(rows, [places[index] for index in order])
    learning = pad_learning(rows, batch["attention_mask"])
    return Content(
        flatten(batch), None if learning is None else flatten(learning, any_padding=True), text_lines(rows)
    )


def pad(rows: Sequence[Sample], places: Sequence[Place]) -> dict[str, np.ndarray]:
    """Build the padded batch of ARCHITECTURE.md, with what a trainer may have besides."""
    shape = (len(rows), max((row.num_tokens for row in rows), default=0))
    lengths = np.array([row.num_tokens for row in rows], np.int64)
    batch: dict[str, np.ndarray] = {
        "attention_mask": np.arange(shape[1]) < lengths[:, None],
        "input_ids": np.zeros(shape, np.int32),
        "loss_mask": np.zeros(shape, np.int32),
        "logprobs": np.zeros(shape, np.float32),
        "versions": np.zeros(shape, np.int32),
        "rewards": np.array([np.nan if row.reward is None else row.reward for row in rows], np.float32),
        "prompt_id": np.array([prompt for prompt, _ in places], np.int64),
        "sample_id": np.array([sample for _, sample in places], np.int32),
        "finish_reason": np.array([row.finish_reason or 0 for row in rows], np.int32),
        "prompt_length": np.array([row.prompt_length or 0 for row in rows], np.int64),
        "unknown": np.array([unknown_bits(row) for row in rows], np.uint8),
    }
    for number, row in enumerate(rows):
        size = row.num_tokens
        mask = np.zeros(size, np.int32) if row.loss_mask is None else row.loss_mask
        sampled = np.ones(size, bool) if row.loss_mask is None else mask != 0
        batch["input_ids"][number, :size] = 0 if row.tokens is None else row.tokens
        batch["loss_mask"][number, :size] = mask
        # as given outside of the mask, too: a wrong mask would destroy its own evidence
        batch["logprobs"][number, :size] = (
            np.where(sampled, np.float32(np.nan), np.float32(0)) if row.logprobs is None else row.logprobs
        )
        batch["versions"][number, :size] = -1 if row.versions is None else np.where(sampled, row.versions, -1)
    for name in sorted({name for row in rows for name in row.scores}):
        scores = [row.scores.get(name) for row in rows]
        batch[f"scores.{name}"] = np.array(
            [np.nan if score is None else score for score in scores], np.float64
        )
    return batch | pad_extras(rows, shape) | join_pictures(rows)


def unknown_bits(row: Sample) -> int:
    """Return the bits for what the sample does not know."""
    values = {
        "input_ids": row.tokens,
        "loss_mask": row.loss_mask,
        "logprobs": row.logprobs,
        "versions": row.versions,
        "rewards": row.reward,
        "prompt_id": row.group,
        "finish_reason": row.finish_reason,
        "prompt_length": row.prompt_length,
    }
    return sum(bit for key, bit in UNKNOWN_BITS.items() if values[key] is None)


def pad_extras(rows: Sequence[Sample], shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Pad further values per token, [B, T, ...]; -1 or NaN in rows that lack them."""
    padded: dict[str, np.ndarray] = {}
    for name in sorted({name for row in rows for name in row.extras}):
        first = next(row.extras[name] for row in rows if name in row.extras)
        fill = unknown_value(first.dtype)
        padded[name] = np.zeros((*shape, *first.shape[1:]), first.dtype)
        for number, row in enumerate(rows):
            padded[name][number, : row.num_tokens] = row.extras.get(name, fill)
    return padded


def join_pictures(rows: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Return the pictures of all rows one after another, as files, else as pixels.

    Nothing if no row has any.
    """
    pictures = [picture for row in rows for picture in row.images]
    if not pictures or any(row.pixels and not row.images for row in rows):
        return join_pixels(rows)
    return {
        "image_count": np.array([len(row.images) for row in rows], np.int32),
        "image_bytes": np.array([len(picture) for picture in pictures], np.int32),
        IMAGE_DATA: np.frombuffer(b"".join(pictures), np.uint8),
    }


def join_pixels(rows: Sequence[Sample]) -> dict[str, np.ndarray]:
    known = [row.pixels for row in rows if row.pixels]
    if not known:
        return {}
    grids = np.concatenate([pixels["image_grid_thw"] for pixels in known])
    return {
        "image_count": np.array([len(row.pixels.get("image_grid_thw", ())) for row in rows], np.int32),
        "image_units": grids.prod(axis=1).astype(np.int32),
        "image_grid_thw": grids,
        "pixel_values": np.concatenate([pixels["pixel_values"] for pixels in known]),
    }


def unknown_value(dtype: np.dtype) -> Any:
    """Return what stands for an unknown value: NaN, -1, the largest unsigned number, or False."""
    if dtype.kind == "f":
        return np.nan
    return {"i": -1, "b": False}.get(dtype.kind, np.iinfo(dtype).max if dtype.kind == "u" else 0)


def pad_learning(rows: Sequence[Sample], attention_mask: np.ndarray) -> dict[str, np.ndarray] | None:
    """Pad the inputs to the loss, next-token aligned: position t has the value of token t + 1.

    The last position has that of the first token. None if no sample has any. A row that lacks a
    name is NaN there.
    """
    names = sorted({name for row in rows for name in row.learning})
    if not names:
        return None
    padded = {name: np.zeros(attention_mask.shape, np.float32) for name in names}
    for number, row in enumerate(rows):
        for name in names:
            values = row.learning.get(name)
            padded[name][number, : row.num_tokens] = np.nan if values is None else np.roll(values, -1)
    return {"attention_mask": attention_mask, **padded}


def text_lines(rows: Sequence[Sample]) -> bytes | None:
    """Return the text file of a step; None if no sample has text."""
    if not any(row.text for row in rows):
        return None
    lines = []
    for number, row in enumerate(rows):
        prompt, completion = row.text or ("", "")
        reward = None if row.reward is None else float(np.float32(row.reward))
        line = {"row": number, "prompt": prompt, "completion": completion, "reward": reward}
        lines.append(json_text(line) + "\n")
    return "".join(lines).encode()
