"""Batched sampling with a KV cache, as a pure function of prompts, seeds and a forward pass.

Each row draws from its own uniform numbers, determined by its seed in advance, through the inverse
of the cumulative distribution. So the tokens of a row depend neither on the other rows, nor on
their order, nor on a global generator.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import DynamicCache

from areal_core.engine.logprobs import label_logprobs
from areal_core.rollout.errors import UnsupportedSampling
from areal_core.rollout.types import Sampling

# forward(input_ids [B, t], attention_mask [B, past + t], position_ids [B, t], cache)
# -> logits of the last position [B, vocab]
Forward = Callable[[Tensor, Tensor, Tensor, DynamicCache], Tensor]


class RoutedCache(DynamicCache):
    """A cache that keeps the experts of its tokens, too.

    Attributes:
        experts: as `routed_experts`, [B, cached tokens, layers, width]; None before the first tokens.
    """

    experts: Tensor | None = None  # on the CPU

    def add_experts(self, chosen: Tensor) -> None:
        """Append the experts of new tokens, [B, new tokens, layers, width]."""
        self.experts = chosen if self.experts is None else torch.cat([self.experts, chosen], dim=1)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        if self.experts is not None:
            self.experts = self.experts[indices.cpu()]


class RunningRows(Protocol):
    """Rows between two tokens."""

    logits: Tensor  # after the last token of each row, [B, vocab]
    cached_tokens: list[int]  # of each prompt: tokens that a prefix cache had

    def read(self, tokens: Tensor, running: Sequence[bool]) -> None:
        """Read the next token of each row, int64 [B]; those of rows not running are ignored."""

    def select(self, rows: Tensor) -> None:
        """Keep these rows only, int64 indices, which may repeat."""

    def experts_of(self, row: int) -> Tensor | None:
        """Return the experts of the tokens of a row, [tokens, layers, width], if kept."""

    def close(self) -> None:
        """End all rows."""


@runtime_checkable
class Reader(Protocol):
    """A forward pass that reads prompts by itself, as `Replica` does."""

    def read_rows(self, prompts: Sequence[Sequence[int]]) -> RunningRows | None:
        """Read prompts without pictures; None if the model needs padded rows."""

    def read_prompts(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        images: Sequence[Sequence[bytes]],
        cache: DynamicCache,
    ) -> tuple[Tensor, Tensor]:
        """Return logits after each prompt [B, vocab], and what to add to later positions, [B]."""

    def new_cache(self) -> DynamicCache:
        """Return an empty cache: a `RoutedCache` if experts are kept."""


@dataclass(frozen=True)
class Completion:
    """The tokens sampled for one row; the stop token is the last one.

    `experts`, [tokens but the last, layers, width], are of prompt and completion; None where
    the forward pass keeps none.
    """

    tokens: list[int]
    logprobs: list[float]  # log_softmax(logits / temperature) in float32, before top-k and top-p
    finish: str  # "stop", "length", or "abort" where `cut_rows` named the row
    cached_tokens: int  # of the prompt: those that a prefix cache had before the batch
    experts: Tensor | None = None


@dataclass
class Rows:
    """State of the rows that are still running; all tensors are [B] unless noted."""

    index: Tensor  # index of the request
    temperature: Tensor  # float32; 1 where greedy
    greedy: Tensor  # bool
    of_model: Tensor  # bool: `model_logprobs`
    top_p: Tensor
    top_k: Tensor
    min_new: Tensor
    max_new: Tensor
    uniforms: Tensor  # float64 [B, max over rows of max_new]
    stops: Tensor  # bool [B, vocab]; empty row where end tokens are ignored

    def select(self, rows: Tensor) -> "Rows":
        """Return these rows only; `rows` holds int64 indices."""
        return Rows(**{name: tensor[rows] for name, tensor in vars(self).items()})


@torch.inference_mode()
def generate(
    forward: Forward,
    input_ids: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    max_new_tokens: Sequence[int],
    seeds: Sequence[int],
    *,
    vocab_size: int,
    end_token_ids: Sequence[int] = (),
    pad_token_id: int = 0,
    device: torch.device | str = "cpu",
    cut_rows: Callable[[], Collection[int]] = tuple,
    images: Sequence[tuple[bytes, ...]] = (),
) -> list[Completion]:
    """Sample one completion per row.

    Args:
        forward: the model. Called once per token, on left-padded rows; must not be a collective,
            because ranks sample different numbers of tokens.
        input_ids: the prompts.
        samplings: sampling options of each row; see `refuse_unsupported`.
        max_new_tokens: maximum number of new tokens of each row (the rest of `max_tokens`).
        seeds: each row's seed, 64-bit.
        vocab_size: width of the logits.
        end_token_ids: stop tokens of every row without `ignore_eos`.
        pad_token_id: the padding on the left.
        cut_rows: called between two tokens; the rows that it returns end there, with "abort".
        images: the encoded pictures of each row; empty if there are none.

    Raises:
        UnsupportedSampling: an option that needs text or token counts, or pictures for a model of
            text.
    """
    for sampling in samplings:
        refuse_unsupported(sampling)
    rows_images = images or [()] * len(input_ids)
    state = prefill(forward, input_ids, rows_images, pad_token_id, device)
    cached_tokens = state.cached_tokens
    rows = build_rows(samplings, max_new_tokens, seeds, end_token_ids, vocab_size)
    rows = Rows(**{name: tensor.to(device) for name, tensor in vars(rows).items()})
    done: list[list[tuple[int, float]]] = [[] for _ in input_ids]
    finish = ["length"] * len(input_ids)
    experts: list[Tensor | None] = [None] * len(input_ids)
    running = torch.ones(len(input_ids), dtype=torch.bool, device=device)
    step = 0
    while True:
        sampled, logprobs = sample(state.logits.float(), rows, step)
        stopped = rows.stops.gather(1, sampled[:, None]).squeeze(1)
        for row, token, logprob, live, stop in zip(
            *(t.tolist() for t in (rows.index, sampled, logprobs, running, stopped)), strict=True
        ):
            if live:
                done[row].append((token, logprob))
                finish[row] = "stop" if stop else "length"
        step += 1
        before, running = running, running & ~stopped & (rows.max_new > step)
        if running.any() and (cut := cut_rows()):
            cut_now = running & torch.isin(rows.index, torch.tensor(sorted(cut), device=device))  # [B]
            for row in rows.index[cut_now].tolist():
                finish[row] = "abort"
            running = running & ~cut_now
        for row in (before & ~running).nonzero().flatten().tolist():
            experts[int(rows.index[row])] = state.experts_of(row)
        num_running = int(running.sum())
        if num_running == 0:
            break
        if num_running <= len(running) // 2:  # half of the work would be wasted
            keep = running.nonzero().squeeze(1)
            rows, sampled, running = rows.select(keep), sampled[keep], running[keep]
            state.select(keep)
        state.read(sampled, running.tolist())
    state.close()
    return [
        Completion([t for t, _ in row], [p for _, p in row], reason, cached, chosen)
        for row, reason, cached, chosen in zip(done, finish, cached_tokens, experts, strict=True)
    ]


def refuse_unsupported(sampling: Sampling) -> None:
    """Raise `UnsupportedSampling` for options that only a server has."""
    if sampling.server_only:
        raise UnsupportedSampling(
            f"{', '.join(sorted(sampling.server_only))} cannot be sampled by the embedded engine, only by SGLang servers: "
            "leave tool_choice, response_format and the like out, or set allocation_mode to sglang:..."
        )
    if sampling.stop:
        raise UnsupportedSampling(
            f"gconfig.stop is {sampling.stop!r}, but the embedded engine stops at token ids: use gconfig.stop_token_ids"
        )
    if sampling.frequency_penalty:
        raise UnsupportedSampling(
            f"gconfig.frequency_penalty is {sampling.frequency_penalty}, but the embedded engine has none: set it to 0"
        )


def prefill(
    forward: Forward,
    input_ids: Sequence[Sequence[int]],
    images: Sequence[tuple[bytes, ...]],
    pad_token_id: int,
    device: torch.device | str,
) -> RunningRows:
    """Read the prompts. Rows with the same one, as the samples of a group, share one pass."""
    keys = [(tuple(row), pictures) for row, pictures in zip(input_ids, images, strict=True)]
    place = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    prompts, pictures = zip(*place, strict=True)
    state = None
    if not any(pictures) and isinstance(forward, Reader):
        state = forward.read_rows(prompts)
    if state is None:
        state = PaddedRows(forward, prompts, pictures, pad_token_id, device)
    state.select(torch.tensor([place[key] for key in keys], device=device))
    return state


class PaddedRows:
    """Rows padded on the left to one length, with Transformers' own cache and no prefix cache."""

    def __init__(
        self,
        forward: Forward,
        prompts: Sequence[Sequence[int]],
        images: Sequence[tuple[bytes, ...]],
        pad_token_id: int,
        device: torch.device | str,
    ) -> None:
        tokens, self._mask = (tensor.to(device) for tensor in left_pad(prompts, pad_token_id))
        self._forward = forward
        self._cache = forward.new_cache() if isinstance(forward, Reader) else DynamicCache()
        self.cached_tokens = [0] * len(prompts)
        # Of later positions, int64 [B]: a picture of n tokens may take fewer.
        self._offset = torch.zeros(len(prompts), dtype=torch.int64, device=device)
        if not any(images):
            self.logits = forward(tokens, self._mask, positions_of(self._mask), self._cache)
        elif isinstance(forward, Reader):
            self.logits, self._offset = forward.read_prompts(tokens, self._mask, images, self._cache)
        else:
            raise UnsupportedSampling("a request has images, and this model reads text only")

    def read(self, tokens: Tensor, running: Sequence[bool]) -> None:
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        positions = positions_of(self._mask)[:, -1:] + self._offset[:, None]
        self.logits = self._forward(tokens[:, None], self._mask, positions, self._cache)

    def select(self, rows: Tensor) -> None:
        self.logits, self._mask, self._offset = self.logits[rows], self._mask[rows], self._offset[rows]
        self.cached_tokens = [self.cached_tokens[row] for row in rows.tolist()]
        self._cache.batch_select_indices(rows)

    def experts_of(self, row: int) -> Tensor | None:
        if not isinstance(self._cache, RoutedCache) or self._cache.experts is None:
            return None
        return self._cache.experts[row][self._mask[row].bool().cpu()]

    def close(self) -> None:
        """Do nothing: nothing is kept."""


