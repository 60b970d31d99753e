"""Verbs whose input may come from anybody run in a confined child process."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec

import click

from areal_debug.render import errors_as_sentences, is_verbose, note
from areal_debug.streams import guarded

P = ParamSpec("P")
ANYWHERE = ("/",)  # for verbs that load the tokenizer that a record names
CPU_S = 10.0  # for an empty input
HELP_OF_LIMITS = (
    "The input is read in a process without network, unless it is a URL. Its limits grow with the "
    "input: 1 GiB of memory plus 20 times the input's size (AREAL_DEBUG_MEMORY_GIB), and {:g} s of "
    "CPU time plus 1 s for each MB (AREAL_DEBUG_TIME_S)."
)


def reads_untrusted(
    *inputs: str, outputs: str | None = None, reads: Iterable[str] = (), cpu_s: float = CPU_S
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate a verb: its body runs in a child with limits, without network and new processes.

    Args:
        inputs: the verb's parameters that name what is read: a path, a URL, or several.
        outputs: the parameter that names what is written, if there is one; its folder can be
            written, no other. None means a file in the current folder.
        reads: further places that the body may read.
        cpu_s: CPU time for an empty input, if not the usual one.
    """

    def decorate(body: Callable[P, None]) -> Callable[P, None]:
        @describes_limits(cpu_s)
        @functools.wraps(body)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
            from recorder.confine import (  # NumPy: 0.15 s of each verb's start
                bounds_for,
                is_in_memory,
                run_confined,
            )
            from recorder.storage import location_of

            places = [location_of(place) for name in inputs for place in several(kwargs[name])]
            written = [] if outputs is None else several(kwargs[outputs], Path("here"))
            writes = [Path(path).absolute().parent for path in written]
            if any(map(is_in_memory, places)):
                body(*args, **kwargs)
                return
            bounds = bounds_for(places, writes, reads, cpu_s=cpu_s)

            def in_child() -> None:
                try:
                    errors_as_sentences(body)(*args, **kwargs)
                except click.ClickException as error:  # misuse, which only its text leaves the child
                    raise ValueError(error.format_message()) from None

            with folders_for(writes):
                run_confined(lambda: guarded(in_child), bounds, announce=announced)

        return wrapped

    return decorate


@contextmanager
def folders_for(places: Iterable[Path]) -> Iterator[None]:
    """Make the folders that are missing, which a confined child cannot; remove those left empty."""
    missing = [one for place in places for one in (place, *place.parents) if not one.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
    try:
        yield
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def describes_limits(cpu_s: float) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Add to a verb's help which limits its child has, and how to change them."""

    def decorate(body: Callable[P, None]) -> Callable[P, None]:
        body.__doc__ = f"{inspect.cleandoc(body.__doc__ or '')}\n\n{HELP_OF_LIMITS.format(cpu_s)}"
        return body

    return decorate


def several(value: Any, default: Path | None = None) -> list[Any]:
    """Return the values of an option or argument that may be absent or repeated."""
    value = default if value is None else value
    if value is None:
        return []
    return list(value) if isinstance(value, tuple | list) else [value]


def announced(active: str) -> None:
    """Print what the child may use, with --verbose."""
    if is_verbose():
        note(f"reading in a confined process: {active}")
