"""Our pure functions beside AReaL's own, on one CPU thread: time as a ratio, and equal results.

    python benchmarks/against_areal.py CHECKOUT [--rows 128] [--tokens 4096] [--rounds 7]

CHECKOUT is a checkout of AReaL, whose modules are imported without its `areal/__init__.py`, which
needs a GPU stack. Packages that they import and that are not installed are replaced by empty ones.
Both sides get the same tensors in turn; a round is one call of each, and the ratio is the median
over the rounds. `equal` is the largest difference of the results, or what they have in common.
"""

import argparse
import importlib.abc
import importlib.machinery
import logging
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_core.algorithm.advantages import gae
from areal_core.algorithm.normalization import normalize_groups, normalize_tokens
from areal_core.algorithm.off_policy import behaviour_weights
from areal_core.data.batch import (
    Batch,
    first_fit_decreasing,
    karmarkar_karp,
    pack,
    pad_and_concat,
    select_rows,
    sequence_lengths,
)

GROUP, CAPACITY = 8, 4  # samples of a prompt; rows of full length that a micro-batch holds
PACKAGES = (
    "areal", "areal.api", "areal.engine", "areal.engine.fsdp_utils", "areal.infra", "areal.trainer",
    "areal.trainer.ppo", "areal.utils",
)  # fmt: skip
UNUSED = ("areal.infra.platforms", "areal.utils.name_resolve")  # look for devices, import Ray
OPTIONAL = ("torchdata", "hydra", "swanlab", "trackio", "wandb", "colorlog", "aiofiles", "tensorboardX", "peft", "uvloop")  # fmt: skip


