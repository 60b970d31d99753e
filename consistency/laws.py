"""Sampling transforms: distributions that an engine may sample from or report, given full logits.

Each takes `Rows` and returns normalised log probabilities [rows, vocab], minus infinity for tokens
that the transform excludes.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class Rows:
    """Rows of logits, float32 [rows, vocab]; `uncapped` are those before the model's own soft cap.

    `seen` counts the earlier occurrences of each token in prompt and output, `seen_output` those in
    the output alone; int64 [rows, vocab].
    """

    logits: Tensor
    uncapped: Tensor
    temperature: float
    seen: Tensor
    seen_output: Tensor

    @cached_property
    def scaled(self) -> Tensor:
        """Logits divided by the temperature."""
        return self.logits / self.temperature

    @cached_property
    def order(self) -> Tensor:
        """Token ids, most likely first."""
        return self.scaled.argsort(dim=1, descending=True, stable=True)

    @cached_property
    def rank(self) -> Tensor:
        """Number of more likely tokens."""
        places = torch.arange(self.order.shape[1], device=self.order.device).expand_as(self.order)
        return torch.empty_like(self.order).scatter_(1, self.order, places)

    @cached_property
    def mass_before(self) -> Tensor:
        """Total probability of all more likely tokens."""
        sorted_probs = torch.softmax(self.scaled, 1).gather(1, self.order)
        before = sorted_probs.cumsum(1) - sorted_probs
        return torch.empty_like(before).scatter_(1, self.order, before)


def normalised(scores: Tensor) -> Tensor:
    """log_softmax over the vocabulary."""
    return torch.log_softmax(scores, 1)


def as_is(rows: Rows) -> Tensor:
    """The trainer's distribution: log_softmax(logits / temperature)."""
    return normalised(rows.scaled)


def largest_logprob(rows: Rows) -> Tensor:
    """The largest logprob in place of every token's own."""
    return as_is(rows).amax(1, keepdim=True).expand_as(rows.logits)


def at_temperature(rows: Rows, temperature: float) -> Tensor:
    """Temperature `temperature` instead of the trainer's."""
    return normalised(rows.logits / temperature)


def _only(rows: Rows, kept: Tensor) -> Tensor:
    return normalised(rows.scaled.masked_fill(~kept, -torch.inf))


def top_p(rows: Rows, top_p: float) -> Tensor:
    """Nucleus sampling: the fewest tokens with total probability `top_p`, renormalised."""
    return _only(rows, rows.mass_before < top_p)


def top_k(rows: Rows, top_k: float) -> Tensor:
    """The `top_k` most likely tokens, renormalised."""
    return _only(rows, rows.rank < round(top_k))


def min_p(rows: Rows, min_p: float) -> Tensor:
    """Tokens at least `min_p` times as likely as the most likely one, renormalised."""
    threshold = rows.scaled.amax(1, keepdim=True) + torch.log(torch.tensor(min_p))
    return _only(rows, rows.scaled >= threshold)


def repetition_penalty(rows: Rows, penalty: float) -> Tensor:
    """Divide positive and multiply negative logits of tokens in prompt or output (CTRL, 4.1).

    So do vLLM and Transformers.
    """
    return _repetition_penalty(rows, rows.seen > 0, penalty)


def output_repetition_penalty(rows: Rows, penalty: float) -> Tensor:
    """The same for tokens of the output alone, as in SGLang."""
    return _repetition_penalty(rows, rows.seen_output > 0, penalty)


def _repetition_penalty(rows: Rows, seen: Tensor, penalty: float) -> Tensor:
    penalised = torch.where(rows.logits > 0, rows.logits / penalty, rows.logits * penalty)
    return normalised(torch.where(seen, penalised, rows.logits) / rows.temperature)


def frequency_penalty(rows: Rows, penalty: float) -> Tensor:
    """Subtract `penalty` from a token's logit for each occurrence in the output."""
    return normalised((rows.logits - penalty * rows.seen_output) / rows.temperature)


def presence_penalty(rows: Rows, penalty: float) -> Tensor:
    """Subtract `penalty` from a token's logit if it occurs in the output."""
    return normalised((rows.logits - penalty * (rows.seen_output > 0)) / rows.temperature)


def forbidden_token(rows: Rows, token_id: float) -> Tensor:
    """One token excluded, as EOS is before `min_new_tokens`."""
    kept = torch.ones_like(rows.scaled, dtype=torch.bool)
    kept[:, round(token_id)] = False
    return _only(rows, kept)


def bfloat16_logits(rows: Rows) -> Tensor:
    """Logits rounded to bfloat16 before the softmax."""
    return normalised(rows.logits.bfloat16().float() / rows.temperature)


def soft_cap(rows: Rows, cap: float) -> Tensor:
    """cap * tanh(logits / cap) in place of the model's own cap; no cap if infinity."""
    capped = rows.uncapped if cap == float("inf") else cap * torch.tanh(rows.uncapped / cap)
    return normalised(capped / rows.temperature)


def padded_vocabulary(rows: Rows, num_padding: float) -> Tensor:
    """Log probabilities with `num_padding` more vocabulary entries of logit 0."""
    total = rows.scaled.logsumexp(1, keepdim=True)
    padding = torch.log(torch.tensor(float(num_padding)))
    return rows.scaled - torch.logaddexp(total, padding)
