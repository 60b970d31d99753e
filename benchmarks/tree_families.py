"""Measure which families compute rows as a tree, and how far that is from packed rows.

    python -m benchmarks.tree_families [TYPE ...]

For every family whose rows are packed in measurements/models.md, or the given ones: the tiny
float32 model of model_families.py with rows that begin with the same tokens; the largest difference
of log-probs and entropies (nats) and of gradients (relative to the norm of the tensor) between one
tree and packed rows; or why its rows do not share tokens. Prints the table of
docs/algorithms.md.
"""

import re
import sys
import tempfile
from dataclasses import dataclass

import torch

from areal_core.engine.parity import columns_of, measure_parity
from areal_core.engine.ranks import Ranks, join_ranks, leave_ranks
from areal_core.engine.trees.check import branching_rows, share_prefixes
from benchmarks.harness import ROOT
from benchmarks.model_families import (
    difference,
    engine_of,
    gradient_difference,
    gradients_of,
    rows,
    write_tiny,
)

# Families whose rows are packed and do not share tokens.
NOT_SHARED = (
    "llama, dynamic RoPE",
    "phi3, LongRoPE",
    "codegen",
    "gptj",
    "gpt_neo",
    "gpt_neox_japanese",
    "phimoe",
)


@dataclass(frozen=True)
class Measured:
    """A family: `reason` why its rows do not share tokens, or the differences if they do."""

    name: str
    reason: str | None
    logprobs: float = 0.0
    gradients: float = 0.0


def packed_families() -> list[str]:
    """Return the families of docs/measurements/models.md whose rows are packed."""
    return re.findall(
        r"^\| ([^|]*) \| packed \|", (ROOT / "docs" / "measurements" / "models.md").read_text(), re.MULTILINE
    )


def measure(name: str, ranks: Ranks) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(name, folder)
        engine = engine_of(folder, ranks, torch.float32)
    measure_parity(engine)
    reason = share_prefixes(engine, name)
    if reason is not None:
        return Measured(name, reason)
    tokens = branching_rows(rows())
    tree = columns_of(engine, tokens), gradients_of(engine, tokens)
    engine.shares_prefixes = False
    columns, gradients = columns_of(engine, tokens), gradients_of(engine, tokens)
    apart = gradient_difference(tree[1], gradients)
    return Measured(name, None, difference(tree[0], columns), apart)


def main() -> None:
    torch.set_num_threads(1)
    ranks = join_ranks("cpu")
    print("| type | log-probs | gradients | not shared, because |\n|---|---|---|---|")
    for name in sys.argv[1:] or packed_families():
        found = measure(name, ranks)
        numbers = ("-", "-") if found.reason else (f"{found.logprobs:.1e}", f"{found.gradients:.1e}")
        print(f"| {name} | {' | '.join(numbers)} | {found.reason or ''} |", flush=True)
    leave_ranks()


if __name__ == "__main__":
    main()
