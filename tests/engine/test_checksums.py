from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from areal_core.engine.checksums import combine


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_of_two_parts_combine_to_that_of_the_whole(left, right):
    assert combine(crc32c(left), crc32c(right), len(right)) == crc32c(left + right)
