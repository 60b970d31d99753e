"""Judge settings of a rank's process that can change bits, without torch."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal_core.environment import DETERMINISTIC
from recorder import Record

Status = Literal["ok", "note", "problem"]
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


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
    # libraries read these variables once, at their start
    late = {name: process.now.get(name) for name in DETERMINISTIC if not started_with(process, name)}
    active = ", ".join(f"{name} {p:g}" for name, p in process.dropouts.items() if p > 0)
    is_cuda, algorithm = process.device == "cuda", process.at_start.get("NCCL_ALGO")
    uses_nccl = is_cuda and process.world_size > 1
    wrong = {  # by name in the table; the first of each check counts
        "off": not config["deterministic"],
        "algorithms": not process.algorithms_deterministic,
        "warn_only": process.warn_only,
        "environment": bool(late),
        "algorithm": uses_nccl and algorithm != "Ring",
        "ring": uses_nccl,
        "attention": is_cuda and not process.algorithms_deterministic,
        "cudnn": process.cudnn_benchmark,
        "inductor": process.now.get("TORCHINDUCTOR_MAX_AUTOTUNE", "0") not in ("", "0"),
        "dropout": bool(active) and not config["actor"]["disable_dropout"],
        "threads": "OMP_NUM_THREADS" not in process.at_start,
    }
    facts = vars(process) | {
        "num_variables": len(DETERMINISTIC),
        "attention": config["actor"]["attn_impl"],
        "algorithm": algorithm,
        "active": active,
        "late": "; ".join(
            f"{name} was set after Python had started: too late"
            if now == DETERMINISTIC[name]
            else f"{name} is {now!r}, {DETERMINISTIC[name]!r} is needed"
            for name, now in late.items()
        ),
    }
    found: dict[str, PreflightFinding] = {}
    for row in (TABLE["wrong"][name] for name, is_wrong in wrong.items() if is_wrong):
        found.setdefault(row["check"], PreflightFinding(**row | {"seen": row["seen"].format(**facts)}))
    fine = {
        check: PreflightFinding(check, "ok", seen.format(**facts)) for check, seen in TABLE["fine"].items()
    }
    return list((fine | found).values())


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
