"""Effect of splitting one batch among ranks on loss and gradient: measurements/rank_splits.md.

    python -m benchmarks.rank_splits [--families llama,qwen3_moe] [--splits d1,t2,d2t2]
                                     [--write measurements/rank_splits.md]

Each split starts torchrun with as many gloo ranks, which take one step on the same eight rows of
different lengths with the same weights, twice, in float32 and in bfloat16, with one micro-batch per
rank and with a limit of tokens. The reference is one rank with one micro-batch of the same dtype.
Exits with 1 when a difference is above its tolerance, or when the repeat of a split has other bits.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from areal_core.config.allocation import parse_allocation
from areal_core.data.batch import Batch, select_rows
from areal_core.engine.ranks import Ranks, join_ranks, leave_ranks
from areal_core.testing import make_tiny_family, step_with_gradients
from benchmarks.harness import SomeOf, read_options, torchrun
from benchmarks.model_families import engine_of

FAMILIES = ("gemma3_text", "llama", "qwen2", "qwen3", "qwen3_moe")
ONE_RANK = "d1"
SPLITS = (ONE_RANK, "d2", "c2", "t2", "d4", "d2c2", "d2t2", "c2t2")
LENGTHS = (12, 5, 20, 9, 3, 16, 7, 11)
LIMITS = (None, 24)  # tokens of a micro-batch
TEMPERATURE = 0.9


@dataclass(frozen=True)
class Tolerance:
    """The largest relative difference of loss and gradient that is rounding."""

    loss: float
    gradient: float


# Relative rounding of one number is 6e-8 in float32 and 4e-3 in bfloat16.
TOLERANCES = {"float32": Tolerance(1e-6, 1e-5), "bfloat16": Tolerance(1e-3, 5e-2)}
MIXTURE_IN_BFLOAT16 = Tolerance(1e-3, 2e-1)


@dataclass(frozen=True)
class Case:
    """One step: the division of rows among ranks and micro-batches, the model, the dtype."""

    split: str
    limit: int | None
    family: str
    dtype: str

    @property
    def stem(self) -> str:
        """Stem of the names of its files."""
        return f"{self.split}-{self.limit}-{self.family}-{self.dtype}"

    @property
    def tolerance(self) -> Tolerance:
        """In bfloat16 a token near the border between two experts may go to the other one."""
        is_mixture = self.family.endswith("_moe") and self.dtype == "bfloat16"
        return MIXTURE_IN_BFLOAT16 if is_mixture else TOLERANCES[self.dtype]


@dataclass(frozen=True)
class Difference:
    """Difference to one rank: |loss - loss1| / |loss1|, and the largest |g - g1| / |g1|."""

    case: Case
    loss: float
    gradient: float
    same_bits: bool  # in both runs of the case

    @property
    def is_rounding(self) -> bool:
        """True if the difference is within its tolerance."""
        tolerance = self.case.tolerance
        return self.same_bits and self.loss <= tolerance.loss and self.gradient <= tolerance.gradient


def main() -> None:
    options = parse_arguments()
    if options.as_ranks_of:
        take_steps(options.as_ranks_of, options.families, options.folder)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for family in options.families:
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars of Transformers
                make_tiny_family(folder / family, family)
        for split in dict.fromkeys((ONE_RANK, *options.splits)):
            start_ranks(split, options.families, folder)
        differences = [
            compare(case, alone(case, case.dtype), folder) for case in cases(options.splits, options.families)
        ]
        ones = [Case(ONE_RANK, None, family, "bfloat16") for family in options.families]
        scale = [compare(one, alone(one, "float32"), folder) for one in ones]
    failed = [difference for difference in differences if not difference.is_rounding]
    print(render(differences, scale, options.families))
    if options.write:
        Path(options.write).write_text(render(differences, scale, options.families))
    for difference in failed:
        print(f"not rounding: {difference}", file=sys.stderr)
    sys.exit(1 if failed else 0)


def parse_arguments() -> argparse.Namespace:
    options = read_options(
        __doc__,
        families=SomeOf(FAMILIES),
        splits=list(SPLITS),
        write="",
        as_ranks_of="",
        folder=Path(),
    )
    for split in options.splits:
        parse_allocation(f"fsdp:{split}")
    return options


def cases(splits: tuple[str, ...], families: tuple[str, ...]) -> Iterator[Case]:
    for split, limit, family, dtype in product(splits, LIMITS, families, TOLERANCES):
        yield Case(split, limit, family, dtype)


def start_ranks(split: str, families: tuple[str, ...], folder: Path) -> None:
    """Run `take_steps` on the ranks of a split, to its end."""
    sizes = parse_allocation(f"fsdp:{split}").train
    arguments = ["--as-ranks-of", split, "--families", ",".join(families), "--folder", str(folder)]
    torchrun("rank_splits", sizes.world_size, *arguments)


def take_steps(split: str, families: tuple[str, ...], folder: Path) -> None:
    """Run every case of the split twice on each rank; rank 0 writes loss, gradients, equality."""
    torch.set_num_threads(1)
    sizes = parse_allocation(f"fsdp:{split}").train
    ranks = join_ranks("cpu", sequence_parallel=sizes.context, tensor_parallel=sizes.tensor)
    for case in cases((split,), families):
        (loss, gradients), (loss_again, gradients_again) = (take_step(case, ranks, folder) for _ in range(2))
        same = loss == loss_again and all(
            torch.equal(g, gradients_again[name]) for name, g in gradients.items()
        )
        same_everywhere = all(ranks.gather_objects(same))
        if ranks.rank == 0:
            save_file(gradients, folder / f"{case.stem}.safetensors")
            facts = {"loss": loss, "same_bits": same_everywhere}
            (folder / f"{case.stem}.json").write_text(json.dumps(facts))
    leave_ranks()


def take_step(case: Case, ranks: Ranks, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    engine = engine_of(str(folder / case.family), ranks, getattr(torch, case.dtype))
    engine.temperature, engine.max_tokens_per_mb = TEMPERATURE, case.limit
    mine = list(range(ranks.data_parallel_rank, len(LENGTHS), ranks.data_parallel_size))
    result, gradients = step_with_gradients(engine, select_rows(all_rows(), mine))
    return result.loss, gradients


def all_rows() -> Batch:
    """Return eight random rows, next-token aligned, with a loss mask of all but the first token."""
    lengths = torch.tensor(LENGTHS)[:, None]
    mask = torch.arange(max(LENGTHS)) < lengths
    ids = torch.randint(5, 100, mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    trained = torch.arange(max(LENGTHS)) < lengths - 1
    return {"input_ids": ids * mask, "attention_mask": mask, "loss_mask": trained.int()}


def alone(case: Case, dtype: str) -> Case:
    """Return the reference of a case: one rank and one micro-batch."""
    return Case(ONE_RANK, None, case.family, dtype)


def compare(case: Case, other: Case, folder: Path) -> Difference:
    facts, expected = (json.loads((folder / f"{c.stem}.json").read_text()) for c in (case, other))
    gradients, wanted = (load_file(folder / f"{c.stem}.safetensors") for c in (case, other))
    moved = [float((gradients[name] - want).norm() / want.norm()) for name, want in wanted.items()]
    loss = abs(facts["loss"] - expected["loss"]) / abs(expected["loss"])
    return Difference(case, loss, max(moved), facts["same_bits"])


def render(differences: list[Difference], scale: list[Difference], families: tuple[str, ...]) -> str:
    """Return the page as Markdown; `scale` is bfloat16 compared with float32 on one rank."""
    page = [
        "# The same batch on other ranks\n",
        "Made by `python -m benchmarks.rank_splits --write docs/measurements/rank_splits.md`\n"
        f"on {date.today()} with torch {torch.__version__}, gloo on CPUs.\n",
        wrapped(
            f"Eight rows, {sum(LENGTHS)} tokens, one step of maximum likelihood with an entropy bonus at "
            f"temperature {TEMPERATURE}; tiny random models, float32 master weights. Splits are written as in "
            "`allocation_mode`: d data, c sequence (Ulysses), t tensor parallel. Each cell is the relative "
            "difference to one rank with one micro-batch: of the loss / of the gradient, for the parameter "
            "where it is largest. The last column is yes if a repeat of the split gave the same bits of loss "
            "and gradients on every rank."
        ),
    ]
    for dtype, tolerance in TOLERANCES.items():
        page += [f"\n## {dtype}\n", f"Tolerance: {say(tolerance)}.\n"]
        page += ["| split | ranks | tokens per micro-batch | " + " | ".join(families) + " | same bits |"]
        page += ["|---" * (4 + len(families)) + "|"]
        rows: dict[tuple[str, int | None], list[Difference]] = {}
        for difference in differences:
            if difference.case.dtype == dtype:
                rows.setdefault((difference.case.split, difference.case.limit), []).append(difference)
        page += [render_row(split, limit, row) for (split, limit), row in rows.items()]
    page += [
        "\n"
        + wrapped(
            f"The difference of bfloat16 to float32 on one rank is {', '.join(map(say, scale))}. Tensor "
            "parallelism rounds partial sums before it adds them, so its differences in bfloat16 are as "
            "large. In a mixture of experts a token near the boundary between two experts may then be "
            f"routed to the other one; the tolerance there is {say(MIXTURE_IN_BFLOAT16)}. In float32 no "
            "token is."
        )
    ]
    return "\n".join(page) + "\n"


def wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 100, break_on_hyphens=False))


def render_row(split: str, limit: int | None, row: list[Difference]) -> str:
    ranks = parse_allocation(f"fsdp:{split}").train.world_size
    same = "yes" if all(difference.same_bits for difference in row) else "no"
    shown_limit = "all" if limit is None else f"up to {limit}"
    return f"| {split} | {ranks} | {shown_limit} | {' | '.join(map(say, row))} | {same} |"


def say(numbers: Difference | Tolerance) -> str:
    return " / ".join(f"{x:.0e}" if x else "0" for x in (numbers.loss, numbers.gradient))


if __name__ == "__main__":
    main()
