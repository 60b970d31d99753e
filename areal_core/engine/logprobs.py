"""Logprobs and entropies of given tokens, without ever holding `[tokens, vocab]` in float32.

The output layer is replaced by one that takes the labels along: it computes a few rows of logits, reduces each to two numbers, and
throws them away. The backward computes them again. Rows are so few that their logits stay in the processor's cache, where the passes over
them cost a third of what they cost in memory.

With tensor parallelism each rank has some rows of the output layer, and logits of its part of the vocabulary alone. What a rank found
is then put together by two reductions of a few numbers a token, and the gradient of the hidden states is summed.
"""

from dataclasses import dataclass
from types import MethodType

import torch
import torch.distributed as dist
from torch import Tensor

# Logits held in float32 at a time: 16 MB on a CPU, where caches count; 512 MB on a GPU, where long kernels do.
LOGITS_AT_A_TIME = {"cpu": 1 << 22, "cuda": 1 << 27}
# Gradients of logits, in the compute dtype, are gathered for so many tokens before they meet the weight's gradient.
TOKENS_PER_WEIGHT_GRADIENT = 1024


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of the output layer that this rank of `group` has, from token `first` on."""

    first: int
    group: dist.ProcessGroup


class ChunkedLogprobs(torch.autograd.Function):
    """(logprob, entropy) of labels under softmax(hidden @ weight.T / temperature), a few rows at a time."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        softcap: float | None,
        part: VocabularyPart | None = None,
    ) -> Tensor:
        """hidden [1, tokens, dim], weight [vocab, dim], labels int64 [tokens] -> float32 [1, tokens, 2].

        With `part`, `weight` is that part of the vocabulary; the other arguments and the result are the same on every rank of the group.
        """
        # The leading dimension is the model's batch; a view made later would trip FSDP's hook on the output.
        result = torch.empty(1, hidden.shape[1], 2, dtype=torch.float32, device=hidden.device)
        labels, is_here = _labels_here(labels, weight.shape[0], part)
        # Of each token: the largest logit, and relative to it the label's logit, sum exp(l) and sum exp(l) l.
        found = torch.empty(4, hidden.shape[1], dtype=torch.float32, device=hidden.device)
        for rows in _slices(hidden.shape[1], _rows_at_a_time(weight)):
            logits, _ = _logits(hidden[0, rows], weight, temperature, softcap)  # [rows, vocab]
            largest = logits.amax(1)
            shifted = logits.sub_(largest[:, None])
            at_label = shifted.gather(1, labels[rows, None])[:, 0]
            weights = shifted.exp()
            total = weights.sum(1)
            found[:, rows] = torch.stack([largest, at_label, total, weights.mul_(shifted).sum(1)])
        largest, at_label, total, weighted = found if part is None else _combine(found, is_here, part.group)
        result[0, :, 0] = at_label - total.log()
        result[0, :, 1] = total.log() - weighted / total
        ctx.save_for_backward(hidden, weight, labels, is_here, largest + total.log(), result)
        ctx.temperature, ctx.softcap, ctx.part = temperature, softcap, part
        return result

    @staticmethod
    def backward(ctx, grad_result: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        """d logprob / d logits = (onehot - p) / T;  d entropy / d logits = -p (log p + entropy) / T."""
        hidden, weight, labels, is_here, log_total, result = ctx.saved_tensors
        grad_logprob, grad_entropy = grad_result[0].unbind(1)  # [tokens]
        has_entropy = bool(grad_entropy.any())
        at_label = grad_logprob if is_here is None else grad_logprob * is_here
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:  # not beneath an adapter, where the output layer is frozen
            grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for block in _slices(hidden.shape[1], TOKENS_PER_WEIGHT_GRADIENT):
            width = hidden[0, block].shape[0]
            grad_logits = torch.empty(width, weight.shape[0], dtype=hidden.dtype, device=hidden.device)
            for inner in _slices(width, _rows_at_a_time(weight)):
                rows = slice(block.start + inner.start, block.start + min(inner.stop, width))
                logits, slope = _logits(hidden[0, rows], weight, ctx.temperature, ctx.softcap)
                log_p = logits.sub_(log_total[rows, None])
                factor = -grad_logprob[rows, None]
                if has_entropy:
                    factor = factor - grad_entropy[rows, None] * (log_p + result[0, rows, 1:2])
                grad = log_p.exp_().mul_(factor)
                grad.scatter_add_(1, labels[rows, None], at_label[rows, None])
                if slope is not None:
                    grad *= slope
                grad_logits[inner] = grad.div_(ctx.temperature) if ctx.temperature != 1.0 else grad
            grad_hidden[0, block] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[0, block]
        if ctx.part is not None:
            dist.all_reduce(grad_hidden, group=ctx.part.group)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _labels_here(labels: Tensor, num_rows: int, part: VocabularyPart | None) -> tuple[Tensor, Tensor | None]:
    """Labels as rows of this rank's part, 0 where they are in another, and which are in this one; None where there is one part."""
    if part is None:
        return labels, None
    rows = labels - part.first
    is_here = (rows >= 0) & (rows < num_rows)
    return rows.where(is_here, 0), is_here


def _combine(found: Tensor, is_here: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What the ranks found in their parts of the vocabulary, as if one had seen it all; float32 [4, tokens], a collective."""
    here, at_label, total, weighted = found
    largest = here.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    drop = here - largest  # [tokens], at most 0
    scale = drop.exp()
    sums = torch.stack([(at_label + drop) * is_here, total * scale, (weighted + total * drop) * scale])
    dist.all_reduce(sums, group=group)
    return torch.cat([largest[None], sums])


def _rows_at_a_time(weight: Tensor) -> int:
    return max(1, LOGITS_AT_A_TIME[weight.device.type] // weight.shape[0])


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _logits(
    hidden: Tensor, weight: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """float32 logits over temperature, and d capped / d logits where they are soft-capped (Gemma 2, section 2)."""
    logits = (hidden @ weight.T).float()
    slope = None
    if softcap is not None:
        tanh = torch.tanh(logits / softcap)
        logits, slope = softcap * tanh, 1 - tanh**2
    return logits.div_(temperature) if temperature != 1.0 else logits, slope


def take_labels_in_output_layer(model: torch.nn.Module) -> None:
    """Make the model's output layer return (logprob, entropy) [1, tokens, 2] while `labels` are set on it.

    `output_layer.labels` is None at first, and then the layer gives logits as always. With `labels` (int64 [tokens]) and `temperature`
    set it gives the pair. Final soft-capping moves from the model into the layer, since it would bend logprobs instead of logits.
    """
    layer = model.get_output_embeddings()
    plain_forward = layer.forward
    softcap = getattr(model.config, "final_logit_softcapping", None)
    if softcap is not None:
        model.config.final_logit_softcapping = None

    def forward(self: torch.nn.Module, hidden: Tensor) -> Tensor:
        if self.labels is None:
            assert self.vocabulary_part is None, "logits of a part of the vocabulary: set labels"
            logits = plain_forward(hidden)
            return logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return ChunkedLogprobs.apply(
            hidden, self.weight, self.labels, self.temperature, softcap, self.vocabulary_part
        )

    layer.labels, layer.temperature, layer.vocabulary_part = None, 1.0, None
    layer.forward = MethodType(forward, layer)
