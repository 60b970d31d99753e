"""Standard output and error of a verb: nothing that a terminal obeys, and writes that fail.

    verb's report -> rich -> styled(stream) --------------+
                                                          +--> Printable stream -> standard output
    print, click, logging, warnings, tracebacks --> write +

Control codes in what is written are shown as their code; only `styled` passes those of rich, whose
text `areal_debug.render` has made printable before. A write to standard output that fails (it is
closed, the disk is full, its reader has ended) raises `OutputLost`, which ends the verb; one to
standard error is dropped.
"""

import codecs
import contextlib
import errno
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from areal_core.safety.durable import os_error_of, sentence_of
from areal_core.safety.printable import printable_block
from areal_debug.waiting import output

R = TypeVar("R")
INTERRUPTED = 130  # exit codes as shells have them: 128 and the number of the signal
READER_ENDED = 141


class OutputLost(Exception):
    """Standard output cannot be written. Not an OSError: no verb may take it for its own file's."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(cause.strerror or str(cause))
        self.errno = cause.errno


class Printable:
    """A text stream that shows control codes of what it is given; for anything else the stream.

    A carriage return at the start of a write is passed on: progress bars of other packages, which
    draw a line again, begin with one.
    """

    def __init__(self, stream: Any, required: bool) -> None:
        self.stream, self.required = stream, required
        self.is_terminal = stream.isatty()

    def write(self, text: str) -> int:
        bar = text[:1] == "\r"
        self.write_styled(text[:bar] + printable_block(text[bar:]))
        return len(text)

    def write_styled(self, text: str) -> int:
        if self.is_terminal:
            output(text)
        self._attempt(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self.stream.flush)

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            if self.required:
                raise OutputLost(error) from error

    @property
    def buffer(self) -> Any:
        """The stream of bytes, which gets those of ranks as they are."""
        return Bytes(self)

    @property
    def encoding(self) -> str:
        """The stream's encoding; not ASCII, for which click would write around this stream."""
        name: str = self.stream.encoding or "utf-8"
        return "latin-1" if codecs.lookup(name).name == "ascii" else name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Bytes:
    """The stream of bytes below a `Printable`."""

    def __init__(self, stream: Printable) -> None:
        self.is_terminal, self.buffer = stream.is_terminal, stream.stream.buffer

    def write(self, data: bytes) -> int:
        if self.is_terminal:
            output(data[-1:].decode(errors="replace"))
        return int(self.buffer.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.buffer, name)


class Styled:
    """A `Printable` stream for rich, whose styles are control codes."""

    def __init__(self, stream: Printable) -> None:
        self.write = stream.write_styled
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def styled_stream(stream: Any) -> Any:
    return Styled(stream) if isinstance(stream, Printable) else stream


def guarded(run: Callable[[], R]) -> R:
    """Run a command whose output is printable; where output or memory fails, end it with a sentence.

    Raises:
        SystemExit: 2 if standard output is closed or full, 141 if its reader has ended.
    """
    open_standard_streams()
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()  # what is buffered fails here, and not at the interpreter's end
    except OutputLost as error:
        discard_output()
        if error.errno == errno.EPIPE:  # `| head` has read what it wanted
            raise SystemExit(READER_ENDED) from None
        print(f"Error: standard output cannot be written: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (MemoryError, ImportError, RuntimeError) as error:  # also of what an `except` imports
        if (cause := os_error_of(error)) is None:
            raise
        print(f"Error: {sentence_of(cause)}", file=sys.stderr)
        raise SystemExit(2) from None


def open_standard_streams() -> None:
    """Make the standard streams printable; those that the caller closed lead nowhere.

    A file that is opened later must not get the number of a closed standard stream: a child's
    messages would be written into it. Characters that standard output's encoding lacks become `?`.

    Raises SystemExit(2) if standard output is closed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        print("Error: standard output is closed: redirect it to a file, or to /dev/null", file=sys.stderr)
        raise SystemExit(2)
    if not isinstance(sys.stdout, Printable):
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")
        sys.stdout = Printable(sys.stdout, required=True)
    if not isinstance(sys.stderr, Printable):
        sys.stderr = Printable(sys.stderr, required=False)


def discard_output() -> None:
    with contextlib.suppress(OSError, ValueError):  # a stream of a test has no number
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
