"""The line that says on a terminal what a verb does and how far it is; gone when it ends.

    verb, and the children that it forks                 thread of the verb's process
      say(text), tick(), output() ──> page of shared memory ──> draws on standard error, where
                                                                nothing was written for 0.5 s
Writes to a terminal erase it before (`areal_debug.streams`). There is none in a pipe, with
--quiet, with --json, or on a terminal that has no control codes (TERM=dumb). Nothing takes a lock:
a child that is forked while the thread holds one would wait for it indefinitely.

A program that called the verb can have the page instead: the file that AREAL_DEBUG_PROGRESS names.
"""

import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRESS_VARIABLE, PROGRESS_FILE = "AREAL_DEBUG_PROGRESS", "progress"
SILENCE_S = 0.5  # what ends sooner needs no line
REDRAW_S = 0.2
ERASE = "\r\x1b[2K"
MOST_BYTES = 1000
STDERR = 2


class Page(ctypes.Structure):
    """What the line shows, and what is known of the terminal."""

    _fields_ = (
        ("is_drawn", ctypes.c_bool),
        ("is_mid_line", ctypes.c_bool),  # the last output ended without a line end
        ("is_paused", ctypes.c_bool),
        ("output_at", ctypes.c_double),  # seconds of the monotonic clock
        ("done", ctypes.c_int64),
        ("total", ctypes.c_int64),
        ("text", ctypes.c_char * MOST_BYTES),
    )


page: Page | None = None  # None while no line is shown


def has_terminal() -> bool:
    """Return whether standard error is a terminal that obeys control codes."""
    return sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


@contextmanager
def waiting_line(text: str) -> Iterator[None]:
    """Show a line until the end of the context; does nothing within another one."""
    global page
    shared = os.environ.pop(PROGRESS_VARIABLE, None)
    if page is None and shared is not None:
        with open(shared, "r+b") as file:
            page = Page.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(Page)))
        say(text)
        yield
        return
    if page is not None or not has_terminal():
        yield
        return
    page = Page.from_buffer(mmap.mmap(-1, ctypes.sizeof(Page)))
    page.output_at = time.monotonic()
    say(text)
    ended = threading.Event()
    thread = threading.Thread(target=draw_until, args=(ended, page), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        output("\n")
        page = None


def make_page(file: Path) -> None:
    """Make the file for the page of a verb that another program calls."""
    file.write_bytes(bytes(ctypes.sizeof(Page)))


def read_page(file: Path) -> Page:
    """Return what such a verb does now."""
    return Page.from_buffer_copy(file.read_bytes())


def say(text: str, total: int = 0) -> None:
    """Say what is done from here on, and how many ticks it takes; 0 is unknown."""
    if page is not None:
        page.done, page.total = 0, total
        page.text = text.encode(errors="replace")[: MOST_BYTES - 1]


def tick(count: int = 1) -> None:
    """Count what is done."""
    if page is not None:
        page.done += count


@contextmanager
def doing(text: str, total: int = 0) -> Iterator[None]:
    """Say what is done within the context, then what was said before."""
    before = None if page is None else (page.text.decode(errors="replace"), page.done, page.total)
    say(text, total)
    yield
    if before is not None:
        say(before[0], before[2])
        tick(before[1])


def leave_terminal(keeps_line: bool = False) -> None:
    """Show no line any more: the verb waits for requests, or others write to the terminal.

    With `keeps_line` what was said stays: the others need seconds to start.
    """
    if page is not None:
        page.is_paused = True
        output("\n")
        if keeps_line:
            write(page.text.decode(errors="replace") + "\n")


def output(text: str) -> None:
    """Erase the line before a text is written to the terminal."""
    if page is None:
        return
    page.output_at, page.is_mid_line = time.monotonic(), not text.endswith("\n")
    if page.is_drawn:
        page.is_drawn = False
        write(ERASE)


def draw_until(ended: threading.Event, shown: Page) -> None:
    started_at = time.monotonic()
    while not ended.wait(REDRAW_S):
        now = time.monotonic()
        if not (shown.is_paused or shown.is_mid_line) and now - shown.output_at >= SILENCE_S:
            shown.is_drawn = True  # before it is: another process may write meanwhile
            write(ERASE + line_of(shown, now - started_at))


def line_of(shown: Page, seconds: float) -> str:
    """Return the text, the count, and the seconds since the verb began, in one line."""
    from rich.cells import cell_len, set_cell_size

    minutes, rest = divmod(int(seconds), 60)
    elapsed = f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    count = f" · {shown.done:,} of {shown.total:,}" if shown.total else ""
    ending = f"{count} · {elapsed}"
    width = os.get_terminal_size(STDERR).columns - 1 - cell_len(ending)
    words = shown.text.decode(errors="replace").split(" ")
    while len(words) > 1 and cell_len(" ".join(words)) > width:
        words = [*words[:-2], "..."] if words[-1] == "..." else [*words[:-1], "..."]
    text = " ".join(words)
    return (text if cell_len(text) <= width else set_cell_size(text, max(width, 0))) + ending


def write(text: str) -> None:
    """Write past the buffers of Python, whose locks a forked child would inherit."""
    try:
        os.write(STDERR, text.encode(errors="replace"))
    except OSError:  # the terminal is gone
        return
