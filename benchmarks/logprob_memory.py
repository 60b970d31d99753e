"""Peak memory of logprobs and entropies with gradients: by chunks, and from all logits.

    python -m benchmarks.logprob_memory [--tokens 4096] [--vocabulary 32000] [--hidden 512]
                                        [--dtype float32]

The engine computes by chunks. Each way runs in a new process; its memory is the rise of the peak.
The naive form is log_softmax over [tokens, vocabulary] in float32, with autograd's backward pass.
tests/engine/test_logprobs.py tests that the two agree.
"""

import argparse

import torch

from areal_core.engine.logits import LogitMap
from areal_core.engine.logprobs import ChunkedLogprobs
from benchmarks.harness import in_new_process, read_options, report, rise_of_peak_mib


def chunked(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ChunkedLogprobs.apply(hidden, weight, None, labels, 1.0, LogitMap())


def naive(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    log_p = torch.log_softmax((hidden[0] @ weight.T).float(), -1)
    logprobs = log_p.gather(1, labels[:, None])[:, 0]
    return torch.stack([logprobs, -(log_p.exp() * log_p).sum(-1)], dim=1)[None]


WAYS = {"chunked": chunked, "naive": naive}


def peak_mib(way: str, options: argparse.Namespace) -> float:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    hidden = torch.randn(1, options.tokens, options.hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(options.vocabulary, options.hidden, dtype=dtype, requires_grad=True)
    labels = torch.randint(options.vocabulary, (options.tokens,))
    WAYS[way](hidden[:, :1], weight, labels[:1]).sum().backward()  # allocates the gradients
    return rise_of_peak_mib(lambda: WAYS[way](hidden, weight, labels).sum().backward())


def main() -> None:
    options = read_options(__doc__, tokens=4096, vocabulary=32_000, hidden=512, dtype=("float32", "bfloat16"))
    ours, whole = (in_new_process(peak_mib, way, options) for way in WAYS)
    print(
        f"{options.tokens:,} tokens, vocabulary {options.vocabulary:,}, hidden {options.hidden}, {options.dtype}: "
        f"{ours:,.0f} MiB by chunks, {whole:,.0f} MiB with all logits, a ratio of {whole / max(ours, 1):.1f}"
    )
    what = f"log-probs and entropies of {options.tokens:,} tokens with gradients, peak memory"
    report(what, "all logits at once", "MiB", [ours], [whole])


if __name__ == "__main__":
    main()
