"""Batches of rows: padding and order, Karmarkar-Karp, and the number of micro-batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_core.data import batch as B
from areal_core.data.batch import first_fit_decreasing, karmarkar_karp, split_rows


def rows(*lengths, prompt_ids=None):
    """Build a batch whose row i has the tokens 10*i+1, 10*i+2, ..."""
    width = max(lengths, default=0)
    tokens = [[10 * i + t + 1 if t < n else 0 for t in range(width)] for i, n in enumerate(lengths)]
    return {
        "input_ids": torch.tensor(tokens, dtype=torch.int32),
        "attention_mask": torch.arange(width) < torch.tensor(lengths)[:, None],
        "rewards": torch.arange(len(lengths), dtype=torch.float32),
        "prompt_id": torch.tensor(prompt_ids or range(len(lengths)), dtype=torch.int64),
        "sample_id": torch.zeros(len(lengths), dtype=torch.int32),
    }


def assert_same(left, right):
    assert left.keys() == right.keys()
    for key in left:
        assert left[key].dtype == right[key].dtype
        assert torch.equal(left[key], right[key]), key


def test_concat_pads_with_zeros_to_the_longest_and_names_keys_that_are_not_in_all():
    joined = B.pad_and_concat([rows(2), rows(3)])
    assert joined["input_ids"].tolist() == [[1, 2, 0], [1, 2, 3]]
    assert joined["attention_mask"].tolist() == [[True, True, False], [True, True, True]]
    assert joined["rewards"].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"\['values'\]"):
        B.pad_and_concat([rows(2), rows(2) | {"values": torch.zeros(1, 2)}])


def with_pictures(*pictures_of_rows):
    """Add to a row for each list one picture a name, whose file has the bytes of its name."""
    names = [name for row in pictures_of_rows for name in row]
    units = [ord(name[0]) % 3 for name in names]
    return rows(*[2 + i for i in range(len(pictures_of_rows))]) | {
        "image_count": torch.tensor([len(row) for row in pictures_of_rows], dtype=torch.int32),
        "image_bytes": torch.tensor([len(name) for name in names], dtype=torch.int32),
        "image_data": torch.tensor(list("".join(names).encode()), dtype=torch.uint8),
        "image_units": torch.tensor(units, dtype=torch.int32),
        "image_grid_thw": torch.tensor([[1, 1, n] for n in units], dtype=torch.int32).reshape(-1, 3),
        "pixel_values": torch.tensor(
            [[ord(name[0]), i] for name, n in zip(names, units, strict=True) for i in range(n)],
            dtype=torch.float32,
        ).reshape(-1, 2),
    }


PICTURES = st.lists(st.lists(st.text("abcdef", min_size=1, max_size=5), max_size=3), min_size=1, max_size=6)


@given(PICTURES, st.data())
def test_pictures_are_selected_with_their_rows(pictures, data):
    chosen = data.draw(st.lists(st.integers(0, len(pictures) - 1), max_size=8))
    selected = B.select_rows(with_pictures(*pictures), chosen)
    expected = with_pictures(*[pictures[i] for i in chosen])
    keys = {"image_count", *B.PER_IMAGE, *B.PER_ENTRY}
    assert_same({key: selected[key] for key in keys}, {key: expected[key] for key in keys})


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 3))
def test_unpack_undoes_pack_at_any_width(lengths, extra):
    batch = B.pad_and_concat([rows(*lengths)])
    batch = {k: B._widen(k, t, max(lengths) + extra) for k, t in batch.items()}
    assert_same(
        B.unpack(B.pack(batch), max(lengths) + extra), {"attention_mask": batch["attention_mask"]} | batch
    )


def test_canonical_order_is_by_prompt_then_sample_and_refuses_rows_that_share_a_name():
    batch = rows(1, 2, 3, prompt_ids=[7, 3, 3])
    batch["sample_id"] = torch.tensor([0, 1, 0], dtype=torch.int32)
    assert B.sort_canonical(batch)["rewards"].tolist() == [2.0, 1.0, 0.0]
    with pytest.raises(ValueError, match=r"\(3, 0\)"):
        B.sort_canonical(rows(1, 1, prompt_ids=[3, 3]))


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
