"""Cost of checking logprobs: measuring a million tokens, and time and memory of scoring.

    python -m benchmarks.scoring [--tokens 1000000] [--vocabulary 32000] [--score-tokens 4096]
                                 [--rounds 5]

Scoring is compared with the bare forward pass, which includes the product with the output layer
that any scoring needs, in runs that take turns: a ratio is the median of those of CPU seconds in
one round. Memory is the rise of the peak of a process, beside computing all logits at once; each
way runs in a new one. TRL's way takes log-probs and entropies from all logits by its own functions.
"""

import statistics

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from areal_core.engine.attention import PACKED
from benchmarks.harness import (
    cpu_seconds,
    in_new_process,
    in_turn,
    read_options,
    report,
    rise_of_peak_mib,
    spread,
)
from consistency.measure import measure
from consistency.score import Scorer, hidden_states, score, score_logprobs, scorer_of
from consistency.tokens import Sequences, compare_tokens


def some_sequences(num_tokens: int, vocabulary_size: int, row_length: int) -> Sequences:
    """Return rows of equal length; all but the first token of each is sampled."""
    rng = np.random.default_rng(0)
    num_rows = num_tokens // row_length
    total = num_rows * (row_length + 1)
    sampled = np.arange(total) % (row_length + 1) > 0
    ids = rng.integers(0, vocabulary_size, total)
    return Sequences(ids, np.arange(num_rows + 1) * (row_length + 1), sampled, -rng.exponential(1.0, total))


def measuring(num_tokens: int) -> float:
    """Return the CPU seconds from two columns of logprobs to all metrics."""
    sequences = some_sequences(num_tokens, 50_000, 2000)
    noise = np.random.default_rng(1).normal(0, 0.01, len(sequences.scored))
    trainer = np.minimum(sequences.engine_logprobs[sequences.scored] + noise, 0)
    return cpu_seconds(lambda: measure(compare_tokens(sequences, trainer)))


def small_model(vocabulary_size: int) -> Scorer:
    """Return a random float32 Llama with 8 layers of width 512."""
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        dtype="float32",
    )
    torch.manual_seed(0)
    return scorer_of(LlamaForCausalLM._from_config(config, attn_implementation=PACKED))


def forward(scorer: Scorer, sequences: Sequences) -> None:
    """Compute hidden states and logits, a few rows at a time, and discard them."""
    hidden = hidden_states(scorer, sequences.input_ids, np.diff(sequences.cu_seqlens).tolist())
    for rows in hidden.split(scorer.head.rows_at_a_time(scorer.device)):
        scorer.head.uncapped(rows)


def whole_logits(scorer: Scorer, sequences: Sequences) -> None:
    """Score naively: log_softmax over [tokens, vocab] in float32."""
    hidden = hidden_states(scorer, sequences.input_ids, np.diff(sequences.cu_seqlens).tolist())
    logprobs = torch.log_softmax(scorer.head.uncapped(hidden), -1)
    logprobs.gather(1, torch.as_tensor(sequences.input_ids)[:, None])


def by_trl(scorer: Scorer, sequences: Sequences) -> None:
    """Compute log-probs and entropies as TRL's GRPO does."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    hidden = hidden_states(scorer, sequences.input_ids, np.diff(sequences.cu_seqlens).tolist())
    logits = scorer.head.uncapped(hidden)
    selective_log_softmax(logits, torch.as_tensor(sequences.input_ids))
    entropy_from_logits(logits)


def peak_mib(way: str, vocabulary_size: int, num_tokens: int) -> float:
    """Return the MiB by which the peak of this process rises."""
    scorer = small_model(vocabulary_size)
    sequences = some_sequences(num_tokens, vocabulary_size, 512)
    score(scorer, some_sequences(16, vocabulary_size, 8))  # first allocations of libraries
    if way == "score":
        return rise_of_peak_mib(lambda: score(scorer, sequences, tokens_per_pass=num_tokens * 2))
    return rise_of_peak_mib(lambda: whole_logits(scorer, sequences))


def main() -> None:
    options = read_options(__doc__, tokens=1_000_000, vocabulary=32_000, score_tokens=4096, rounds=5)
    print(f"measuring {options.tokens:,} tokens: {measuring(options.tokens):.2f} s of CPU")
    scorer = small_model(options.vocabulary)
    sequences = some_sequences(options.score_tokens, options.vocabulary, 512)
    per_pass = 2 * options.score_tokens
    ways = {
        "bare": lambda: forward(scorer, sequences),
        "log-probs": lambda: score_logprobs(scorer, sequences, tokens_per_pass=per_pass),
        "in detail": lambda: score(scorer, sequences, tokens_per_pass=per_pass),
        "all logits": lambda: whole_logits(scorer, sequences),
        "TRL": lambda: by_trl(scorer, sequences),
    }
    taken = in_turn(ways, options.rounds + 1, cpu_seconds)
    seconds = {way: times[1:] for way, times in taken.items()}
    bare = seconds["bare"]
    print(f"bare forward pass of {options.score_tokens:,} tokens: {statistics.median(bare):.2f} s of CPU")
    for way, goal in (("log-probs", 1.05), ("in detail", 1.15)):
        middle, low, high = spread(a / b for a, b in zip(seconds[way], bare, strict=True))
        print(f"scoring {way}: {middle:.3f} of it ({low:.3f} to {high:.3f}), goal {goal}")
    report("log-probs", "the forward pass alone", "CPU s", seconds["log-probs"], bare)
    report("log-probs", "all logits at once", "CPU s", seconds["log-probs"], seconds["all logits"])
    report("log-probs, entropies, ranks", "TRL, without ranks", "CPU s", seconds["in detail"], seconds["TRL"])
    ours, naive = (
        in_new_process(peak_mib, way, options.vocabulary, options.score_tokens)
        for way in ("score", "whole logits")
    )
    print(
        f"peak memory: {ours:,.0f} MiB, {naive:,.0f} MiB for all logits at once, a ratio of {naive / max(ours, 1):.1f}"
    )
    report("peak memory of scoring", "all logits at once", "MiB", [ours], [naive])


if __name__ == "__main__":
    main()
