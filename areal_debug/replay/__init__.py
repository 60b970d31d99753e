"""`areal-debug replay`: start the ranks of a replay, run a task on each, print the result."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return a public name of `replayer`, which is imported when one is first used."""
    from areal_debug.installation import check_packages

    check_packages()
    import replayer

    if name not in replayer.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(replayer, name)
