"""A vision model's own forward, made usable for packed rows on ranks that share tokens and layers.

```
model.model(input_ids and pixels of all tokens)        the same on each sequence-parallel rank
  embeddings of the tokens, placeholders' from the vision tower
  -- hook: this rank's slice of the tokens -->  model.model.language_model
```

Every rank of a group computes the whole tower; its gradient comes from the rank's own tokens, and
FSDP sums it over ranks as it does with every parameter.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_core.config.vision import FAMILIES, VisionFamily
from areal_core.engine.logits import output_layer
from areal_core.engine.rope import depends_on_length
from areal_core.errors import ModelError

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
