"""What each verb can do here: by the extras that it needs, and by what this machine lacks."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_debug.cli import VERBS

NEEDS, USES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).values()


@dataclass(frozen=True)
class VerbHere:
    """A verb: whether it works here, which extra it lacks, what of it does not work and why."""

    name: str
    works: bool
    extra: str | None
    limits: tuple[str, ...]


def install(extra: str) -> str:
    return f"pip install 'areal-debug[{extra}]'"


def verbs_here(
    lacks: Mapping[str, Sequence[str]],
    refuses_stacks: str | None,
    schedulers: Mapping[str, str | None],
    has_git: bool,
    has_tensorboard: bool,
) -> list[VerbHere]:
    """Return every verb with what it can do here.

    Args:
        lacks: requirements of each extra that are not met.
        refuses_stacks: why stacks of other processes cannot be read, None if they can.
        schedulers: how each is reached, None if it is not.
        has_git: whether there is a git program.
        has_tensorboard: whether its package is installed; the extra `train` has it.
    """
    cannot: dict[str, list[str]] = {name: [] for name in VERBS}
    if refuses_stacks:
        cannot["hang"].append(f"stacks of running jobs, but saved ones: {refuses_stacks}")
    if not has_git:
        cannot["why"].append("--commits: there is no git program on PATH")
    if not has_tensorboard:
        cannot["doctor"].append("TensorBoard files: pip install tensorboard")
    if schedulers["SLURM"] is None:
        cannot["train"].append("scheduler.type=slurm: there is no srun on PATH")
    found = []
    for name in VERBS:
        extra = NEEDS.get(name)
        if extra is not None and lacks[extra]:
            found.append(VerbHere(name, False, extra, ()))
            continue
        uses = (f"{use}: {install(needed)}" for use, needed in USES.get(name, {}).items() if lacks[needed])
        found.append(VerbHere(name, True, None, (*uses, *cannot[name])))
    return found
