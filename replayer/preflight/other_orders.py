"""Reverse the listings of folders in this process, to see what follows their order."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

REVERSED_LISTINGS = "AREAL_DEBUG_REVERSED_LISTINGS"


class ReversedEntries:
    """The entries of `os.scandir`, last name first."""

    def __init__(self, entries: Any) -> None:
        with entries:
            self.entries = iter(sorted(entries, key=lambda entry: entry.name, reverse=True))

    def __iter__(self) -> Iterator[Any]:
        return self.entries

    def __next__(self) -> Any:
        return next(self.entries)

    def __enter__(self) -> "ReversedEntries":
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: it is closed."""

    def close(self) -> None:
        """Do nothing: it is closed."""


@contextmanager
def listings_reversed(on: bool) -> Iterator[None]:
    """List folders from the last name to the first: listdir, scandir, glob, walk, pathlib."""
    listdir, scandir = os.listdir, os.scandir
    if on:
        os.listdir = lambda *path: sorted(listdir(*path), reverse=True)  # type: ignore[assignment]
        os.scandir = lambda *path: ReversedEntries(scandir(*path))  # type: ignore[assignment]
    try:
        yield
    finally:
        os.listdir, os.scandir = listdir, scandir
