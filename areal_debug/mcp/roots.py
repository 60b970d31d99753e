"""The folders below which a client's paths must be."""

from dataclasses import dataclass
from pathlib import Path


class BadCall(ValueError):
    """A call that no tool answers: an unknown tool or argument, a wrong type, a refused path."""


@dataclass(frozen=True)
class Roots:
    """Resolved folders; relative paths are of the first."""

    folders: tuple[Path, ...]

    def resolve(self, name: str, path: str) -> str:
        """Return a path as the verbs get it: below the first root relative to it, else absolute.

        Links are resolved before, and `name` is the argument's, for the message.

        Raises BadCall for an address, and for a path that is in no root.
        """
        if "://" in path:
            raise BadCall(f"{name} is {path[:200]!r}: expected a path, no address")
        try:
            found = (self.folders[0] / path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a NUL
            raise BadCall(f"{name} is {path[:200]!r}, which is no path: {error}") from None
        if not any(found.is_relative_to(folder) for folder in self.folders):
            below = ", ".join(map(str, self.folders))
            raise BadCall(
                f"{name} is {path[:200]!r}, which is not below {below}: give a path there, or ask the user for "
                f"another --root"
            )
        first = self.folders[0]
        return str(found.relative_to(first)) if found.is_relative_to(first) else str(found)


def parse_roots(folders: tuple[Path, ...]) -> Roots:
    """Resolve the folders of `--root`, by default the current one. Raises ValueError."""
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"--root {folder} is not a folder: give one that holds runs")
    return Roots(tuple(folder.resolve() for folder in folders or (Path(),)))
