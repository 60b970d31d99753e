"""Rows of tokens that engine and reference both compute, and the inputs of their images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from areal_core.data.processor import VisionProcessor, load_processor
from areal_core.engine.vision_inputs import plain_inputs
from consistency.candidates.placeholders import placeholder_counts, runs_of
from consistency.errors import NothingToCompare


@dataclass(frozen=True)
class Row:
    """Ids of a prompt and its completion; `images` are encoded, their placeholders expanded.

    `image_token_id` is that placeholder, which no token of the completion is; -1 of a text model.
    """

    ids: list[int]
    images: tuple[bytes, ...] = ()
    image_token_id: int = -1

    @property
    def end_of_images(self) -> int:
        """Number of tokens up to the last placeholder; 0 without images."""
        if not self.images:
            return 0
        return len(self.ids) - self.ids[::-1].index(self.image_token_id)


Rows = Sequence[Row]


def image_options(model: Any, tokens: Tensor, row: Row) -> dict[str, Tensor]:
    """Return the options of the class's forward for the images of a row, besides `input_ids`.

    Args:
        tokens: int64 [1, t], the first ones of the row, with all placeholders.

    Raises:
        NothingToCompare: the processor in the model's folder expands images otherwise.
    """
    processor = processor_for(model.name_or_path, row)
    types = (tokens[0] == processor.image_token_id).long()
    return plain_inputs(model, types, processor.pixels(row.images))


def processor_for(path: str, row: Row) -> VisionProcessor:
    """Load the processor of a folder. Raises as `image_options`."""
    processor = load_processor(path)
    (wanted,) = placeholder_counts(processor, (row.images,))
    given = tuple(end - begin for begin, end in runs_of(np.array(row.ids), processor.image_token_id))
    if given != wanted:
        raise NothingToCompare(
            f"a row has {list(given)} placeholders of its images and the processor of {path} makes {list(wanted)}: "
            "their size limits differ; leave out --layers, which names the limit"
        )
    return processor
