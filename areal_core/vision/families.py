"""Families of vision models that training supports, and what differs between them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VisionFamily:
    """One family.

    Args:
        types_option: the option of its class's forward for the types of tokens.
        has_grids: pictures have their own sizes, `image_grid_thw`, and tokens positions in three
            dimensions. Otherwise all pictures have one size.
        attends_within_images: the tokens of a picture attend to each other in both directions.
        nests_tower: published checkpoints have the tower's weights one module deeper.
    """

    types_option: str
    has_grids: bool
    attends_within_images: bool
    nests_tower: bool = False


QWEN = VisionFamily("mm_token_type_ids", has_grids=True, attends_within_images=False)
# model_type in Transformers -> facts
FAMILIES = {
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "gemma3": VisionFamily("token_type_ids", has_grids=False, attends_within_images=True, nests_tower=True),
}
