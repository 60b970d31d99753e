"""Pictures in prime-rl's files: the arrays that a processor made of them, per sample.

A micro-batch has the pictures of all its sequences after each other. A processor makes as many
patches of each placeholder, so the types of the tokens say which pictures are a sequence's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recorder.importers.foreign import optional
from recorder.pictures.imported import pixels_of

PLACEHOLDER = 1  # type of a token of a picture


def image_inputs(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs that are not text, by name: arrays, or as they are if they are none."""
    given = optional(members, "mm_kwargs")
    if not isinstance(given, dict):
        given = {name: optional(members, name) for name in ("pixel_values", "image_grid_thw")}
        if isinstance(given["pixel_values"], bytes):  # float32, before there were `mm_kwargs`
            given["pixel_values"] = [
                "float32",
                optional(members, "pixel_values_shape"),
                given["pixel_values"],
            ]
    return {name: array_of(value) for name, value in given.items() if value is not None}


def array_of(value: Any) -> Any:
    """Return the array of (dtype, shape, bytes) or of nested lists; others as they are."""
    try:
        match value:
            case [str() as dtype, [*shape], bytes() as data]:
                return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
            case list():
                found: np.ndarray = np.asarray(value)
                return found.astype(np.float32) if found.dtype.kind == "f" else found
    except (TypeError, ValueError):  # bfloat16, or a shape that does not fit
        pass
    return value


def by_sequence(inputs: Mapping[str, Any], types: Any, bounds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the inputs of each sequence; without their grids where it is unknown whose they are.

    Args:
        types: of the tokens of all sequences, or None.
        bounds: of the sequences.
    """
    num_sequences = len(bounds) - 1
    pixels = pixels_of(inputs)
    if not pixels or num_sequences == 1:
        return [dict(inputs)] * num_sequences
    values, grid = pixels["pixel_values"], pixels["image_grid_thw"]
    ends = np.concatenate([[0], np.cumsum(grid.prod(axis=1))])  # patches before each picture, and all
    is_vision = np.asarray(types if isinstance(types, list) else []) == PLACEHOLDER
    if len(is_vision) != bounds[-1] or not is_vision.any():
        return [{"pixel_values": values}] * num_sequences
    before = np.concatenate([[0], np.cumsum(is_vision)])[list(bounds)]
    patches, rest = np.divmod(before * len(values), before[-1])
    first = np.searchsorted(ends, patches)  # picture with which each sequence begins
    if rest.any() or (ends[first] != patches).any():
        return [{"pixel_values": values}] * num_sequences
    shares = zip(first, first[1:], patches, patches[1:], strict=False)
    return [
        {"pixel_values": values[a:b], "image_grid_thw": grid[i:j]} if j > i else {} for i, j, a, b in shares
    ]
