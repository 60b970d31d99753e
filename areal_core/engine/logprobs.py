"""Logprobs and entropies of given tokens, without ever holding `[tokens, vocab]` in float32.

The output layer is replaced by one that takes the labels along: it computes a chunk of logits, reduces it to two numbers a token,
and throws it away. The backward computes the chunk again. Peak memory is `CHUNK_TOKENS * vocab` floats instead of `tokens * vocab`.
"""

from types import MethodType

import torch
from torch import Tensor

CHUNK_TOKENS = 1024


class ChunkedLogprobs(torch.autograd.Function):
    """(logprob, entropy) of labels under softmax(hidden @ weight.T / temperature), chunk by chunk."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, softcap: float | None
    ) -> Tensor:
        """hidden [1, tokens, dim], weight [vocab, dim], labels int64 [tokens] -> float32 [1, tokens, 2]."""
        ctx.save_for_backward(hidden, weight, labels)
        ctx.temperature, ctx.softcap = temperature, softcap
        # The leading dimension is the model's batch; a view made later would trip FSDP's hook on the output.
        result = torch.empty(1, hidden.shape[1], 2, dtype=torch.float32, device=hidden.device)
        for chunk in _chunks(hidden.shape[1]):
            log_p, _ = _log_softmax(hidden[0, chunk] @ weight.T, temperature, softcap)  # [chunk, vocab]
            result[0, chunk, 0] = log_p.gather(1, labels[chunk, None])[:, 0]
            result[0, chunk, 1] = _entropy(log_p)
        return result

    @staticmethod
    def backward(ctx, grad_result: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """d logprob / d logits = (onehot - p) / T;  d entropy / d logits = -p (log p + entropy) / T."""
        hidden, weight, labels = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for chunk in _chunks(hidden.shape[1]):
            log_p, softcap_slope = _log_softmax(hidden[0, chunk] @ weight.T, ctx.temperature, ctx.softcap)
            p = log_p.exp()  # [chunk, vocab]
            grad_logprob, grad_entropy = grad_result[0, chunk, 0:1], grad_result[0, chunk, 1:2]
            grad_logits = p * (-grad_logprob - grad_entropy * (log_p + _entropy(log_p)[:, None]))
            grad_logits.scatter_add_(1, labels[chunk, None], grad_logprob)
            grad_logits /= ctx.temperature
            if softcap_slope is not None:
                grad_logits *= softcap_slope
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[0, chunk] = grad_logits @ weight
            grad_weight += grad_logits.T @ hidden[0, chunk]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _chunks(num_tokens: int) -> list[slice]:
    return [slice(start, start + CHUNK_TOKENS) for start in range(0, num_tokens, CHUNK_TOKENS)]


def _log_softmax(logits: Tensor, temperature: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """float32 log-probabilities, and d capped / d logits where logits are soft-capped (Gemma 2, section 2)."""
    logits = logits.float()
    slope = None
    if softcap is not None:
        tanh = torch.tanh(logits / softcap)
        logits, slope = softcap * tanh, 1 - tanh**2
    return torch.log_softmax(logits / temperature, dim=-1), slope


def _entropy(log_p: Tensor) -> Tensor:
    """-sum p log p over the last dimension, with 0 log 0 = 0."""
    return -(log_p.exp() * log_p.clamp(min=torch.finfo(log_p.dtype).min)).sum(-1)


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
            logits = plain_forward(hidden)
            return logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return ChunkedLogprobs.apply(hidden, self.weight, self.labels, self.temperature, softcap)

    layer.labels, layer.temperature = None, 1.0
    layer.forward = MethodType(forward, layer)
