"""The newest run below a folder, where a verb is given the folder of several runs."""

import shlex
from collections.abc import Sequence
from pathlib import Path


def newest_first(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.rglob(pattern), key=lambda file: file.stat().st_mtime_ns, reverse=True)


def describe_choice(verb: str, folder: Path | str, chosen: Path | str, others: Sequence[str]) -> str:
    """Describe how many runs a folder holds, which was read, and how to choose another.

    Empty where there was nothing to choose.
    """
    if not others:
        return ""
    return (
        f"{len(others) + 1} runs found in {folder}, the newest was read ({chosen}); "
        f"for another: areal-debug {verb} {shlex.quote(others[0])}"
    )