def positions_of(attention_mask: Tensor) -> Tensor:
    """Return the position of each token in its left-padded row, int64 [B, width]."""
    return (attention_mask.cumsum(1) - 1).clamp(min=0)


def left_pad(input_ids: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    width = max(len(row) for row in input_ids)
    ids = torch.tensor([[pad_token_id] * (width - len(row)) + list(row) for row in input_ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in input_ids])
    return ids, mask


def build_rows(
    samplings: Sequence[Sampling],
    max_new_tokens: Sequence[int],
    seeds: Sequence[int],
    end_token_ids: Sequence[int],
    vocab_size: int,
) -> Rows:
    stops = torch.zeros(len(samplings), vocab_size, dtype=torch.bool)
    for row, sampling in enumerate(samplings):
        if not sampling.ignore_eos:
            stops[row, sorted({*end_token_ids, *sampling.stop_token_ids})] = True
    return Rows(
        index=torch.arange(len(samplings)),
        temperature=torch.tensor([1.0 if s.greedy else s.temperature for s in samplings]),
        greedy=torch.tensor([s.greedy for s in samplings]),
        of_model=torch.tensor([s.model_logprobs for s in samplings]),
        top_p=torch.tensor([s.top_p for s in samplings]),
        top_k=torch.tensor([s.top_k for s in samplings]),
        min_new=torch.tensor([s.min_new_tokens for s in samplings]),
        max_new=torch.tensor(max_new_tokens),
        uniforms=torch.stack([draw_uniforms(seed, max(max_new_tokens)) for seed in seeds]),
        stops=stops,
    )


def draw_uniforms(seed: int, count: int) -> Tensor:
    """Return float64 [count] in [0, 1); the first k are the same for every count >= k."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample(logits: Tensor, rows: Rows, step: int) -> tuple[Tensor, Tensor]:
    """Return the next token int64 [B] and its logprob float32 [B], from logits float32 [B, vocab].

    The logprob is of softmax(logits / temperature) after `min_new_tokens` has masked the stop
    tokens and before top-k and top-p, as in SGLang; with `model_logprobs` of softmax(logits).
    """
    unmasked = logits
    early = rows.min_new > step
    if bool(early.any()):
        logits = logits.masked_fill(rows.stops & early[:, None], -torch.inf)
    scaled = logits / rows.temperature[:, None]
    probs = scaled.log_softmax(dim=-1).exp()  # [B, vocab]
    tokens = draw(probs, rows.uniforms[:, step], rows.top_k, rows.top_p)
    if bool(rows.greedy.any()):
        tokens = torch.where(rows.greedy, scaled.argmax(dim=-1), tokens)
    logprobs = label_logprobs(scaled, tokens)
    if bool(rows.of_model.any()):
        logprobs = torch.where(rows.of_model, label_logprobs(unmasked, tokens), logprobs)
    return tokens, logprobs


def draw(probs: Tensor, uniforms: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Sample by inverse CDF, int64 [B], from probs [B, vocab] cut to the top k and top-p nucleus.

    Sums are float64: in float32 the tail of a large vocabulary would round away.
    """
    order = None
    if bool((top_k < probs.shape[1]).any()) or bool((top_p < 1).any()):
        probs, order = probs.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(probs.shape[1], device=probs.device)
        mass_before = probs.cumsum(-1) - probs
        # The best token stays whatever k and p are.
        cut = (rank >= top_k[:, None]) | (mass_before > top_p[:, None])
        probs = probs.masked_fill(cut & (rank > 0), 0)
    cdf = probs.double().cumsum(-1)
    drawn = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True).squeeze(1)
    return drawn if order is None else order.gather(1, drawn[:, None]).squeeze(1)