class Empty(types.ModuleType):
    """A module that has every name."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class EmptyWhereMissing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: gives `Empty` for the packages of `OPTIONAL` that nobody else found."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in OPTIONAL:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def find_upstream(checkout: Path) -> None:
    """Make the modules of a checkout importable, without what its packages import at once."""
    if not (checkout / "areal" / "utils" / "data.py").is_file():
        sys.exit(f"{checkout} is no checkout of AReaL: it has no areal/utils/data.py")
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(checkout / name.replace(".", "/"))]
        sys.modules[name] = package
    sys.modules |= {name: Empty(name) for name in UNUSED} | {"areal.utils.logging": logging}
    sys.modules["areal.utils"].logging = logging  # type: ignore[attr-defined]
    sys.meta_path.append(EmptyWhereMissing())


@dataclass(frozen=True)
class Comparison:
    """One function of each side, without arguments, and what their results have in common."""

    name: str
    theirs: Callable[[], Any]
    ours: Callable[[], Any]
    compare: Callable[[Any, Any], str]


def difference(mask: Tensor | None = None) -> Callable[[Any, Any], str]:
    """Return a comparison of two tensors where the mask is set."""

    def compare(theirs: Tensor, ours: Tensor) -> str:
        apart = (theirs.double() - ours.double()).abs()
        return f"{float((apart if mask is None else apart[mask]).max()):.1e}"

    return compare


def same_tensors(theirs: dict[str, Any], ours: Batch) -> str:
    """Compare every tensor of ours that theirs has, bit for bit."""
    shared = [key for key in ours if isinstance(theirs.get(key), Tensor)]
    wrong = [key for key in shared if not torch.equal(theirs[key].to(ours[key].dtype), ours[key])]
    return f"{len(shared)} tensors, bits" if not wrong else f"{', '.join(wrong)} differ"


def groups_of(lengths: Sequence[int]) -> Callable[[Any, Any], str]:
    """Return a comparison of two divisions: groups, and tokens of the largest one."""

    def describe(groups: Any) -> str:
        return f"{len(groups)} of at most {max(sum(lengths[i] for i in group) for group in groups)}"

    return lambda theirs, ours: f"{describe(theirs)}; ours {describe(ours)}"


def make_batch(num_rows: int, width: int) -> Batch:
    """Make prompts and completions with tool output in between, of long-tailed lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = (
        (width // 4 * torch.exp(0.7 * torch.randn(num_rows, generator=generator))).int().clamp(64, width)
    )
    lengths[0] = width
    positions = torch.arange(width)
    real = positions < lengths[:, None]
    sampled = real & (positions >= 32) & (positions % 512 < 448) & (positions < width - 1)
    logprobs = -(torch.rand(num_rows, width, generator=generator) + 1e-3) * sampled
    return {
        "input_ids": torch.randint(100, (num_rows, width), generator=generator, dtype=torch.int32) * real,
        "attention_mask": real,
        "loss_mask": sampled.int(),
        "logprobs": logprobs,
        "versions": torch.where(sampled, 3, -1).int(),
        "rewards": torch.rand(num_rows, generator=generator),
    }


def comparisons(batch: Batch) -> list[Comparison]:
    """Return all comparisons on this batch."""
    from areal.api.cli_args import MicroBatchSpec, NormConfig, RejectionSamplingConfig
    from areal.trainer.ppo.gae import _compute_token_level_gae
    from areal.utils.data import (
        Normalization,
        concat_padded_tensors,
        pack_tensor_dict,
        split_padded_tensor_dict_into_mb_list,
    )
    from areal.utils.functional.functional import apply_rejection_sampling
    from areal.utils.seqpack import ffd_allocate, kk_allocate

    mask, generator = batch["loss_mask"].bool(), torch.Generator().manual_seed(1)
    num_rows, width = mask.shape
    rewards = torch.zeros(mask.shape).scatter_(
        1, mask.int().cumsum(1).argmax(1)[:, None], batch["rewards"][:, None]
    )
    values = torch.rand(mask.shape, generator=generator)
    truncated = torch.arange(num_rows) % 3 == 0
    bootstrap = values[:, -1] * truncated
    lengths = sequence_lengths(batch).tolist()
    capacity = CAPACITY * width
    rows = [select_rows(batch, [row]) for row in range(num_rows)]
    groups = torch.arange(num_rows) // GROUP
    per_group = Normalization(NormConfig(mean_level="group", std_level="group", group_size=GROUP))
    per_batch = Normalization(NormConfig(mean_level="batch", std_level="batch"))
    flat = pack(batch)
    noise = 0.3 * torch.randn(len(flat["logprobs"]), generator=generator)
    proximal = (flat["logprobs"] + noise).clamp(max=-1e-3)
    found = [
        Comparison(
            "advantages (GAE)",
            lambda: _compute_token_level_gae(rewards, values, mask.float(), truncated.float(), 0.99, 0.95)[0],
            lambda: gae(rewards, values, mask, bootstrap, 0.99, 0.95),
            difference(mask),
        ),
        Comparison(
            "rewards normalised per group",
            lambda: per_group(batch["rewards"]),
            lambda: normalize_groups(batch["rewards"], groups),
            difference(),
        ),
        Comparison(
            "advantages normalised per batch",
            lambda: per_batch(values, loss_mask=mask.float()),
            lambda: normalize_tokens(values, mask, mean_level="batch", std_level="batch"),
            difference(mask),
        ),
        Comparison(
            "rows padded to a batch",
            lambda: concat_padded_tensors(rows),
            lambda: pad_and_concat(rows),
            same_tensors,
        ),
        Comparison("batch packed", lambda: pack_tensor_dict(batch), lambda: pack(batch), same_tensors),
        Comparison(
            "micro-batches, first fit decreasing",
            lambda: ffd_allocate(lengths, capacity, min_groups=1),
            lambda: first_fit_decreasing(lengths, capacity),
            groups_of(lengths),
        ),
        Comparison(
            "batch cut into packed micro-batches",
            lambda: split_padded_tensor_dict_into_mb_list(batch, MicroBatchSpec(max_tokens_per_mb=capacity)),
            lambda: [pack(select_rows(batch, rows)) for rows in first_fit_decreasing(lengths, capacity)],
            lambda theirs, ours: f"{len(theirs.mbs)} and {len(ours)} micro-batches",
        ),
        Comparison(
            "micro-batches, Karmarkar-Karp",
            lambda: kk_allocate(lengths, capacity, min_groups=1),
            lambda: karmarkar_karp(lengths, capacity),
            groups_of(lengths),
        ),
    ]
    for metric, level in (
        ("ratio", "token"),
        ("ratio", "sequence"),
        ("kl_k3", "token"),
        ("binary_kl", "token"),
    ):
        options = RejectionSamplingConfig(level=level, action="mask")
        options.metric = metric  # its constructor refuses binary_kl, which its function has
        options.upper = 1.2 if metric == "ratio" else 0.05
        found.append(rejection(flat, proximal, options, apply_rejection_sampling))
    return found


def rejection(flat: Batch, proximal: Tensor, options: Any, apply: Callable[..., Any]) -> Comparison:
    """Return the comparison of the weights of one kind of rejection."""
    given = (proximal, flat["logprobs"], flat["loss_mask"], flat["cu_seqlens"])
    bounds = {name: getattr(options, name) for name in ("level", "action", "metric", "upper")}
    return Comparison(
        f"rejection by {options.metric} per {options.level}",
        lambda: apply(*given, options).behave_imp_weight,
        lambda: behaviour_weights(*given, **bounds)[1],
        difference(flat["loss_mask"].bool()),
    )


def seconds(call: Callable[[], Any]) -> float:
    """Return the CPU time of this thread, which a busy machine does not change."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


def main() -> None:
    """Print one row of the table for each function."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    for name, default in {"rows": 128, "tokens": 4096, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    find_upstream(options.checkout)
    print("| what | AReaL | ours | ratio | equal |\n|---|---|---|---|---|")
    for case in comparisons(make_batch(options.rows, options.tokens)):
        equal = case.compare(case.theirs(), case.ours())  # also the first, slow call of each
        rounds = [(seconds(case.theirs), seconds(case.ours)) for _ in range(options.rounds)]
        theirs, ours = (statistics.median(times) * 1000 for times in zip(*rounds, strict=True))
        ratio = statistics.median(other / own for other, own in rounds)
        print(f"| {case.name} | {theirs:.2f} ms | {ours:.2f} ms | {ratio:.1f} | {equal} |", flush=True)


if __name__ == "__main__":
    main()
