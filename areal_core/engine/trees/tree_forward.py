"""The forward of a micro-batch as a tree: each distinct token once, results in the order of rows.

```
rows -> tree -> model(distinct tokens, depths) -> hidden states -> (logprob, entropy) of each edge
                                                                      |
each token of the rows [tokens, 2] <---- its edge to the next --------+
```

An edge leads from a token to a next token of the loss mask: rows that continue differently share a
hidden state and have different edges. With sequence parallelism each rank computes the edges that
begin at its own tokens.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from areal_core.data.batch import Batch, pack
from areal_core.engine.ranks import Ranks
from areal_core.engine.scores import is_score_model
from areal_core.engine.sequence_parallel import TokenSlice, slice_tokens
from areal_core.engine.trees.token_tree import build_tree, rows_of


@dataclass(frozen=True)
class EdgeShare:
    """The edges of this rank, and the places of all edges in the gathered results.

    Args:
        mine: of the edges, in ascending order of their first token.
        slots: the places of this rank, as many as the rank with the most edges needs.
        slot_of: the place of each edge, int64 [edges].
    """

    mine: slice
    slots: TokenSlice
    slot_of: Tensor


def forward_tree(model: PreTrainedModel, part: Batch, ranks: Ranks, temperature: float) -> Tensor:
    """Compute `FSDPEngine.forward` of at least one row; a collective.

    Returns:
        (logprob, entropy) of the next token of each packed token, float32 [tokens, 2], 0 outside of
        the loss mask; of a reward model the scores, float32 [tokens, 1].
    """
    device = ranks.device
    tree = build_tree(rows_of(part))
    tokens = slice_tokens(len(tree.tokens), ranks)
    nodes = torch.cat(tree.nodes)  # of each packed token: int64 [tokens]
    inputs = {
        "input_ids": tokens.of(tree.tokens)[None].to(device),
        "position_ids": tokens.of(tree.depths)[None].to(device),
        "use_cache": False,
        "sequence_lengths": tokens.lengths(tree.segments),
        "sequence_parallel": tokens.group,
        "key_blocks": tree.key_blocks.padded(tokens.padding),
    }
    if is_score_model(model):
        return tokens.gather(model(**inputs)[0]).index_select(0, nodes.to(device))
    loss_mask = pack({key: part[key].cpu() for key in ("attention_mask", "loss_mask")})["loss_mask"]
    scored = loss_mask.nonzero()[:, 0]
    size = len(tree.tokens)
    edges, edge_of = torch.unique(nodes[scored] * size + nodes.roll(-1)[scored], return_inverse=True)
    begins, labels = edges // size, tree.tokens[edges % size]
    share = share_edges(begins, tokens, ranks)
    at, labels = begins[share.mine] - tokens.start, labels[share.mine]
    if not len(at):  # every rank reaches every collective: a result that no token selects
        at = labels = begins.new_zeros(1)
    pairs = model(**inputs, positions=at.to(device), labels=labels.to(device), temperature=temperature)[0]
    pairs = share.slots.gather(pad(pairs, (0, 0, 0, share.slots.size - len(pairs))))
    found = pairs.index_select(0, share.slot_of[edge_of].to(device))
    return pairs.new_zeros(len(nodes), 2).index_copy(0, scored.to(device), found)


def share_edges(begins: Tensor, tokens: TokenSlice, ranks: Ranks) -> EdgeShare:
    """Divide edges among the ranks that share the tokens, each to the rank of its first token.

    Args:
        begins: the first token of each edge, ascending, int64 [edges].
        tokens: this rank's slice of the tree.
    """
    num_slices, rank = ranks.sequence_parallel_size, ranks.sequence_parallel_rank
    bounds = torch.searchsorted(begins, torch.arange(num_slices + 1) * tokens.size)
    width = max(int(bounds.diff().max()), 1)
    owners = begins // tokens.size
    return EdgeShare(
        slice(int(bounds[rank]), int(bounds[rank + 1])),
        replace(tokens, start=rank * width, size=width, num_tokens=num_slices * width, padding=0),
        owners * width + torch.arange(len(begins)) - bounds[owners],
    )
