"""Judge settings of a rank's process that can change bits, without torch."""

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
    deterministic mode.
    """

    check: str
    status: Status
    seen: str
    next_step: str = ""


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
    """Return the findings of a rank, one a check; `config` has the options as nested dicts."""
    wrong: dict[str, PreflightFinding] = {}
    for finding in faults(config, process):
        wrong.setdefault(finding.check, finding)
    fine = {
        "mode": "deterministic algorithms are on; operations without one raise",
        "warn_only": "operations without a deterministic algorithm raise, not only warn",
        "environment": f"all {len(DETERMINISTIC)} variables were set before Python started",
        "NCCL": f"not used: {process.world_size} rank(s) on {process.device}",
        "attention": "torch's kernels, whose backward is deterministic in deterministic mode",
        "autotune": "no kernel is chosen by timing",
        "dropout": "off",
        "threads": f"{process.num_threads} threads a rank, set by OMP_NUM_THREADS",
    }
    return [wrong.get(check, PreflightFinding(check, "ok", seen)) for check, seen in fine.items()]


def faults(config: Mapping[str, Any], process: Process) -> Iterator[PreflightFinding]:
    """Yield what is wrong; the first of each check counts."""
    actor, is_cuda = config["actor"], process.device == "cuda"

    def problem(check: str, seen: str, next_step: str) -> PreflightFinding:
        return PreflightFinding(check, "problem", seen, next_step)

    if not config["deterministic"]:
        yield problem("mode", "deterministic is false", "set deterministic=true, as --dump-rollout does")
    if not process.algorithms_deterministic:
        yield problem("mode", "torch's deterministic algorithms are off", "see the environment below")
    if process.warn_only:
        yield problem("warn_only", "algorithms only warn", "remove warn_only=True from your script")
    # libraries read these variables once, at their start
    late = {name: process.now.get(name) for name in DETERMINISTIC if not started_with(process, name)}
    if late:
        seen = "; ".join(
            f"{name} was set after Python had started: too late"
            if now == DETERMINISTIC[name]
            else f"{name} is {now!r}, {DETERMINISTIC[name]!r} is needed"
            for name, now in late.items()
        )
        yield problem("environment", seen, "start with `areal-debug train`, or export them before it")
    if is_cuda and process.world_size > 1:
        # the order of a tree's sums follows the topology; a ring's the machines that it connects
        if (algorithm := process.at_start.get("NCCL_ALGO")) != "Ring":
            yield problem("NCCL", f"NCCL_ALGO is {algorithm!r}", "export NCCL_ALGO=Ring")
        same = "Ring: the same on the same machines"
        yield PreflightFinding("NCCL", "note", same, "keep the allocation to compare bits")
    if is_cuda and not process.algorithms_deterministic:
        seen = f"{actor['attn_impl']}: its backward uses atomic adds"
        yield problem("attention", seen, "deterministic=true")
    if process.cudnn_benchmark:
        yield problem("autotune", "cudnn.benchmark is on", "set torch.backends.cudnn.benchmark=False")
    if process.now.get("TORCHINDUCTOR_MAX_AUTOTUNE", "0") not in ("", "0"):
        yield problem("autotune", "inductor chooses kernels by timing", "unset TORCHINDUCTOR_MAX_AUTOTUNE")
    active = ", ".join(f"{name} {p:g}" for name, p in process.dropouts.items() if p > 0)
    if active and not actor["disable_dropout"]:
        advice = "disable_dropout=true, to replay on other ranks"
        yield PreflightFinding("dropout", "note", f"on: {active}", advice)
    if "OMP_NUM_THREADS" not in process.at_start:
        seen = f"{process.num_threads} of {process.num_cores} cores, chosen by torch"
        advice = "export OMP_NUM_THREADS, or other machines split sums differently"
        yield PreflightFinding("threads", "note", seen, advice)


def started_with(process: Process, name: str) -> bool:
    return process.at_start.get(name) == DETERMINISTIC[name]


def order_of_record(record: Record) -> PreflightFinding:
    """Require rows sorted by (prompt_id, sample_id) in every recorded step and rank."""
    for step in record.steps:
        recorded = record.step(step)
        for rank in range(recorded.manifest.num_ranks):
            batch = recorded.batch(rank, ["prompt_id", "sample_id"])
            pairs = list(zip(batch["prompt_id"].tolist(), batch["sample_id"].tolist(), strict=True))
            if pairs != sorted(pairs):
                seen = f"rows of step {step}, rank {rank} are not in canonical order"
                advice = "sort them by (prompt_id, sample_id) in your source"
                return PreflightFinding("order", "problem", seen, advice)
    seen = f"rows of all {len(record.steps)} recorded steps are sorted by prompt and sample"
    return PreflightFinding("order", "ok", seen)
