"""A filter answers questions about rows and can do nothing else."""

import pytest

from replayer.errors import WrongFilter
from replayer.expression import ROW_NAMES, parse_expression

ROW = {
    "reward": 0.5,
    "prompt": [1, 2, 3],
    "completion": [7, 8, 9, 10],
    "finish_reason": "length",
    "logprobs": [-0.5, -2.0],
    "prompt_id": 3,
    "completion_text": "7 + 5 = 12",
}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("reward > 0 and len(completion) < 512", True),
        ("reward > 0 and len(completion) < 4", False),
        ("not reward or finish_reason == 'length'", True),
        ("0 < reward <= 0.5 < 1", True),
        ("prompt_id in (3, 5) and finish_reason not in ['stop']", True),
        ("min(logprobs) < -1.5", True),
        ("sum(logprobs) / len(logprobs) == -1.25", True),
        ("abs(-reward) * 2 + 1 - 1 == 1 and 7 // 2 == 3 and 7 % 2 == 1", True),
        ("completion[-1] == 10 and completion[0] == 7", True),
        ("'12' in completion_text", True),
        ("round(reward) == 0", True),
    ],
)
def test_an_expression_is_answered_as_python_would(text, answer):
    assert parse_expression(text, ROW_NAMES).matches(ROW) is answer


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "reward.__class__",
        "(lambda: 1)()",
        "[x for x in completion]",
        "open('/etc/passwd')",
        "len(completion, key=open)",
        "f'{reward}'",
        "completion[0:2]",
        "reward := 1",
        "2 ** 10 ** 10",
        "1 << 10 ** 10",
        "b'x' in completion_text",
        "print(reward)",
        "len.__self__",
        "reward if reward else open",
    ],
)
def test_everything_else_is_refused_before_a_row_is_seen(text):
    with pytest.raises(WrongFilter, match="--filter"):
        parse_expression(text, ROW_NAMES)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("1" + " + 1" * 1000, "4,001 characters; at most 2,000"),
        ("[" + "1," * 999 + "]", "more than 1,000"),
        ("-" * 60 + "1", "deeper than 50"),
        ("-" * 1999 + "1", "deeper than 50"),
        ("not " * 499 + "1", "deeper than 50"),
        ("9 ** " + "-" * 900 + "9", "deeper than 50"),
        ("9" * 31, "a number beyond 1e\\+30"),
    ],
    ids=lambda text: text[:12],
)
def test_an_expression_beyond_a_limit_is_refused_before_a_row_is_seen(text, limit):
    with pytest.raises(WrongFilter, match=limit):
        parse_expression(text, ROW_NAMES)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("round(5, -100000000) == 0", "at most 30 digits"),
        ("round(reward, 31) == 0", "at most 30 digits"),
        ("*".join(["1000000"] * 6) + " > 0", "beyond 1e\\+30"),
        ("'a' * 1000000000 == ''", "arithmetic works on numbers"),
        ("completion * 1000000000 == 0", "arithmetic works on numbers"),
        ("sum([completion], completion) == 0", "positional"),
        ("round(1e309) == 0", "infinity"),
    ],
)
def test_work_beyond_a_limit_is_refused_when_a_row_is_seen(text, limit):
    with pytest.raises(WrongFilter, match=limit):
        parse_expression(text, ROW_NAMES).matches(ROW)
