"""A vision model's own forward, made usable for packed rows on ranks that share tokens and layers.

```
model.model(input_ids and pixels of all tokens)        the same on each sequence-parallel rank
  embeddings of the tokens, placeholders' from the vision tower
  -- hook: this rank's slice of the tokens -->  model.model.language_model
```

Every rank of a group computes the whole tower; its gradient comes from the rank's own tokens, and
FSDP sums it over ranks as it does with every parameter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from areal_core.config.vision_checks import FAMILIES, VisionFamily
from areal_core.data.batch import PER_ENTRY, PER_IMAGE, Batch, sequence_lengths
from areal_core.data.processor import VisionProcessor
from areal_core.engine.logits import output_layer
from areal_core.engine.ranks import Ranks
from areal_core.errors import ModelError

DEPENDS_ON_LENGTH = ("dynamic", "longrope")


def choose_frequencies_by_row(transformer: nn.Module) -> None:
    """Make the rotary embeddings of a transformer independent of other rows, in place.

    The transformer is then called with packed rows and the options `sequence_lengths` and
    `sequence_parallel`, or without them with one row.
    """
    embeddings = [module for module in transformer.modules() if depends_on_length(module)]
    if not embeddings:
        return
    layout: dict[str, Any] = {}

    def remember(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        layout.update(lengths=options.get("sequence_lengths"), group=options.get("sequence_parallel"))

    transformer.register_forward_pre_hook(remember, with_kwargs=True)
    for module in embeddings:
        module.forward = _by_row(module, layout)


def depends_on_length(module: nn.Module) -> bool:
    types = getattr(module, "rope_type", None)
    kinds = types.values() if isinstance(types, dict) else [types]
    return any(isinstance(kind, str) and any(name in kind for name in DEPENDS_ON_LENGTH) for kind in kinds)


def forget_rows_before(module: nn.Module) -> None:
    for name in [*vars(module), *module._buffers]:
        if name.endswith("max_seq_len_cached"):
            setattr(module, name, module.original_max_seq_len)
        elif name.endswith("original_inv_freq"):
            setattr(module, name.replace("original_", ""), getattr(module, name))


def _by_row(module: Any, layout: dict[str, Any]) -> Any:
    embed = module.forward

    def of_row(x: Tensor, length: int, **options: Any) -> Any:
        forget_rows_before(module)
        return embed(x, torch.arange(length, device=x.device)[None], **options)

    def forward(x: Tensor, position_ids: Tensor, **options: Any) -> Any:
        lengths, group = layout["lengths"], layout["group"]
        if lengths is None:
            return of_row(x, position_ids.shape[1], **options)
        rows = [of_row(x, length, **options) for length in lengths]
        size = position_ids.shape[1]
        start = 0 if group is None else group.rank() * size
        if isinstance(rows[0], Tensor):
            return torch.cat(rows, dim=1)[:, start : start + size]
        # cos and sin, each [1, tokens, head_dim]
        return tuple(torch.cat(part, dim=1)[:, start : start + size] for part in zip(*rows, strict=True))

    return forward


Args = tuple[Any, ...]
Options = dict[str, Any]


def vision_family(model: PreTrainedModel) -> VisionFamily | None:
    """Return the family of a vision model; None for a text model."""
    return FAMILIES.get(model.config.model_type) if hasattr(model.config, "vision_config") else None


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the transformer of text inside a vision model."""
    return cast(PreTrainedModel, model.base_model.language_model)


def tower_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters of a vision model's tower and projector; none of a text model."""
    if vision_family(model) is None:
        return []
    text = {*text_model(model).parameters(), *cast(nn.Module, output_layer(model)).parameters()}
    return [parameter for parameter in model.parameters() if parameter not in text]


def freeze_tower(model: PreTrainedModel) -> None:
    """Freeze the vision tower and its projector: whatever is neither text model nor output layer.

    Raises:
        ModelError: it is not a vision model.
    """
    if vision_family(model) is None:
        raise ModelError(
            f"freeze_vision_tower is true and {model.name_or_path!r} is a {model.config.model_type!r} model "
            f"without a vision tower: set it to false"
        )
    for parameter in tower_parameters(model):
        parameter.requires_grad_(False)


def hook_forward(model: PreTrainedModel) -> None:
    """Let the base model's forward take the options of `VisionInputs.of`, in place.

    * `token_types`, int64 [1, tokens]: a token with the id of a placeholder is one only where its
      type is 1, not where a policy sampled it.
    * `unused_pixels`: pixels that go through the tower and change nothing.
    * `sequence_parallel`: the text model computes this rank's slice of the tokens.

    Raises:
        ModelError: positions of tokens depend on the length of the row.
    """
    base, text = model.base_model, text_model(model)
    if any(depends_on_length(module) for module in text.modules()):
        raise ModelError(
            f"{model.config.model_type!r} models with rotary embeddings that depend on the length of a row "
            f"(dynamic, longrope) are not supported: train another model, or set its rope_parameters"
        )
    hooks = _Hooks(int(model.config.image_token_id))
    base.register_forward_pre_hook(hooks.before_model, with_kwargs=True)
    text.get_input_embeddings().register_forward_pre_hook(hooks.before_embedding)
    text.register_forward_pre_hook(hooks.before_text, with_kwargs=True)


@dataclass
class _Hooks:
    """What one forward passes from hook to hook."""

    image_token_id: int
    input_ids: Tensor | None = None
    zero: Tensor | None = None

    def before_model(self, base: Any, args: Args, options: Options) -> tuple[Args, Options]:
        types = options.pop("token_types", None)
        if types is not None:
            ids = options["input_ids"]
            # The class finds placeholders by their id, so sampled ones get another id, which only
            # the embedding does not see.
            options["input_ids"] = ids.masked_fill((ids == self.image_token_id) & (types == 0), 0)
            self.input_ids = ids
        pixels = options.pop("unused_pixels", None)
        if pixels is not None:
            features = base.get_image_features(**pixels, return_dict=True)
            self.zero = torch.stack([tensor.sum() for tensor in _tensors(features.to_tuple())]).sum() * 0.0
        return args, options

    def before_embedding(self, _: nn.Module, args: Args) -> Args | None:
        if self.input_ids is None:
            return None
        ids, self.input_ids = self.input_ids, None
        return (ids,)

    def before_text(self, _: nn.Module, args: Args, options: Options) -> tuple[Args, Options]:
        if self.zero is not None:
            options["inputs_embeds"] = options["inputs_embeds"] + self.zero
            self.zero = None
        group = options.get("sequence_parallel")
        return args, options if group is None else _slice_of_rank(options, group.rank(), group.size())


def _slice_of_rank(options: Options, rank: int, num_ranks: int) -> Options:
    embeddings = options["inputs_embeds"]  # [1, tokens, dim]
    size = embeddings.shape[1] // num_ranks
    here = slice(rank * size, (rank + 1) * size)
    sliced = options | {
        "inputs_embeds": embeddings[:, here],
        "position_ids": options["position_ids"][..., here],
    }
    is_visual = options.get("visual_pos_masks")  # [1, tokens], of families that add features to layers
    if is_visual is not None:
        positions = is_visual[0].nonzero()[:, 0]
        mine = (positions >= here.start) & (positions < here.stop)
        sliced["visual_pos_masks"] = is_visual[:, here]
        sliced["deepstack_visual_embeds"] = [each[mine] for each in options["deepstack_visual_embeds"]]
    return sliced


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (tuple, list)) else []


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
