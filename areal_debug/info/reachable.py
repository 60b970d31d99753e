"""Inference engines and schedulers that a run could use from here."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from areal_core.safety.secrets import masker

ENGINES = ("sglang", "vllm")
RAY_ADDRESS_FILE = Path("/tmp/ray/ray_current_cluster")


@dataclass(frozen=True)
class Reachable:
    """Versions of installed engines, and for each scheduler what of it is here."""

    engines: dict[str, str | None]
    schedulers: dict[str, str | None]


def find_reachable(versions: Mapping[str, str | None]) -> Reachable:
    """Look for engines and schedulers; `areal-debug serve --status` lists running servers."""
    return Reachable({name: versions.get(name) for name in ENGINES}, find_schedulers())


def find_schedulers() -> dict[str, str | None]:
    ray = os.environ.get("RAY_ADDRESS") or (
        RAY_ADDRESS_FILE.read_text().strip() if RAY_ADDRESS_FILE.is_file() else None
    )
    commands = {"SLURM": "srun", "Kubernetes": "kubectl", "ssh": "ssh"}
    return {
        **{name: command if shutil.which(command) else None for name, command in commands.items()},
        "Ray": ray and masker().text(f"a cluster at {ray}"),
    }
