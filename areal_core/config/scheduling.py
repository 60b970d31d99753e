"""Per-role `scheduling_spec` and `scheduling_strategy`: what runs a process, where, with what.

Two roles have processes: the actor (the trainer's ranks) and rollout (the inference servers). Other
models are in the ranks of the actor. What launchers use of a `scheduling_spec`:

```
env_vars                   every launcher: environment of the process
cmd                        every launcher: the command in place of ours: `python` of a rank,
                           `python -m sglang.launch_server` of a server; our arguments follow
cpu, mem                   Ray and SLURM: cores and GiB for each GPU
image, mount,              SLURM: the container of the process
container_type
srun_additional_args       SLURM: options of srun
```

What it leaves out is taken from `launcher`. The number of GPUs is that of the allocation.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from areal_core.config.allocation import Allocation
from areal_core.config.services import LauncherConfig

ProcessRole = Literal["actor", "rollout"]
KINDS: dict[str, tuple[type, ...]] = {
    "env_vars": (dict,),
    "cmd": (str,),
    "cpu": (int,),
    "mem": (int,),
    "image": (str,),
    "mount": (str,),
    "container_type": (str,),
    "srun_additional_args": (str,),
}
EVERYWHERE = ("env_vars", "cmd")
SCHEDULED = (*EVERYWHERE, "cpu", "mem")
USED = {None: EVERYWHERE, "local": EVERYWHERE, "ray": SCHEDULED, "slurm": tuple(KINDS)}
# Parts that describe upstream's own workers, or that repeat the allocation.
IMPLIED = ("task_type", "port_count", "gpu")
UPSTREAM = "areal."  # its modules, which start its own workers


@dataclass(frozen=True)
class RoleSpec:
    """The processes of one role, as launchers start them.

    Attributes:
        env_vars: variables of the environment.
        command: starts a process in place of our own; empty for that.
        cpus_per_gpu, mem_per_gpu: cores and MiB for each GPU; 0: not requested.
        image, mount, container_type: the container (None: none), its folders and its runtime.
        srun_additional_args: options of srun.
    """

    env_vars: dict[str, str]
    command: tuple[str, ...]
    cpus_per_gpu: int
    mem_per_gpu: int
    image: str | None
    mount: str
    container_type: str
    srun_additional_args: str


def role_spec(scheduling_spec: Any, launcher: LauncherConfig, role: ProcessRole) -> RoleSpec:
    spec, slurm = merged_spec(scheduling_spec), launcher.slurm
    is_actor = role == "actor"
    cpus = launcher.trainer_cpus_per_gpu if is_actor else launcher.inference_server_cpus_per_gpu
    mem_mib = launcher.trainer_mem_per_gpu if is_actor else launcher.inference_server_mem_per_gpu
    image = slurm.trainer_image if is_actor else slurm.inference_server_image
    return RoleSpec(
        {str(name): str(value) for name, value in spec.get("env_vars", {}).items()},
        command_of(spec),
        spec.get("cpu", cpus),
        1024 * spec["mem"] if "mem" in spec else mem_mib,
        spec.get("image") or image,
        spec.get("mount") or slurm.mount,
        spec.get("container_type") or slurm.container_type,
        spec.get("srun_additional_args", slurm.srun_additional_args),
    )


def command_of(spec: dict[str, Any]) -> tuple[str, ...]:
    """Return the `cmd` of a spec, divided as a shell would; empty for upstream's own workers."""
    command = tuple(shlex.split(spec.get("cmd", "")))
    return () if any(part.startswith(UPSTREAM) for part in command) else command


def wrong_specs(values: dict[str, Any]) -> Iterator[str]:
    """Yield one sentence for each part of a `scheduling_spec` of the wrong kind."""
    for name, value in values.items():
        if not name.endswith(".scheduling_spec") or value is None:
            continue
        specs = value if isinstance(value, list) else [value]
        if not all(isinstance(spec, dict) for spec in specs):
            yield f"{name} is {value!r}; expected options such as env_vars, or a list of them"
            continue
        for part, given in merged_spec(value).items():
            kinds = KINDS.get(part, (object,))
            is_right = isinstance(given, kinds) and not (kinds == (int,) and isinstance(given, bool))
            if not (is_right and (kinds != (int,) or given >= 0)):
                words = {dict: "variables and their values", str: "a text", int: "a whole number, 0 or more"}
                yield f"{name}.{part} is {given!r}; expected {words[kinds[0]]}"


def specs_without_effect(values: dict[str, Any], scheduler: str | None) -> Iterator[str]:
    """Yield sentences on parts of `scheduling_spec` that this scheduler, or none, uses."""
    used = USED[scheduler]
    of_actor = merged_spec(values["actor.scheduling_spec"])
    elsewhere, unused = [], []
    for name, value in values.items():
        if not name.endswith(".scheduling_spec"):
            continue
        has_processes = name in ("actor.scheduling_spec", "rollout.scheduling_spec")
        for part, given in merged_spec(value).items():
            if part in IMPLIED or given in ("", False):
                continue
            if not has_processes and given != of_actor.get(part):
                elsewhere.append(f"{name}.{part}")
            elif has_processes and part not in used:
                unused.append(f"{name}.{part}")
    if elsewhere:
        yield f"{without_effect(elsewhere)}: only actor and rollout have processes, and other models are in those of the actor"
    if unused:
        place = "on this machine" if scheduler in (None, "local") else f"under {scheduler}"
        yield (
            f"{without_effect(unused)} {place}, where launchers use {', '.join(used)}: cpu and mem need scheduler.type ray or "
            "slurm, containers slurm; other #SBATCH lines are launcher.slurm.additional_bash_cmds"
        )


def without_effect(names: list[str]) -> str:
    return f"{', '.join(sorted(names))} {'has' if len(names) == 1 else 'have'} no effect"


def strategies_without_effect(values: dict[str, Any]) -> Iterator[str]:
    """Yield one sentence for each `scheduling_strategy` that places nothing."""
    for name, value in values.items():
        if not name.endswith(".scheduling_strategy") or not isinstance(value, dict):
            continue
        role, kind, target = name.split(".")[0], value.get("type"), value.get("target")
        others = {"actor": ("rollout",), "rollout": ("actor",)}.get(role, ("actor",))
        if (kind, target) != ("separation", None) and (kind != "colocation" or target not in others):
            yield f"{name} is {value}, which has no effect: all models are in the trainer's ranks, servers by allocation_mode"


def placed_together(allocation: Allocation, actor: Any, rollout: Any) -> Allocation:
    """Return the allocation on shared devices if a strategy places actor and rollout together.

    Args:
        actor, rollout: their `scheduling_strategy`, None or a dict.
    """
    pairs = ((actor, "rollout"), (rollout, "actor"))
    together = any(
        isinstance(strategy, dict) and (strategy.get("type"), strategy.get("target")) == ("colocation", other)
        for strategy, other in pairs
    )
    return (
        replace(allocation, kind="colocated") if together and allocation.kind == "decoupled" else allocation
    )


def merged_spec(scheduling_spec: Any) -> dict[str, Any]:
    specs = scheduling_spec if isinstance(scheduling_spec, list) else [scheduling_spec]
    parts = [item for spec in specs if isinstance(spec, dict) for item in spec.items()]
    return {part: value for part, value in parts if value is not None}
