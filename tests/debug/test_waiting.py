"""The line that a terminal shows while a verb works: drawn, erased, and absent elsewhere."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import click
import pytest

from areal_debug import waiting
from recorder.testing import write_scripted_record
from tests.command_line import walk

ROOT = Path(__file__).parents[2]
ERASE = "\r\x1b[2K"
# A verb that counts, prints, writes bytes as ranks do, and forks as confined verbs do.
VERB = """
import os, sys, time
import click
from areal_debug import waiting
from areal_debug.cli import Verb, VerbGroup, json_option
from areal_debug.render import announce, console, errors_as_sentences, with_progress
waiting.SILENCE_S, waiting.REDRAW_S = 0.2, 0.02

@click.group(cls=VerbGroup, example="")
def main(): pass

@main.command(cls=Verb, example="")
@json_option
@errors_as_sentences
def work(as_json):
    def forked(tick):
        if os.fork() == 0:
            for _ in range(3):
                tick(None)
            time.sleep(0.5)
            console().print("row of the child")
            sys.stdout.flush()
            os._exit(0)
        os.wait()
    time.sleep(0.5)
    announce("counting " + "words of a long sentence " * 10)
    time.sleep(0.5)
    with_progress("reading steps", 1000, forked)
    sys.stdout.buffer.write(b"bytes of a rank\\n")
    sys.stdout.buffer.flush()
    sys.stdout.write("no line end")
    time.sleep(0.5)
    print()
    announce("going to a step")
    waiting.leave_terminal(keeps_line=True)
    time.sleep(0.5)
    raise ValueError("it failed")

main(prog_name="areal-debug")
"""


def on_terminal(
    command: list[str], columns: int = 60, timeout_s: float = 60, **variables: str
) -> tuple[int, str]:
    """Run a command whose streams are a terminal; return its exit code and what it wrote."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS")}
    environment |= {"TERM": "xterm", **variables}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written, ends_at = b"", time.monotonic() + timeout_s
    try:
        while time.monotonic() < ends_at:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    written += os.read(ours, 65536)
                except OSError:  # all have closed the terminal
                    break
        return process.wait(10), written.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def screen(written: str) -> list[str]:
    """The lines that remain on the terminal, without styles."""
    lines = []
    for line in re.sub(r"\x1b\[[\d;]*m", "", written.replace("\r\n", "\n")).split("\n"):
        lines.append(line.rpartition(ERASE)[2])
    return lines


def drawn(written: str) -> list[str]:
    """The texts that the line had, one after the other, without its times."""
    texts = [re.sub(r" · \d+ s$", "", text) for text in re.findall(r"\x1b\[2K([^\r\x1b]+)", written)]
    return [text for i, text in enumerate(texts) if i == 0 or texts[i - 1] != text]


def test_the_line_is_drawn_while_nothing_is_written_and_leaves_nothing():
    code, written = on_terminal([sys.executable, "-c", VERB, "work"])
    assert code == 2
    texts = drawn(written)
    assert texts[0] == "work"
    assert texts[1].startswith("counting words of a long sentence")
    assert texts[1].endswith(" ...")
    assert "reading steps · 3 of 1,000" in texts
    assert max(map(len, texts)) <= 60 - len(" · 1 s")
    assert screen(written) == [
        "row of the child", "bytes of a rank", "no line end", "going to a step", "Error: it failed", "",
    ]  # fmt: skip
    assert ERASE not in written.partition("no line end")[2]


def test_counted_work_has_a_line_now_and_then_in_a_pipe(monkeypatch, capfd):
    monkeypatch.setattr(waiting, "LINE_S", 0.0)
    monkeypatch.setattr(waiting, "SURE_S", -1.0)
    monkeypatch.setattr(waiting, "has_terminal", lambda: False)
    with waiting.waiting_line("record ls"), waiting.doing("reading steps", 2000):
        waiting.page.work_at, waiting.page.verb_at = time.monotonic() - 10, time.monotonic() - 61
        waiting.tick(1000)
    with waiting.waiting_line("record ls"), waiting.doing("importing"):
        waiting.tick()
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["reading steps · 1,000 of 2,000 · 1 min 01 s · 10 s left", "importing · 0 s"]


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    ["record redact R --without-text --to", "record export R --format jsonl --to", "open R --all-steps -o"],
)
def test_an_interrupt_leaves_nothing_half_written(words, tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=1500)
    out = tmp_path / "out"
    out.mkdir()
    command = [str(tmp_path / "record") if word == "R" else word for word in words.split()]
    process = subprocess.Popen(
        [sys.executable, "-m", "areal_debug", *command, str(out / "new")],
        cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while process.poll() is None and not os.listdir(out):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert os.listdir(out) == []


def test_every_verb_shows_the_line():
    """`errors_as_sentences` draws it; what it wraps keeps a reference to the body."""
    without = [
        name
        for name, command in walk()
        if not shows_line(command.callback) and not isinstance(command, click.Group)
    ]
    assert without == []


def shows_line(function) -> bool:
    while function is not None:
        if "shown_progress" in function.__code__.co_names:
            return True
        function = getattr(function, "__wrapped__", None)
    return False
