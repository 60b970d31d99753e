"""The line that says what a verb does, how far it is and how long it may take.

On a terminal it is gone when the verb ends:

    verb, and the children that it forks                 thread of the verb's process
      say(text), tick(), output() ──> page of shared memory ──> draws on standard error, where
                                                                nothing was written for 0.5 s
Writes to a terminal erase it before (`areal_debug.streams`). In a pipe, and on a terminal that has
no control codes (TERM=dumb), what is counted gets a line every `LINE_S` instead, from `tick`. There
is none with --quiet or --json. Nothing takes a lock: a child that is forked while the thread holds
one would wait for it indefinitely.

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
LINE_S = 30.0  # between lines where there is no terminal
SURE_S = 2.0  # of work before which nobody can say how long the rest takes
ERASE = "\r\x1b[2K"
MOST_BYTES = 1000
STDERR = 2


class Page(ctypes.Structure):
    """What the line shows, and what is known of the terminal."""

    _fields_ = (
        ("is_on_terminal", ctypes.c_bool),
        ("is_drawn", ctypes.c_bool),
        ("is_mid_line", ctypes.c_bool),  # the last output ended without a line end
        ("is_paused", ctypes.c_bool),
        ("output_at", ctypes.c_double),  # seconds of the monotonic clock
        ("verb_at", ctypes.c_double),
        ("work_at", ctypes.c_double),
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
        page.is_paused = True  # it prints nothing here
        say(text)
        yield
        return
    if page is not None:
        yield
        return
    page = Page.from_buffer(mmap.mmap(-1, ctypes.sizeof(Page)))
    page.is_on_terminal, page.output_at, page.verb_at = has_terminal(), time.monotonic(), time.monotonic()
    say(text)
    ended = threading.Event()
    thread = threading.Thread(target=draw_until, args=(ended, page), daemon=True)
    if page.is_on_terminal:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if page.is_on_terminal:
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
        page.done, page.total, page.work_at = 0, total, time.monotonic()
        page.text = text.encode(errors="replace")[: MOST_BYTES - 1]


def tick(count: int = 1) -> None:
    """Count what is done."""
    if page is not None:
        page.done += count
        now = time.monotonic()
        if not (page.is_on_terminal or page.is_paused) and now - page.output_at >= LINE_S:
            page.output_at = now
            write(line_of(page, now) + "\n")


@contextmanager
def doing(text: str, total: int = 0) -> Iterator[None]:
    """Say what is done within the context, then what was said before."""
    before = None if page is None else (page.text, page.done, page.total, page.work_at)
    say(text, total)
    yield
    if page is not None and before is not None:
        page.text, page.done, page.total, page.work_at = before


def leave_terminal(keeps_line: bool = False) -> None:
    """Show no line any more: the verb waits for requests, or others write to the terminal.

    With `keeps_line` what was said stays: the others need seconds to start.
    """
    if page is not None:
        page.is_paused = True
        output("\n")
        if keeps_line and page.is_on_terminal:
            write(page.text.decode(errors="replace") + "\n")


def output(text: str) -> None:
    """Erase the line before a text is written to the terminal."""
    if page is None or not page.is_on_terminal:
        return
    page.output_at, page.is_mid_line = time.monotonic(), not text.endswith("\n")
    if page.is_drawn:
        page.is_drawn = False
        write(ERASE)


def draw_until(ended: threading.Event, shown: Page) -> None:
    while not ended.wait(REDRAW_S):
        now = time.monotonic()
        if not (shown.is_paused or shown.is_mid_line) and now - shown.output_at >= SILENCE_S:
            shown.is_drawn = True  # before it is: another process may write meanwhile
            write(ERASE + line_of(shown, now))


def line_of(shown: Page, now: float) -> str:
    """Return text, count, time since the verb began and time that may be left, in one line."""
    from rich.cells import cell_len, set_cell_size

    ending = f" · {duration(now - shown.verb_at)}"
    if shown.total:
        ending = f" · {shown.done:,} of {shown.total:,}{ending}"
    spent = now - shown.work_at
    if 0 < shown.done < shown.total and spent > SURE_S:
        ending += f" · {duration(spent * (shown.total - shown.done) / shown.done)} left"
    if not shown.is_on_terminal:
        return shown.text.decode(errors="replace") + ending
    width = os.get_terminal_size(STDERR).columns - 1 - cell_len(ending)
    words = shown.text.decode(errors="replace").split(" ")
    while len(words) > 1 and cell_len(" ".join(words)) > width:
        words = [*words[:-2], "..."] if words[-1] == "..." else [*words[:-1], "..."]
    text = " ".join(words)
    return (text if cell_len(text) <= width else set_cell_size(text, max(width, 0))) + ending


def duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def write(text: str) -> None:
    """Write past the buffers of Python, whose locks a forked child would inherit."""
    try:
        os.write(STDERR, text.encode(errors="replace"))
    except OSError:  # the terminal is gone
        return
