"""Rotary embeddings whose frequencies depend on the length of the sequence, chosen for each row.

LongRoPE (Phi-3) and dynamic NTK scaling choose frequencies by the longest position of a forward,
and dynamic scaling also by those of earlier forwards. In a packed batch that would be the longest
row of the pack; here each row gets the frequencies that it has alone.
"""

from typing import Any

import torch
from torch import Tensor, nn

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
