"""An engine with one planted fault, for tests of this package and of users.

A Hugging Face model samples from one distribution and reports the logprobs of another.
"""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_core.engine.model import cache_argument
from consistency import transforms
from consistency.score import Scorer, predictors
from consistency.tokens import Sequences
from consistency.transforms import Rows, Transform, preceding_counts


@dataclass(frozen=True)
class FaultyEngine:
    """Tokens are sampled from the transform `draws`; logprobs are those of the transform `reports`.

    `noise` is the standard deviation of Gaussian noise on every logit; it models kernels that round
    differently.
    """

    scorer: Scorer
    draws: Transform = transforms.as_is
    reports: Transform = transforms.as_is
    temperature: float = 1.0
    noise: float = 0.01


def sample_rows(
    engine: FaultyEngine, prompts: Tensor, num_tokens: int, seed: int, context: Tensor | None = None
) -> Sequences:
    """Sample a completion of `num_tokens` for every prompt, int64 [rows, prompt length].

    The engine silently prepends `context` [length] to every prompt.
    """
    hidden = torch.empty(0, dtype=torch.int64) if context is None else context
    full = torch.cat([hidden.expand(len(prompts), -1), prompts], 1)
    drawn = draw(engine, full, num_tokens, seed)
    reported = sequences_of(drawn[:, len(hidden) :], prompts.shape[1])
    true = sequences_of(drawn, full.shape[1])
    reported.engine_logprobs[reported.scored] = report(engine, true, seed)
    return reported


def sequences_of(tokens: Tensor, prompt_length: int) -> Sequences:
    num_rows, length = tokens.shape
    return Sequences(
        input_ids=tokens.reshape(-1).numpy(),
        cu_seqlens=np.arange(num_rows + 1) * length,
        sampled=np.tile(np.arange(length) >= prompt_length, num_rows),
        engine_logprobs=np.zeros(num_rows * length),
        prompt_id=np.arange(num_rows) // 4,
    )


def draw(engine: FaultyEngine, prompts: Tensor, num_tokens: int, seed: int) -> Tensor:
    """Sample with a key-value cache; returns int64 [rows, prompt length + num_tokens]."""
    model: Any = copy.deepcopy(engine.scorer.model)
    model.set_attn_implementation("sdpa")
    generator = torch.Generator().manual_seed(seed)
    vocabulary_size = engine.scorer.head.vocabulary_size
    tokens, cache, new = prompts, None, prompts
    argument = cache_argument(type(model.base_model).forward)
    seen = torch.nn.functional.one_hot(prompts, vocabulary_size).sum(1)
    seen_output = torch.zeros_like(seen)
    for _ in range(num_tokens):
        output = model.base_model(input_ids=new, use_cache=True, **{argument: cache})
        uncapped = engine.scorer.head.uncapped(output.last_hidden_state[:, -1])
        rows = Rows(engine.scorer.head.cap(uncapped), uncapped, engine.temperature, seen, seen_output)
        new = torch.multinomial(engine.draws(rows).exp(), 1, generator=generator)
        tokens, cache = torch.cat([tokens, new], 1), output[1]
        seen, seen_output = (c.scatter_add(1, new, torch.ones_like(new)) for c in (seen, seen_output))
    return tokens


def report(engine: FaultyEngine, sequences: Sequences, seed: int) -> np.ndarray[Any, Any]:
    """Compute the logprobs that the engine reports, with noise; float64 [scored]."""
    generator = torch.Generator().manual_seed(1_000_003 + seed)
    result = np.empty(len(sequences.scored))
    for places, hidden, labels, _ in predictors(engine.scorer, sequences, 4096):
        logits = engine.scorer.head.uncapped(hidden)
        logits = logits + engine.noise * torch.randn(logits.shape, generator=generator)
        seen, seen_output = preceding_counts(sequences, sequences.scored[places], logits.shape[1])
        rows = Rows(engine.scorer.head.cap(logits), logits, engine.temperature, seen, seen_output)
        result[places] = engine.reports(rows).gather(1, labels[:, None])[:, 0].double().numpy()
    return result
