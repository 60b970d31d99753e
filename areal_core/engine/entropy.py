"""Whether a loss depends on the entropies, read from its graph and not from its gradient.

The gradient is on the device: to look at it, the backward pass would have to wait for the device.
"""

from collections.abc import Iterator

from torch import Tensor
from torch.autograd.graph import Node

from areal_core.engine.logprobs import ChunkedLogprobs


def note_use_of_entropy(loss: Tensor, pairs: Tensor, entropies: Tensor) -> None:
    """Let the backward pass of `pairs` leave out the entropies' gradient if `loss` has none.

    Args:
        pairs: (logprob, entropy) of each position, as `ChunkedLogprobs` computes them.
        entropies: the column of `pairs` that `loss` was computed from.
    """
    source = entropies.grad_fn
    assert source is not None
    is_used = any(
        node is source and output == entropies.output_nr for node, output in edges(loss.grad_fn, source)
    )
    backward: type = ChunkedLogprobs._backward_cls
    for node, _ in edges(pairs.grad_fn):
        if isinstance(node, backward):
            node.has_entropy = is_used  # type: ignore[attr-defined]  # the node is the function's ctx
            return


def edges(root: Node | None, last: Node | None = None) -> Iterator[tuple[Node, int]]:
    """Yield (node, index of its output) of every edge of a graph, breadth first, up to `last`."""
    nodes, seen = [root], {last}
    for node in nodes:
        for parent, output in node.next_functions if node is not None else ():
            if parent is None:
                continue
            yield parent, output
            if parent not in seen:
                seen.add(parent)
                nodes.append(parent)
