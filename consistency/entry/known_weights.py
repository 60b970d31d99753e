"""A model and sets of its weights, and the log-probs of given tokens under each.

A set names the kind of each tensor's value; those of other kinds than `BEFORE` are the model's own
plus noise of a seed.
"""

import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from areal_core.engine.logits import output_layer
from areal_core.engine.lora import FILE_PREFIX, Adapter, merged_weight
from areal_core.engine.model import checkpoint_names
from consistency.score import load_scorer, logprobs_after, read_prefix, score_logprobs
from consistency.tokens import Completion, Floats, sequences_from_completions

BEFORE, AFTER, OTHER = "before", "after", "other"  # kinds of values
ADAPTED = ("first adapter", "second adapter")
CHANGES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # of the noise: its deviation, in mean sizes of a tensor
ADAPTER_CHANGE = 0.3  # of that in an adapter: B A has many terms
ADAPTER_RANK, ADAPTER_ALPHA = 8, 16
NUM_PARTS = 3
WeightSet = dict[str, str]  # name of a tensor -> kind of its value
Rows = Sequence[tuple[Sequence[int], Sequence[int]]]  # prompt and completion


class KnownWeights:
    """A model on the CPU whose weights are exchanged. Raises `ModelError` if it cannot be read."""

    def __init__(self, path: str, dtype: str) -> None:
        self.path = path
        self.scorer = load_scorer(path, getattr(torch, dtype))
        self.change = CHANGES[0]
        self.adapter = Adapter(ADAPTER_RANK, ADAPTER_ALPHA, str(Path(path).resolve()))
        renamed = checkpoint_names(self.scorer.model)
        self._parameters = {renamed.get(n, n): p for n, p in self.scorer.model.named_parameters()}
        self._own = {name: tensor.detach().clone() for name, tensor in self._parameters.items()}
        self._held: dict[str, str] = dict.fromkeys(self._own, BEFORE)
        head = output_layer(self.scorer.model)
        modules = self.scorer.model.named_modules()
        self.linear = [n for n, m in modules if type(m) is nn.Linear and m is not head]

    def parts(self) -> list[list[str]]:
        """Divide the tensors into consecutive parts of a delta."""
        bounds = [len(self._own) * i // NUM_PARTS for i in range(NUM_PARTS + 1)]
        return [list(self._own)[start:end] for start, end in pairwise(bounds)]

    def whole(self, kind: str) -> WeightSet:
        return dict.fromkeys(self._own, kind)

    def tensors(self, weights: WeightSet) -> Iterator[tuple[str, Tensor]]:
        """Yield what a trainer would send."""
        for name, kind in weights.items():
            yield name, self.value(name, kind)

    def value(self, name: str, kind: str) -> Tensor:
        """Return a tensor of some kind, in the model's dtype."""
        own = self._own[name]
        if kind in ADAPTED:
            layer = name.removesuffix(".weight")
            if layer not in self.linear:
                return own
            down, up = self._low_rank(layer, kind)
            return merged_weight(own, down, up, self.adapter.scaling).to(own.dtype)
        if kind == BEFORE:
            return own
        noise = torch.randn(own.shape, generator=seeded(f"{kind} {name}"))
        return (own.float() + self.change * own.float().abs().mean() * noise).to(own.dtype)

    def adapter_tensors(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of an adapter of every linear layer, whose B is not 0, as in a file."""
        for layer in self.linear:
            for part, tensor in zip("AB", self._low_rank(layer, kind), strict=True):
                yield f"{FILE_PREFIX}{layer}.lora_{part}.weight", tensor

    def set_apart(self, rows: Rows, least: float) -> None:
        """Choose the least change that moves the log-probs of rows by `least` nats with each part."""
        own = np.concatenate(self.logprobs(rows, self.whole(BEFORE)))
        for self.change in CHANGES:
            moved = []
            for part in self.parts():
                self.load(self.whole(BEFORE))
                mixed = self.whole(BEFORE) | dict.fromkeys(part, AFTER)
                moved.append(float(np.abs(np.concatenate(self.logprobs(rows, mixed)) - own).mean()))
            if min(moved) > least:
                break
        self.load(self.whole(BEFORE))

    def _low_rank(self, layer: str, kind: str) -> tuple[Tensor, Tensor]:
        size = self._own[f"{layer}.weight"].shape
        generator, scale = seeded(f"{kind} {layer}"), float(self._own[f"{layer}.weight"].float().abs().mean())
        down = torch.randn(ADAPTER_RANK, size[1], generator=generator)
        up = torch.randn(size[0], ADAPTER_RANK, generator=generator)
        return down, ADAPTER_CHANGE * self.change * scale * up

    @torch.no_grad()
    def load(self, weights: WeightSet) -> None:
        """Give the model the weights of a set."""
        for name, kind in weights.items():
            if self._held[name] != kind:
                self._parameters[name].copy_(self.value(name, kind))
        self._held |= weights

    def logprobs(self, rows: Rows, weights: WeightSet) -> list[Floats]:
        """Return the log-probs of the completions under a set, float64 [tokens] for each row."""
        self.load(weights)
        given = [Completion(prompt, tokens, [0.0] * len(tokens)) for prompt, tokens in rows]
        found = score_logprobs(self.scorer, sequences_from_completions(given))
        return np.split(found, np.cumsum([len(tokens) for _, tokens in rows])[:-1])

    @torch.no_grad()
    def cached_logprobs(
        self, rows: Rows, num_cached: Sequence[int], old: WeightSet, new: WeightSet
    ) -> list[Floats]:
        """Do as `logprobs`, with keys and values of the first tokens of each row from old weights."""
        ids = [np.array([*prompt, *tokens]) for prompt, tokens in rows]
        self.load(old)
        caches = [read_prefix(self.scorer, row[:count]) for row, count in zip(ids, num_cached, strict=True)]
        self.load(new)
        found = []
        for row, count, cache, (prompt, tokens) in zip(ids, num_cached, caches, rows, strict=True):
            at = np.arange(max(len(prompt), count + 1), len(row)) - count
            scored = logprobs_after(self.scorer, cache, row[count:], at)
            found.append(np.pad(scored, (len(tokens) - len(scored), 0)))
        return found


def seeded(text: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(text.encode()))
