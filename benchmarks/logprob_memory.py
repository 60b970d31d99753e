"""Peak memory of logprobs and entropies with gradients: by chunks, and from all logits.

    python benchmarks/logprob_memory.py [--tokens 4096] [--vocabulary 32000] [--hidden 512]
                                        [--dtype float32]

The engine computes by chunks. Each way runs in a new process; its memory is the rise of the peak.
The naive form is log_softmax over [tokens, vocabulary] in float32, with autograd's backward pass.
tests/engine/test_logprobs.py tests that the two agree.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from peer_results import report

from areal_core.engine.logits import LogitMap
from areal_core.engine.logprobs import ChunkedLogprobs


def chunked(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return ChunkedLogprobs.apply(hidden, weight, None, labels, 1.0, LogitMap())


def naive(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    log_p = torch.log_softmax((hidden[0] @ weight.T).float(), -1)
    logprobs = log_p.gather(1, labels[:, None])[:, 0]
    return torch.stack([logprobs, -(log_p.exp() * log_p).sum(-1)], dim=1)[None]


WAYS = {"chunked": chunked, "naive": naive}


def rise_of_peak_mib(way: str, options: argparse.Namespace, queue: "multiprocessing.Queue[float]") -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    hidden = torch.randn(1, options.tokens, options.hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(options.vocabulary, options.hidden, dtype=dtype, requires_grad=True)
    labels = torch.randint(options.vocabulary, (options.tokens,))
    WAYS[way](hidden[:, :1], weight, labels[:1]).sum().backward()  # allocates the gradients
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory_mib("VmRSS")
    WAYS[way](hidden, weight, labels).sum().backward()
    queue.put(memory_mib("VmHWM") - before)


def memory_mib(name: str) -> float:
    """Return a value of /proc/self/status."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1024


def peak_of(measure: Callable[..., None], way: str, *arguments: object) -> float:
    """Return the MiB that `measure(way, *arguments, queue)` puts, in a new process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=measure, args=(way, *arguments, queue))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"the process that measures memory of {way} ended with {process.exitcode}")
    return queue.get()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"tokens": 4096, "vocabulary": 32_000, "hidden": 512}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    ours, whole = (peak_of(rise_of_peak_mib, way, options) for way in WAYS)
    print(
        f"{options.tokens:,} tokens, vocabulary {options.vocabulary:,}, hidden {options.hidden}, {options.dtype}: "
        f"{ours:,.0f} MiB by chunks, {whole:,.0f} MiB with all logits, a ratio of {whole / max(ours, 1):.1f}"
    )
    what = f"log-probs and entropies of {options.tokens:,} tokens with gradients, peak memory"
    report(what, "all logits at once", "MiB", [ours], [whole])


if __name__ == "__main__":
    main()
