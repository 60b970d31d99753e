"""Placeholders of images: how many tokens stand for each image, in a row and by the processor."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from areal_core.data.processor import VisionProcessor
from consistency.case import Finding
from consistency.errors import NothingToCompare
from consistency.score import Scorer
from consistency.source import Sampled
from consistency.tokens import Bools, Images, Ints, Sequences


def placeholder_counts(processor: VisionProcessor, images: Images) -> tuple[tuple[int, ...], ...]:
    known: dict[bytes, int] = {}
    for image in {image for row in images for image in row}:
        ids = processor.tokenize(processor.processor.image_token, [image]).input_ids
        known[image] = ids.count(processor.image_token_id)
    return tuple(tuple(known[image] for image in row) for row in images)


def runs_of(input_ids: Ints, token_id: int) -> list[tuple[int, int]]:
    """Return begin and end of each run of a token."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], input_ids == token_id, [False]]).astype(int)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def expanded(rows: Sequences, token_id: int, counts: Sequence[Sequence[int]]) -> Sequences:
    """Give the n-th run of placeholders of each row as many as `counts[row][n]`."""
    repeats = np.ones(len(rows.input_ids), np.int64)
    for row, wanted in enumerate(counts):
        begin = int(rows.cu_seqlens[row])
        runs = runs_of(rows.input_ids[rows.row(row)], token_id)
        for (first, last), count in zip(runs, wanted, strict=False):
            repeats[begin + first : begin + last] = 0
            repeats[begin + first] = count
    return with_repeats(rows, repeats)


def with_repeats(rows: Sequences, repeats: Ints) -> Sequences:
    """Repeat each token so many times; 0 leaves it out."""
    at = np.repeat(np.arange(len(repeats)), repeats)
    ends = np.concatenate([[0], np.cumsum(repeats)])
    return replace(
        rows,
        input_ids=rows.input_ids[at],
        sampled=rows.sampled[at],
        engine_logprobs=rows.engine_logprobs[at],
        versions=None if rows.versions is None else rows.versions[at],
        cu_seqlens=ends[rows.cu_seqlens],
    )


def prepare_images(scorer: Scorer, sampled: Sampled) -> Sampled:
    """Give every row the placeholders that its images have in the scoring model.

    Tokens from a sampled placeholder on are not compared: Transformers would look for its image.

    Raises:
        NothingToCompare: rows have images and the model has no processor, or a row has other
            numbers of images and of runs of placeholders.
    """
    if all(chunk.images is None for chunk in sampled.chunks.values()):
        return sampled
    if scorer.processor is None:
        raise NothingToCompare("rows have images, and the model is a text model: give the one that sampled")
    token_id = scorer.processor.image_token_id
    usable = {
        name: with_repeats(chunk, (~from_placeholder(chunk, token_id)).astype(np.int64))
        for name, chunk in sampled.chunks.items()
    }
    kept = np.concatenate(
        [~from_placeholder(chunk, token_id)[chunk.scored] for chunk in sampled.chunks.values()]
    )
    fitted = {name: fit_placeholders(scorer.processor, chunk) for name, chunk in usable.items()}
    notes = [*sampled.notes, *other_options(sampled.image_processor, scorer.processor)]
    if not kept.all():
        notes.append(f"{(~kept).sum()} tokens from a sampled placeholder of an image on are not compared")
    return replace(
        sampled,
        chunks={name: rows for name, (rows, _) in fitted.items()},
        trainer=None if sampled.trainer is None else sampled.trainer[kept],
        tops=None if sampled.tops is None else tuple(itertools.compress(sampled.tops, kept)),
        notes=tuple(notes),
        contradictions=(
            *sampled.contradictions,
            *(found for _, found in fitted.values() if found is not None),
        ),
    )


def other_options(recorded: dict[str, Any] | None, own: VisionProcessor) -> list[str]:
    """Describe the options of the run's image processor that the scoring model's has otherwise."""
    if recorded is None:
        return []
    then, now = recorded["options"], own.identity()["options"]
    return [
        f"the run's image processor had {name} {then.get(name)}, the model's has {now.get(name)}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]


def from_placeholder(rows: Sequences, token_id: int) -> Bools:
    """Mask the tokens from the first sampled placeholder of each row on, bool [tokens]."""
    found = rows.sampled & (rows.input_ids == token_id)
    seen = np.concatenate([[0], np.cumsum(found)])
    return seen[1:] > np.repeat(seen[rows.cu_seqlens[:-1]], np.diff(rows.cu_seqlens))


def fit_placeholders(processor: VisionProcessor, rows: Sequences) -> tuple[Sequences, Finding | None]:
    """Expand images as the model's processor does, and report rows of other counts (R63)."""
    if rows.images is None:
        return rows, None
    token_id = processor.image_token_id
    given = tuple(
        tuple(last - first for first, last in runs_of(rows.input_ids[rows.row(row)], token_id))
        for row in range(rows.num_rows)
    )
    for row, (runs, images) in enumerate(zip(given, rows.images, strict=True)):
        if len(runs) != len(images):
            raise NothingToCompare(
                f"row {row} has {len(images)} images and {len(runs)} runs of their placeholder (token {token_id}): "
                "give the ids that the model's own processor makes"
            )
    counts = placeholder_counts(processor, rows.images)
    differing = [row for row in range(rows.num_rows) if given[row] != counts[row]]
    if not differing:
        return rows, None
    first = differing[0]
    finding = Finding(
        "R63",
        "placeholders of images expanded differently",
        0.84,  # below `SETTLED_CONFIDENCE`: a probe may find which processor made them
        f"{len(differing)} of {rows.num_rows} rows; row {first} has {list(given[first])} placeholders and the "
        f"model's processor makes {list(counts[first])}",
        "expand with the processor of the scoring model: the counts must be equal",
        "one processor on both sides: the same size limits, patch size and merge size in preprocessor_config.json",
    )
    return expanded(rows, token_id, counts), finding
