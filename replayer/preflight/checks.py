"""Judge settings that can change bits, without torch.

Each check is a function of the values that it inspects, and returns its findings; the expected
values are in its docstring.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from areal_core.environment import DETERMINISTIC
from recorder import Record

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class PreflightFinding:
    """Result of one check.

    A "problem" can change bits from run to run; a "note" only between machines, or outside of
    deterministic mode. `file` and `line` are those of a finding in the source.
    """

    check: str
    status: Status
    seen: str
    next_step: str = ""
    file: str = ""
    line: int = 0


@dataclass(frozen=True)
class Process:
    """Description of a rank's process.

    `at_start` is its environment at start, `now` the current one.
    """

    rank: int
    world_size: int
    device: str
    now: Mapping[str, str]
    at_start: Mapping[str, str]
    warn_only: bool
    algorithms_deterministic: bool
    cudnn_benchmark: bool
    num_threads: int
    num_cores: int
    dropouts: Mapping[str, float]


def check_process(config: Mapping[str, Any], process: Process) -> list[PreflightFinding]:
    """Return all findings of a rank.

    Args:
        config: the options as nested dicts.
    """
    return [
        mode(config["deterministic"], process.algorithms_deterministic),
        warn_only(process.warn_only),
        *environment(process),
        nccl(process),
        attention(config["actor"]["attn_impl"], process),
        autotune(process),
        dropout(config["actor"]["disable_dropout"], process.dropouts),
        threads(process),
    ]


def mode(wanted: bool, on: bool) -> PreflightFinding:
    """Require `deterministic: true`, and torch's own switch on."""
    if not wanted:
        return PreflightFinding(
            "mode", "problem", "deterministic is false", "set deterministic=true, as --dump-rollout does"
        )
    if not on:
        return PreflightFinding(
            "mode", "problem", "torch's deterministic algorithms are off", "see the environment below"
        )
    return PreflightFinding("mode", "ok", "deterministic algorithms are on; operations without one raise")


def warn_only(on: bool) -> PreflightFinding:
    if on:
        return PreflightFinding(
            "warn_only", "problem", "algorithms only warn", "remove warn_only=True from your script"
        )
    return PreflightFinding(
        "warn_only", "ok", "operations without a deterministic algorithm raise, not only warn"
    )


def environment(process: Process) -> Iterator[PreflightFinding]:
    """Require the variables that libraries read once, at their start."""
    bad = False
    for name, wanted in DETERMINISTIC.items():
        now, start = process.now.get(name), process.at_start.get(name)
        if start == wanted:
            continue
        bad = True
        if now == wanted:
            seen, action = f"{name} was set after Python had started: too late", "export it before"
        else:
            seen, action = f"{name} is {now!r}, {wanted!r} is needed", f"export {name}={wanted}"
        yield PreflightFinding("environment", "problem", seen, f"{action}, or start with `areal-debug train`")
    if not bad:
        yield PreflightFinding(
            "environment", "ok", f"all {len(DETERMINISTIC)} variables were set before Python started"
        )


def nccl(process: Process) -> PreflightFinding:
    """Require Ring and Simple: the order of a tree's sums follows the topology.

    Even a ring follows the machines that it connects.
    """
    if process.device != "cuda" or process.world_size == 1:
        return PreflightFinding("NCCL", "ok", f"not used: {process.world_size} rank(s) on {process.device}")
    algorithm = process.at_start.get("NCCL_ALGO")
    if algorithm != "Ring":
        return PreflightFinding("NCCL", "problem", f"NCCL_ALGO is {algorithm!r}", "export NCCL_ALGO=Ring")
    return PreflightFinding(
        "NCCL", "note", "Ring: the same on the same machines", "keep the allocation to compare bits"
    )


def attention(implementation: str, process: Process) -> PreflightFinding:
    """Require deterministic attention: the backward of our kernels follows torch's switch."""
    if process.device != "cuda":
        return PreflightFinding("attention", "ok", "torch's own kernels, on a CPU")
    if not process.algorithms_deterministic:
        return PreflightFinding(
            "attention", "problem", f"{implementation}: its backward uses atomic adds", "deterministic=true"
        )
    return PreflightFinding("attention", "ok", "backward uses torch's deterministic kernels")


def autotune(process: Process) -> PreflightFinding:
    """Reject kernels chosen by timing: the choice may differ in the next run."""
    if process.cudnn_benchmark:
        return PreflightFinding(
            "autotune", "problem", "cudnn.benchmark is on", "set torch.backends.cudnn.benchmark=False"
        )
    if process.now.get("TORCHINDUCTOR_MAX_AUTOTUNE", "0") not in ("", "0"):
        return PreflightFinding(
            "autotune", "problem", "inductor chooses kernels by timing", "unset TORCHINDUCTOR_MAX_AUTOTUNE"
        )
    return PreflightFinding("autotune", "ok", "no kernel is chosen by timing")


def order_of_record(record: Record) -> PreflightFinding:
    """Require rows sorted by (prompt_id, sample_id) in every recorded step and rank."""
    for step in record.steps:
        recorded = record.step(step)
        for rank in range(recorded.manifest.num_ranks):
            batch = recorded.batch(rank, ["prompt_id", "sample_id"])
            pairs = list(zip(batch["prompt_id"].tolist(), batch["sample_id"].tolist(), strict=True))
            if pairs != sorted(pairs):
                seen = f"rows of step {step}, rank {rank} are not in canonical order"
                return PreflightFinding(
                    "order", "problem", seen, "sort them by (prompt_id, sample_id) in your source"
                )
    return PreflightFinding(
        "order", "ok", f"rows of all {len(record.steps)} recorded steps are sorted by prompt and sample"
    )


def dropout(disabled: bool, dropouts: Mapping[str, float]) -> PreflightFinding:
    """Note dropout: its random numbers are equal on the same ranks, different on others."""
    active = {name: p for name, p in dropouts.items() if p > 0}
    if active and not disabled:
        named = ", ".join(f"{name} {p:g}" for name, p in active.items())
        return PreflightFinding(
            "dropout", "note", f"on: {named}", "disable_dropout=true, to replay on other ranks"
        )
    return PreflightFinding("dropout", "ok", "off")


def threads(process: Process) -> PreflightFinding:
    """Require OMP_NUM_THREADS: sums are split over threads, by default one per core."""
    if "OMP_NUM_THREADS" not in process.at_start:
        advice = "export OMP_NUM_THREADS, or other machines split sums differently"
        return PreflightFinding(
            "threads", "note", f"{process.num_threads} of {process.num_cores} cores, chosen by torch", advice
        )
    return PreflightFinding("threads", "ok", f"{process.num_threads} threads a rank, set by OMP_NUM_THREADS")
