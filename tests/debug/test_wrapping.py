"""Lines on a terminal of 80 columns: wrapped between words, with the words that a pipe gets."""

import io

import pytest
from rich.segment import Segment
from rich.table import Table

from areal_debug.render import FirstLine, PlainConsole, wrapped_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal():
    return Terminal()


def console_of(file, width=40):
    return PlainConsole(file=file, width=width, color_system=None, markup=False, soft_wrap=True)


def test_separator_and_end_are_those_of_a_pipe(terminal):
    console_of(terminal).print("first line", "second line", sep="\n")
    console_of(terminal).print("no line end", end="")
    console_of(terminal).print()
    assert terminal.getvalue() == "first line\nsecond line\nno line end\n"


def test_a_table_that_is_too_wide_keeps_its_words(terminal):
    table = Table(box=None, pad_edge=False)
    table.add_column("statistic")
    table.add_column("recorded")
    table.add_column("replayed", justify="right")
    table.add_row("ppo_actor/update/importance_weight", "1.009891234567", "1.01365")
    console_of(terminal).print(table)
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert {"ppo_actor/update/importance_weight", "1.009891234567", "1.01365"} <= {*" ".join(lines).split()}


def test_a_verdict_of_quiet_stays_one_line(terminal):
    console_of(FirstLine(terminal)).print("word " * 20 + "end")
    assert terminal.getvalue() == "word " * 20 + "end\n"


def test_a_wide_line_is_wrapped_between_words_below_its_last_column():
    text = "  evidence    step 5: 1.23456, step 6: 0.875, step 7: 0.8125, step 8: 0.875, step 9: 0.654321"
    lines = "".join(s.text for s in wrapped_line([Segment(text[:40]), Segment(text[40:])], 80)).splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).split() == text.split()
    assert lines[1].index("step 9") == text.index("step 5")


def test_a_word_that_is_wider_than_the_terminal_stays_whole():
    word = "x" * 100
    lines = "".join(s.text for s in wrapped_line([Segment(f"see {word} there")], 80)).splitlines()
    assert lines == ["see", f"  {word}", "  there"]
