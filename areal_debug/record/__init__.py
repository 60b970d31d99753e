"""`areal-debug record`: list, show, verify, archive, import and export records."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return a public name of `recorder`, which is imported when one is first used."""
    from areal_debug.installation import check_packages

    check_packages()
    import recorder

    if name not in recorder.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(recorder, name)
