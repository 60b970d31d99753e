"""The targets by name: what reads an input, and which errors may refuse it."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .inputs import Case, Edit, Files


@dataclass(frozen=True)
class Target:
    """What is fuzzed.

    Attributes:
        bases: make the valid files; the folder is for those who write them.
        run: read one case with a box (an empty folder). It raises an error of `refusals`, or
            nothing; a rule that the reader must keep is an assertion.
        refusals: errors for wrong input, each defined in our packages.
        special: random edits that only this target knows.
    """

    bases: Callable[[Path], dict[str, Files]]
    run: Callable[[Case, Path], None]
    refusals: tuple[type[Exception], ...] = (ValueError,)
    special: Callable[..., Edit] | None = None


# target -> (module, how many fresh inputs the long tests run; the everyday ones a quarter)
MODULES = {
    "record": ("records", 60),
    "archive": ("archives", 30),
    "pack": ("archives", 30),
    "importers": ("imports", 40),
    "pickles": ("imports", 500),
    "trees": ("imports", 200),
    "expression": ("options", 1500),
    "names": ("options", 1500),
    "proxy": ("servers", 150),
    "replies": ("servers", 1500),
    "page": ("page", 300),
}


def load_target(name: str) -> Target:
    module = importlib.import_module(f"tests.fuzz.fuzz_{MODULES.get(name, (name, 0))[0]}")
    return module.TARGETS[name]


def read_folder(folder: Path) -> Files:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
