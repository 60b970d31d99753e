"""Inputs of a vision model's forward from rows of a batch.

rows --> pixels          of their pictures, by the processor, or as the batch has them
     --> positions       of each row alone, by the model's class, then packed
     --> image blocks    of each row: which tokens attend to each other in both directions
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from areal_core.config.vision import FAMILIES, VisionFamily
from areal_core.data.batch import PER_ENTRY, PER_IMAGE, Batch, sequence_lengths
from areal_core.data.processor import VisionProcessor
from areal_core.engine.ranks import Ranks

IMAGE_KEYS = PER_IMAGE | PER_ENTRY.keys() | {"image_count", "mm_token_type_ids"}


@dataclass(frozen=True)
class VisionInputs:
    """Makes the inputs of one model's forward.

    Args:
        processor: computes pixels; None where every batch has them.
    """

    model: PreTrainedModel
    family: VisionFamily
    processor: VisionProcessor | None

    def agree(self, batch: Batch, ranks: Ranks) -> Batch:
        """Return the batch with image keys if any rank has a picture, else without; a collective.

        The tower's layers are sharded: all ranks run it, or none.
        """
        has_images = "image_count" in batch and bool(batch["image_count"].any())
        if not ranks.maximum(int(has_images)):
            return {key: tensor for key, tensor in batch.items() if key not in IMAGE_KEYS}
        return batch if "image_count" in batch else batch | text_only(batch)

    def of(self, part: Batch, padding: int = 0) -> dict[str, Any]:
        """Return the options of the base model's forward for packed rows, on the CPU.

        Args:
            padding: tokens after the rows, a sequence of their own.

        Raises:
            ValueError: a row's placeholders are not those of its pictures.
        """
        lengths = sequence_lengths(part).tolist()
        rows = [ids[:n].long() for ids, n in zip(part["input_ids"], lengths, strict=True)]
        inputs: dict[str, Any] = {"input_ids": pad(torch.cat(rows), (0, padding))[None]}
        if "image_count" not in part:
            positions = torch.cat([torch.arange(n) for n in lengths])
            return inputs | {"position_ids": pad(positions, (0, padding))[None]}
        types = [row[:n].long() for row, n in zip(part["mm_token_type_ids"], lengths, strict=True)]
        counts = part["image_count"].tolist()
        pixels, tokens = self.pixels(part) if sum(counts) else ({}, [])
        _check_placeholders(types, counts, tokens)
        inputs["token_types"] = pad(torch.cat(types), (0, padding))[None]
        inputs["position_ids"] = pad(self._positions(rows, types, counts, pixels), (0, padding))
        if self.family.attends_within_images:
            inputs["image_blocks"] = [image_blocks(row) for row in types] + [None] * bool(padding)
        return inputs | (pixels if tokens else {"unused_pixels": self.smallest_image()})

    def alone(self, row: Batch) -> dict[str, Any]:
        """Return the options of the base model's forward for one row, with its own attention."""
        inputs = self.of(row)
        inputs.pop("image_blocks", None)
        if self.family.attends_within_images and "token_types" in inputs:
            inputs[self.family.types_option] = inputs["token_types"]  # makes the mask
        return inputs

    def pixels(self, part: Batch) -> tuple[dict[str, Tensor], list[int]]:
        """Return the pixels of all pictures of rows, and the number of vision tokens of each."""
        if "pixel_values" in part:
            units = part["image_units"].tolist()
            pixels = {"pixel_values": part["pixel_values"]}
            if self.family.has_grids:
                pixels["image_grid_thw"] = part["image_grid_thw"].long()
        else:
            if self.processor is None:
                raise ValueError(
                    "the batch has image_data and the model has no processor: give pixel_values instead"
                )
            data = part["image_data"].numpy().tobytes()
            ends = part["image_bytes"].cumsum(0).tolist()
            images = [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]
            pixels, units = self.processor.pixels(images), self.processor.units(images)
        return pixels, self._num_tokens(units)

    def _positions(
        self,
        rows: Sequence[Tensor],
        types: Sequence[Tensor],
        counts: Sequence[int],
        pixels: dict[str, Tensor],
    ) -> Tensor:
        if not self.family.has_grids:
            return torch.cat([torch.arange(len(row)) for row in rows])[None]
        base: Any = self.model.base_model
        grids = pixels["image_grid_thw"].split(list(counts)) if pixels else [None] * len(rows)
        positions = [
            base.get_rope_index(row[None], kind[None], image_grid_thw=grid)[0]
            for row, kind, grid in zip(rows, types, grids, strict=True)
        ]
        return torch.cat(positions, dim=2)

    def smallest_image(self) -> dict[str, Tensor]:
        """Return the pixels of the smallest picture: zeros."""
        return {
            key: tensor * 0 if key == "pixel_values" else tensor for key, tensor in self.noise(1, 1).items()
        }

    def noise(self, high: int, wide: int) -> dict[str, Tensor]:
        """Return the pixels of a picture of noise, always the same.

        Args:
            high, wide: vision tokens of its sides, where pictures have their own sizes.
        """
        vision = self.model.config.vision_config
        generator = torch.Generator().manual_seed(0)
        if not self.family.has_grids:
            shape = (1, vision.num_channels, vision.image_size, vision.image_size)
            return {"pixel_values": torch.randn(shape, generator=generator)}
        side = vision.spatial_merge_size
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return {
            "pixel_values": torch.randn(high * wide * side * side, size, generator=generator),
            "image_grid_thw": torch.tensor([[1, high * side, wide * side]]),
        }

    def example(self, text: Tensor) -> Batch:
        """Return a row with a picture of noise after the first of some tokens of text, [1, T]."""
        pixels = self.noise(2, 3)
        units = torch.tensor([len(pixels["pixel_values"])], dtype=torch.int32)
        (num_tokens,) = self._num_tokens(units.tolist())
        picture = torch.full((num_tokens,), self.model.config.image_token_id)
        ids = torch.cat([text[:1], picture, text[1:]]).int()[None]
        types = torch.zeros_like(ids)
        types[:, 1 : num_tokens + 1] = 1
        row = {"input_ids": ids, "mm_token_type_ids": types, "image_count": torch.ones(1, dtype=torch.int32)}
        return row | pixels | {"image_units": units}

    def _num_tokens(self, units: Sequence[int]) -> list[int]:
        if self.family.has_grids:
            return [n // self.model.config.vision_config.spatial_merge_size**2 for n in units]
        return [n * self.model.config.mm_tokens_per_image for n in units]


def image_blocks(types: Tensor) -> Tensor | None:
    """Return the number of each token's picture in its row, -1 of text; None for a row of text.

    Consecutive placeholders are one picture. Types and result are int64 [tokens].
    """
    is_image = types == 1
    if not bool(is_image.any()):
        return None
    begins = is_image & ~pad(is_image, (1, 0))[:-1]
    return torch.where(is_image, begins.cumsum(0) - 1, -1)


def image_keys(rows: Sequence[Sequence[bytes]]) -> Batch:
    """Return `image_count`, `image_bytes` and `image_data` of rows with these pictures."""
    images = [image for row in rows for image in row]
    data = bytearray(b"".join(images))  # a copy: a tensor may be written to, and bytes may not
    return {
        "image_count": torch.tensor([len(row) for row in rows], dtype=torch.int32),
        "image_bytes": torch.tensor([len(image) for image in images], dtype=torch.int32),
        "image_data": torch.frombuffer(data, dtype=torch.uint8)
        if data
        else torch.zeros(0, dtype=torch.uint8),
    }


def text_only(batch: Batch) -> Batch:
    """Return the image keys of rows of text."""
    mask = batch["attention_mask"]
    return image_keys([()] * len(mask)) | {"mm_token_type_ids": torch.zeros(mask.shape, dtype=torch.int32)}


def _check_placeholders(types: Sequence[Tensor], counts: Sequence[int], tokens: Sequence[int]) -> None:
    """Raise ValueError unless each row has a placeholder for each vision token of its pictures."""
    begin = 0
    for number, (row, count) in enumerate(zip(types, counts, strict=True)):
        expected, found = sum(tokens[begin : begin + count]), int((row == 1).sum())
        begin += count
        if expected != found:
            raise ValueError(
                f"row {number} has {found} placeholders in mm_token_type_ids and its {count} images have "
                f"{expected} vision tokens: make prompts with the processor of the trained checkpoint"
            )


def plain_inputs(model: PreTrainedModel, types: Tensor, pixels: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the options of the class's own forward for the pictures of one row.

    Besides `input_ids` it needs no others: it finds positions and masks itself.

    Args:
        types: 1 at placeholders, int64 [tokens].
        pixels: of `VisionProcessor.pixels`.
    """
    return pixels | {FAMILIES[model.config.model_type].types_option: types[None]} if pixels else {}
