"""Turn what Python raises for a file of another shape into one sentence about the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WRONG_SHAPE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)  # RecursionError is a RuntimeError


@contextmanager
def malformed_as(error: type[ValueError], file: Path, what: str) -> Iterator[None]:
    """Raise `error` in place of any exception that a value of another type or size causes.

    Args:
        what: what the file should be: "a trace of areal-debug".
    """
    try:
        yield
    except error:
        raise
    except WRONG_SHAPE as cause:
        text = f"{type(cause).__name__}: {cause}"
        raise error(f"{file} is not {what}, or it is damaged ({text[:200]})") from cause
