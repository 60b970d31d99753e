"""Logprobs and entropies of given tokens, without ever holding `[tokens, vocab]` in float32.

```
model(positions, labels, temperature, **inputs)
  transformer -> hidden states [1, tokens, dim] -> those at `positions`
  output layer(hidden states, labels, temperature) -> (logprob, entropy) [1, positions, 2]
```

The output layer computes a few rows of logits, reduces each to two numbers and discards them; the
backward computes them again. The rows are so few that their logits stay in the processor's cache,
where passes over them cost a third of what they cost in memory.

With tensor parallelism each rank has some rows of the output layer, and the logits of its part of
the vocabulary only. The results of the ranks are combined by two reductions of a few numbers per
token, and the gradient of the hidden states is summed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.functional import pad
from transformers import PreTrainedModel

from areal_core.engine.logits import LogitMap, measure_logit_map, output_layer, transformer
from areal_core.engine.sequence_parallel import MIN_ROWS

# Elements of float32 logits that exist at a time: 16 MB on a CPU, sized for its caches; 512 MB on a
# GPU, sized for long kernels.
LOGITS_AT_A_TIME = {"cpu": 1 << 22, "cuda": 1 << 27}
# Tokens whose logit gradients, in the compute dtype, are collected for one product with the hidden
# states, which gives the gradient of the weight.
TOKENS_PER_WEIGHT_GRADIENT = 1024


@dataclass(frozen=True)
class VocabularyShard:
    """The rows of the output layer that this rank of `group` has, starting at token `first`."""

    first: int
    group: dist.ProcessGroup


class ChunkedLogprobs(torch.autograd.Function):
    """(logprob, entropy) of labels under softmax(map(hidden @ weight.T + bias) / temperature)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        logit_map: LogitMap,
        shard: VocabularyShard | None = None,
    ) -> Tensor:
        """Return float32 [1, tokens, 2].

        `hidden` is [1, tokens, dim], `weight` [vocab, dim], `bias` [vocab], `labels` int64
        [tokens]. With `shard`, `weight` and `bias` have the rows of that part of the vocabulary;
        the other arguments and the result are the same on every rank of the group.
        """
        # The leading dimension is the model's batch; a view made later would trip FSDP's hook on
        # the output.
        result = torch.empty(1, hidden.shape[1], 2, dtype=torch.float32, device=hidden.device)
        labels, is_here = _local_labels(labels, weight.shape[0], shard)
        # Per token: the largest logit and, relative to it, the label's logit, sum exp(l) and sum
        # exp(l) l.
        found = torch.empty(4, hidden.shape[1], dtype=torch.float32, device=hidden.device)
        for rows in _slices(hidden.shape[1], _rows_at_a_time(weight)):
            logits, _ = _logits(hidden[0, rows], weight, bias, temperature, logit_map)  # [rows, vocab]
            largest, at_label, total, weights, shifted = _reduce(logits, labels[rows])
            found[:, rows] = torch.stack([largest, at_label, total, weights.mul_(shifted).sum(1)])
        if shard is not None and is_here is not None:
            found = _combine(found, is_here, shard.group)
        largest, at_label, total, weighted = found
        result[0, :, 0] = at_label - total.log()
        result[0, :, 1] = total.log() - weighted / total
        ctx.save_for_backward(hidden, weight, bias, labels, is_here, largest + total.log(), result)
        ctx.temperature, ctx.logit_map, ctx.shard = temperature, logit_map, shard
        ctx.has_entropy = None  # `note_use_of_entropy` may know
        return result

    @staticmethod
    def backward(
        ctx: Any, grad_result: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None, None]:
        """Recompute the logits and apply the derivatives by them.

        d logprob / d logits = (onehot - p) / T;  d entropy / d logits = -p (log p + entropy) / T.
        """
        hidden, weight, bias, labels, is_here, log_total, result = ctx.saved_tensors
        grad_logprob, grad_entropy = grad_result[0].unbind(1)  # [tokens]
        has_entropy = bool(grad_entropy.any()) if ctx.has_entropy is None else ctx.has_entropy
        at_label = grad_logprob if is_here is None else grad_logprob * is_here
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:  # not with an adapter, where the output layer is frozen
            grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
        for block in _slices(hidden.shape[1], TOKENS_PER_WEIGHT_GRADIENT):
            width = hidden[0, block].shape[0]
            grad_logits = torch.empty(width, weight.shape[0], dtype=hidden.dtype, device=hidden.device)
            for inner in _slices(width, _rows_at_a_time(weight)):
                rows = slice(block.start + inner.start, block.start + min(inner.stop, width))
                logits, slope = _logits(hidden[0, rows], weight, bias, ctx.temperature, ctx.logit_map)
                log_p = logits.sub_(log_total[rows, None])
                factor = -grad_logprob[rows, None]
                if has_entropy:
                    factor = factor - grad_entropy[rows, None] * (log_p + result[0, rows, 1:2])
                grad = log_p.exp_().mul_(factor)
                grad.scatter_add_(1, labels[rows, None], at_label[rows, None])
                if slope is not None:
                    grad *= slope
                if ctx.logit_map.factor != 1.0:
                    grad *= ctx.logit_map.factor
                grad_logits[inner] = grad.div_(ctx.temperature) if ctx.temperature != 1.0 else grad
            grad_hidden[0, block] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[0, block]
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
        if ctx.shard is not None:
            dist.all_reduce(grad_hidden, group=ctx.shard.group)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def label_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log_softmax(logits) of labels, to the bits of `ChunkedLogprobs`.

    [rows, vocab] float32, [rows] int64 -> [rows] float32.
    """
    _, at_label, total, _, _ = _reduce(logits.clone(), labels)
    return at_label - total.log()


def _reduce(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    largest = logits.amax(1)
    shifted = logits.sub_(largest[:, None])
    at_label = shifted.gather(1, labels[:, None])[:, 0]
    weights = shifted.exp()
    return largest, at_label, weights.sum(1), weights, shifted


def _local_labels(
    labels: Tensor, num_rows: int, shard: VocabularyShard | None
) -> tuple[Tensor, Tensor | None]:
    """(rows of the labels in this rank's shard, mask of the labels that are in it).

    Rows are 0 outside of the mask, which is None where the vocabulary is not sharded.
    """
    if shard is None:
        return labels, None
    rows = labels - shard.first
    is_here = (rows >= 0) & (rows < num_rows)
    return rows.where(is_here, 0), is_here


def _combine(found: Tensor, is_here: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Combine the results for the ranks' vocabulary shards: float32 [4, tokens]; a collective."""
    local_largest, at_label, total, weighted = found
    largest = local_largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    drop = local_largest - largest  # [tokens], at most 0
    scale = drop.exp()
    sums = torch.stack([(at_label + drop) * is_here, total * scale, (weighted + total * drop) * scale])
    dist.all_reduce(sums, group=group)
    return torch.cat([largest[None], sums])


def _rows_at_a_time(weight: Tensor) -> int:
    return max(1, LOGITS_AT_A_TIME[weight.device.type] // weight.shape[0])


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, logit_map: LogitMap
) -> tuple[Tensor, Tensor | None]:
    few = max(0, MIN_ROWS - len(hidden))
    enough = pad(hidden, (0, 0, 0, few)) if few else hidden  # padding by nothing is a copy
    logits = (enough @ weight.T)[: len(hidden)].float()
    if bias is not None:
        logits += bias
    if logit_map.factor != 1.0:
        logits *= logit_map.factor
    slope, softcap = None, logit_map.softcap
    if softcap is not None:
        tanh = torch.tanh(logits / softcap)
        logits, slope = softcap * tanh, 1 - tanh**2
    return logits.div_(temperature) if temperature != 1.0 else logits, slope


def score_next_tokens(model: PreTrainedModel, shard: VocabularyShard | None = None) -> None:
    """Make the model return (logprob, entropy) of given labels in place of logits.

    They are float32 [1, positions, 2]. Its forward then has the keyword arguments `positions`
    (int64 [positions], of the hidden states to score), `labels` (int64 [positions]), `temperature`
    (float) and those of the base model. What the class does to logits after the output layer is
    part of that layer.

    Args:
        shard: the rows of the output layer that this rank will have; None for all of them.

    Raises:
        ModelError: as in `measure_logit_map`.
    """
    logit_map, find_hidden, head = measure_logit_map(model), transformer(model), output_layer(model)
    assert head is not None, "a model without an output layer has no logits"

    def score(self: nn.Linear, hidden: Tensor, labels: Tensor, temperature: float) -> Tensor:
        if logit_map.input_factor != 1.0:
            hidden = hidden * logit_map.input_factor
        hidden = hidden.to(self.weight.dtype)  # Mamba adds its layers' outputs in float32
        return ChunkedLogprobs.apply(hidden, self.weight, self.bias, labels, temperature, logit_map, shard)

    def forward(
        self: PreTrainedModel, *, positions: Tensor, labels: Tensor, temperature: float, **inputs: object
    ) -> Tensor:
        hidden = find_hidden(**inputs).last_hidden_state[:, positions, :]  # from [1, tokens, dim]
        return head(hidden, labels, temperature)

    head.forward, model.forward = MethodType(score, head), MethodType(forward, model)


def note_use_of_entropy(loss: Tensor, pairs: Tensor, entropies: Tensor) -> None:
    """Let the backward pass of `pairs` leave out the entropies' gradient if `loss` has none.

    That is read from the graph of the loss: the gradient itself is on the device, and the backward
    pass would have to wait for it.

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
