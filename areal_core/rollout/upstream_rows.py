"""Rows of a workflow that was written for AReaL, with the keys of ours.

AReaL's workflow of images returns the processor's tensors in a list, `multi_modal_input`, one dict
for each row, ids as int64, and no reason of the end.
"""

from typing import Any

import torch
from torch import Tensor

from areal_core.data.batch import FINISH_REASONS, Batch
from areal_core.rollout.errors import MalformedEpisode

GIVEN = "multi_modal_input"
NARROWED = ("input_ids", "mm_token_type_ids")  # int64 in AReaL, int32 here


def is_of_upstream(rows: Any) -> bool:
    """Return whether a workflow returned images in AReaL's form."""
    return isinstance(rows, dict) and GIVEN in rows


def with_our_keys(rows: dict[str, Any], stop_reason: str | None) -> Batch:
    """Return rows with `image_count`, `image_units` and `pixel_values` for `multi_modal_input`.

    Args:
        rows: of one episode; a row without images has an empty dict.
        stop_reason: of the episode's last completion, for an episode of one row; None if there was
            no completion.

    Raises:
        MalformedEpisode: not one dict a row, or other tensors than pixels and their grids.
    """
    images, count = rows[GIVEN], len(rows["input_ids"])
    if not isinstance(images, (list, tuple)) or len(images) != count:
        shown = (
            f"{len(images)} entries" if isinstance(images, (list, tuple)) else f"a {type(images).__name__}"
        )
        raise MalformedEpisode(
            f"the workflow returned {GIVEN} with {shown}; expected a list of {count} dicts"
        )
    for row in images:
        if unknown := sorted(row.keys() - {"pixel_values", "image_grid_thw"}):
            raise MalformedEpisode(
                f"the workflow returned {GIVEN} with {', '.join(unknown)}; only images are supported, "
                "with pixel_values and image_grid_thw"
            )
    found = {name: value for name, value in rows.items() if name not in (GIVEN, "turn_ids")}
    found |= {name: found[name].int() for name in NARROWED if name in found}
    if "finish_reason" not in found and stop_reason is not None and count == 1:
        found["finish_reason"] = torch.tensor([FINISH_REASONS.index(stop_reason)], dtype=torch.int32)
    return found | image_keys_of([row for row in images if row], [len_of(row) for row in images])


def len_of(row: dict[str, Tensor]) -> int:
    return len(row["image_grid_thw"]) if "image_grid_thw" in row else len(row.get("pixel_values", ()))


def image_keys_of(pictured: list[dict[str, Tensor]], counts: list[int]) -> Batch:
    if not pictured:
        return {}
    pixels = torch.cat([row["pixel_values"] for row in pictured])
    found = {"image_count": torch.tensor(counts, dtype=torch.int32), "pixel_values": pixels}
    if "image_grid_thw" not in pictured[0]:  # images of one size, each one entry
        return found | {"image_units": torch.ones(len(pixels), dtype=torch.int32)}
    grids = torch.cat([row["image_grid_thw"] for row in pictured]).int()
    return found | {"image_grid_thw": grids, "image_units": grids.prod(dim=1).int()}
