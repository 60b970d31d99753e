"""Versions of packages, and whether they fit together, from their metadata: nothing is imported."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OURS = "areal-debug"
BESIDE = ("vllm", "flash-attn", "triton", "accelerate", "megatron-core", "deepspeed")  # no extra of ours
NOT_FOR_USERS = ("bench", "dev", "docs", "all")


@dataclass(frozen=True)
class Packages:
    """Versions of what areal-debug can use, None where it is not installed.

    `lacks` has for each extra the requirements that are not met; `problems` are sentences.
    """

    versions: Mapping[str, str | None]
    lacks: Mapping[str, Sequence[str]]
    problems: Sequence[str]


def read_packages() -> Packages:
    """Read the metadata of every package that an extra of ours brings, and of those beside them."""
    extras = requirements_by_extra(metadata.requires(OURS) or ())
    named = [requirement.name for listed in extras.values() for requirement in listed]
    names = dict.fromkeys([*map(canonicalize_name, named), *BESIDE])
    versions = {name: version_of(name) for name in names if name != OURS}
    lacks = {
        extra: [sentence for one in every(extra, extras) if (sentence := unmet(one, versions))]
        for extra in extras
        if extra
    }
    ours = [f"areal-debug needs {sentence}" for one in extras[""] if (sentence := unmet(one, versions))]
    return Packages(versions, lacks, [*ours, *conflicts(versions)])


def version_of(name: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirements_by_extra(texts: Iterable[str]) -> dict[str, list[Requirement]]:
    """Return what each extra adds for this Python; "" is the plain install."""
    found: dict[str, list[Requirement]] = {"": []}
    for requirement in map(Requirement, texts):
        marker = str(requirement.marker or "")
        extra = marker.rpartition("extra == ")[2].strip("\"') ") if "extra" in marker else ""
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if applies and extra not in NOT_FOR_USERS:
            found.setdefault(extra, []).append(requirement)
    return found


def every(extra: str, extras: Mapping[str, Sequence[Requirement]]) -> Iterable[Requirement]:
    """Yield the requirements of an extra, and of the extras that it names."""
    for requirement in extras[extra]:
        if requirement.name == OURS:
            for inner in requirement.extras:
                yield from every(inner, extras)
        else:
            yield requirement


def unmet(requirement: Requirement, versions: Mapping[str, str | None]) -> str | None:
    """Return which package a requirement lacks, None if it is met."""
    version = versions[canonicalize_name(requirement.name)]
    wanted = f"{requirement.name}{requirement.specifier}"
    if version is None:
        return f"{wanted}, which is not installed"
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"{wanted}, and {version} is installed"


def conflicts(versions: Mapping[str, str | None]) -> list[str]:
    found = []
    for name, version in versions.items():
        for text in (metadata.requires(name) or ()) if version else ():
            if not versions.get(canonicalize_name(re.split(r"[^\w.-]", text)[0])):
                continue  # before it is parsed: a package may have a hundred requirements
            requirement = Requirement(text)
            is_optional = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
            if not is_optional and (lack := unmet(requirement, versions)):
                found.append(f"{name} {version} needs {lack}")
    return found
