"""Measure which families compute rows as a tree, and how far that is from packed rows.

    python benchmarks/tree_families.py [TYPE ...]

For every family whose rows are packed in docs/models.md, or the given ones: the tiny float32 model
of model_families.py with rows that begin with the same tokens; the largest difference of log-probs
and entropies (nats) and of gradients (relative to the norm of the tensor) between one tree and
packed rows; or why its rows do not share tokens. Prints the table of docs/tree_training.md.
"""

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from model_families import difference, engine_of, rows, write_tiny  # noqa: E402

from areal_core.engine.fsdp import FSDPEngine  # noqa: E402
from areal_core.engine.optimizer import build_optimizer, build_schedule  # noqa: E402
from areal_core.engine.parity import batch_of, columns_of, measure_parity  # noqa: E402
from areal_core.engine.ranks import Ranks, join_ranks, leave_ranks  # noqa: E402
from areal_core.engine.sharding import full_tensor  # noqa: E402
from areal_core.engine.trees.check import branching_rows, share_prefixes  # noqa: E402
from areal_core.testing import likelihood_with_entropy  # noqa: E402

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
    """Return the families of docs/models.md whose rows are packed."""
    return re.findall(r"^\| ([^|]*) \| packed \|", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE)


def gradients_of(engine: FSDPEngine, tokens: list[Tensor]) -> dict[str, Tensor]:
    """Return the full gradients of a loss of log-probs and entropies of rows."""
    found: dict[str, Tensor] = {}

    def keep(event: str, **_: object) -> None:
        if event == "gradients":
            parameters = engine.model.named_parameters()
            found.update({n: full_tensor(p.grad).clone() for n, p in parameters if p.grad is not None})

    engine.train_batch(batch_of(tokens), likelihood_with_entropy, lambda part: part["loss_mask"].sum(), keep)
    return found


def measure(name: str, ranks: Ranks) -> Measured:
    """Measure one family on this rank."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(name, folder)
        engine = engine_of(folder, ranks, torch.float32)
    engine.optimizer = build_optimizer(
        engine.model.parameters(), kind="sgd", lr=0.0, weight_decay=0.0, beta1=0.0, beta2=0.0, eps=1e-8
    )
    engine.schedule = build_schedule(
        engine.optimizer, kind="constant", total_steps=1, warmup_proportion=0.0, min_lr_ratio=0.0
    )
    measure_parity(engine)
    reason = share_prefixes(engine, name)
    if reason is not None:
        return Measured(name, reason)
    tokens = branching_rows(rows())
    tree = columns_of(engine, tokens), gradients_of(engine, tokens)
    engine.shares_prefixes = False
    columns, gradients = columns_of(engine, tokens), gradients_of(engine, tokens)
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    apart = max(
        float((tree[1][key] - gradient).norm()) / max(float(gradient.norm()), 1e-3 * largest)
        for key, gradient in gradients.items()
    )
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
