"""Environment presets for debugging a stuck, slow or dead run: what each sets, shows and costs.

Most of these variables are read once, when torch, CUDA or NCCL start, so they must be set before
the ranks start.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_core.errors import ConfigError


@dataclass(frozen=True)
class Preset:
    """Variables that belong together. `{logs}` in a value is the run's log folder."""

    name: str
    purpose: str
    cost: str
    variables: dict[str, str]
    meaning: dict[str, str]  # of each variable, in one phrase


def preset(name: str, purpose: str, cost: str, **variables: tuple[str, str]) -> Preset:
    """Return a preset from `VARIABLE=(value, what it does)`."""
    values = {variable: value for variable, (value, _) in variables.items()}
    return Preset(name, purpose, cost, values, {variable: does for variable, (_, does) in variables.items()})


PRESETS = (
    preset(
        "nccl",
        "Which network and which devices NCCL uses, and why it cannot connect.",
        "some hundred lines a rank in trainer.log while groups are made; no slower after that",
        NCCL_DEBUG=("INFO", "NCCL logs what it does"),
        NCCL_DEBUG_SUBSYS=("INIT,ENV,NET,GRAPH", "of groups, the variables it reads, network and topology"),
    ),
    preset(
        "distributed",
        "Ranks that call different collectives, or the same with different shapes: an error at that call, not a hang later.",
        "every collective is checked among all ranks first: slow",
        TORCH_DISTRIBUTED_DEBUG=("DETAIL", "checks that all ranks call the same collective with the same shapes"),
        TORCH_CPP_LOG_LEVEL=("INFO", "shows what torch.distributed logs in C++"),
    ),
    preset(
        "hang",
        "A collective that never ends: it fails after 10 minutes instead of 2 hours, and leaves what `areal-debug hang` reads.",
        "a ring buffer in memory; a rank that legitimately waits for more than 10 minutes fails",
        AREAL_COLLECTIVE_TIMEOUT_S=("600", "seconds until a collective counts as hung"),
        TORCH_FR_BUFFER_SIZE=("2000", "Flight Recorder keeps the last 2,000 collectives of each rank"),
        TORCH_NCCL_TRACE_BUFFER_SIZE=("2000", "the same under its older name"),
        TORCH_NCCL_DUMP_ON_TIMEOUT=("1", "writes them when a collective times out"),
        TORCH_NCCL_ENABLE_MONITORING=("1", "the monitor thread that writes them; also ends a rank whose watchdog is stuck"),
        TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=("300", "seconds until that thread considers a watchdog stuck"),
        TORCH_FR_DUMP_TEMP_FILE=("{logs}/flight_recorder/rank_", "path prefix of those files, followed by the rank"),
        TORCH_NCCL_DEBUG_INFO_TEMP_FILE=("{logs}/flight_recorder/rank_", "the same under its older name"),
    ),
    preset(
        "cuda",
        "A CUDA error whose traceback shows a line that is not at fault.",
        "the host waits for every kernel: slow, and races may not show",
        CUDA_LAUNCH_BLOCKING=("1", "each kernel ends before the next line runs, so the traceback names the right one"),
        TORCH_SHOW_CPP_STACKTRACES=("1", "errors show the C++ stack as well"),
    ),
    preset(
        "crash",
        "A rank that dies without a Python traceback (segmentation fault, abort).",
        "none",
        PYTHONFAULTHANDLER=("1", "Python writes the stacks of all threads on a fatal signal"),
        TORCH_SHOW_CPP_STACKTRACES=("1", "errors show the C++ stack as well"),
    ),
    preset(
        "asyncio",
        "Agents and rewards that block the event loop, and coroutines that are never awaited.",
        "every callback is timed and every task keeps the stack that created it",
        PYTHONASYNCIODEBUG=("1", "asyncio names every callback that ran for longer than 100 ms"),
    ),
)  # fmt: skip


def debug_environment(names: Sequence[str], log_dir: Path) -> dict[str, str]:
    """Return the variables of the named presets together.

    Raises ConfigError for an unknown name.
    """
    known = {preset.name: preset for preset in PRESETS}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no preset {unknown[0]!r}; expected any of {', '.join(known)}, or 'list'")
    chosen = (known[name].variables for name in names)
    return {name: value.format(logs=log_dir) for variables in chosen for name, value in variables.items()}


def make_folders(env: dict[str, str]) -> None:
    """Create the folders that the variables name, since torch writes only into existing ones."""
    if "TORCH_FR_DUMP_TEMP_FILE" in env:
        Path(env["TORCH_FR_DUMP_TEMP_FILE"]).parent.mkdir(parents=True, exist_ok=True)
