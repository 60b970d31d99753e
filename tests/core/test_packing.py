"""Karmarkar-Karp and the number of micro-batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_core.data.batch import first_fit_decreasing, karmarkar_karp, split_rows


def sums(lengths, groups):
    return sorted(sum(lengths[i] for i in group) for group in groups)


@given(
    st.sampled_from([first_fit_decreasing, karmarkar_karp]),
    st.lists(st.integers(1, 50), max_size=30),
    st.integers(50, 120),
    st.integers(1, 5),
)
def test_every_row_is_in_exactly_one_group_that_fits(pack, lengths, capacity, min_groups):
    groups = pack(lengths, capacity, min_groups)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(total <= capacity for total in sums(lengths, groups))
    assert len(groups) >= min(min_groups, len(lengths))


def test_a_row_that_fits_nowhere_is_refused_by_either():
    for pack in (first_fit_decreasing, karmarkar_karp):
        with pytest.raises(ValueError, match="a sequence of 101 tokens does not fit"):
            pack([3, 101], capacity=100)


@pytest.mark.parametrize("packing", ["ffd", "kk"])
@pytest.mark.parametrize(("others", "count"), [(1, 4), (5, 6)])
def test_the_number_of_micro_batches_is_a_multiple_on_every_rank(packing, others, count):
    groups = split_rows([5] * 6, 10, agree_on_max=lambda own: max(own, others), packing=packing, divisor=2)
    assert len(groups) == count
    assert all(
        groups[:4]
    )  # three would suffice: rows are distributed over four, so that none of these is empty
    assert sorted(row for group in groups for row in group) == list(range(6))
