"""The report of `areal-debug info`: all facts, and the verdict."""

import platform
import shutil
from dataclasses import dataclass
from importlib import metadata

from areal_debug.info.machine import Machine, Permissions, read_machine, read_permissions
from areal_debug.info.packages import OURS, Packages, read_packages
from areal_debug.info.reachable import Reachable, find_reachable
from areal_debug.info.verbs import VerbHere, verbs_here
from areal_debug.render import count


@dataclass(frozen=True)
class Info:
    """What is here. `problems` are sentences about what is installed and broken."""

    verdict: str
    problems: tuple[str, ...]
    version: str
    python: str
    packages: Packages
    machine: Machine
    reachable: Reachable
    permissions: Permissions
    verbs: tuple[VerbHere, ...]


def collect_info() -> Info:
    packages = read_packages()
    reachable, permissions = find_reachable(packages.versions), read_permissions()
    verbs = verbs_here(
        packages.lacks,
        permissions.refuses_stacks,
        reachable.schedulers,
        has_git=shutil.which("git") is not None,
        has_tensorboard="tensorboard" in packages.versions,
    )
    problems = tuple(packages.problems)
    version, num_working = metadata.version(OURS), sum(verb.works for verb in verbs)
    found = f"Broken: {count(len(problems), 'problem')} of what is installed" if problems else "Consistent"
    return Info(
        verdict=f"{found}: {OURS} {version}, {num_working} of {count(len(verbs), 'verb')} can run with what is installed here",
        problems=problems,
        version=version,
        python=platform.python_version(),
        packages=packages,
        machine=read_machine(),
        reachable=reachable,
        permissions=permissions,
        verbs=tuple(verbs),
    )
