"""Lines of JSON are read as Python's parser reads them, by a faster one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorder.trainers.foreign import parse_json

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters())
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)


def result_of(parse, line):
    """What a parser returns, with the types of numbers, or that it refuses."""
    try:
        return repr(parse(line))
    except ValueError:
        return "refused"


@given(VALUES, st.booleans())
def test_values_are_those_of_json(value, is_ascii):
    line = json.dumps(value, ensure_ascii=is_ascii).encode(errors="surrogatepass")
    assert result_of(parse_json, line) == result_of(lambda text: json.loads(text.decode()), line)


@pytest.mark.parametrize(
    "line",
    [
        *(b"NaN", b"-Infinity", b"1e400", b"-0", b"-0.0", b"5e-324", b"1.0", b"01", b"1.", b"+1", b"1e5"),
        *(b"18446744073709551616", b"-9223372036854775809", b"9" * 400, b"9" * 5000, b"0x10"),
        *(b'"\\ud800"', b'"\xed\xa0\x80"', b'"\xff"', b'"a\x01b"', b'"\\u0000"', b'"\\x"', b"'a'"),
        *(
            b'{"a":1,"a":2}',
            b"[1,]",
            b"[1 2]",
            b'{"a"}',
            b"{1:2}",
            b"1 2",
            b"",
            b" ",
            b"nul",
            b"\xef\xbb\xbf1",
        ),
        *(b"\x0b1", b"\xc2\xa01", b"// a\n1", b"[[[[[]]]]]", b"\t[1,\r\n2] "),
    ],
)
def test_edges_are_those_of_json(line):
    assert result_of(parse_json, line) == result_of(lambda text: json.loads(text.decode()), line)


def test_a_line_that_is_too_deep_is_a_recursion_error():
    with pytest.raises(RecursionError):
        parse_json(b"[" * 200_000)
