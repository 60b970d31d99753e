"""Numbers, curves and sentences in a terminal."""

import json
import math

import pytest

from areal_debug.diff.report import difference_table, format_value
from areal_debug.render import (
    errors_as_sentences,
    format_bytes,
    format_seconds,
    print_json,
    sparkline,
)
from recorder import DamagedRecord
from recorder.difference import Difference


def test_a_sparkline_spans_the_finite_values():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, math.nan, 3]) == "▁ █"
    assert sparkline([2, 2]) == "▁▁"
    assert sparkline([]) == ""


def test_a_long_sparkline_shows_means():
    assert sparkline([0, 0, 10, 10, 20, 20, 70, 70], width=4) == "▁▂▃█"
    assert len(sparkline(list(range(12345)))) == 60


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(999), "999 B"),
        (format_bytes(7_460_000), "7.46 MB"),
        (format_bytes(5e15), "5e+03 TB"),
        (format_seconds(0.0345), "34.5 ms"),
        (format_seconds(12.34), "12.3 s"),
        (format_seconds(245), "4 min 05 s"),
        (format_value(None), "absent"),
        (format_value("0x1.8000000000000p+0"), "1.5 (0x1.8000000000000p+0)"),
        (format_value("00ff00ff"), "00ff00ff"),
        (format_value("0xplore"), "0xplore"),
    ],
)
def test_values_are_short_and_keep_their_unit(text, expected):
    assert text == expected


def test_a_long_table_of_differences_reports_how_many_are_left_out():
    differences = [Difference(f"layer.{i}", "a", None) for i in range(25)]
    table = difference_table("parameters", differences, ("what", "recorded", "now"), limit=20)
    assert len(table.rows) == 20
    assert table.more == "... and 5 more"
    assert table.rows[0] == ["layer.0", "a", "absent"]


def test_json_is_strict_even_for_values_that_json_lacks(capsys):
    print_json({"loss": math.inf, "rows": (1, 2)})
    assert json.loads(capsys.readouterr().out) == {"loss": {"float": "inf"}, "rows": [1, 2]}


@pytest.mark.parametrize(
    ("error", "code"),
    [(ValueError("no [x]"), 2), (DamagedRecord("a", "is missing"), 1), (FileNotFoundError("b"), 2)],
)
def test_a_users_mistake_is_a_sentence_and_a_code(error, code, capsys):
    @errors_as_sentences
    def body():
        raise error

    with pytest.raises(SystemExit) as caught:
        body()
    assert caught.value.code == code
    assert capsys.readouterr().err == f"Error: {error}\n"


def test_a_defect_of_ours_keeps_its_traceback():
    @errors_as_sentences
    def body():
        raise KeyError("x")

    with pytest.raises(KeyError):
        body()
