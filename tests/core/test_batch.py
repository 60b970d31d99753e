import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_core.data import batch as B


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


def test_concat_pads_with_zeros_to_the_longest():
    joined = B.pad_and_concat([rows(2), rows(3)])
    assert joined["input_ids"].tolist() == [[1, 2, 0], [1, 2, 3]]
    assert joined["attention_mask"].tolist() == [[True, True, False], [True, True, True]]
    assert joined["rewards"].tolist() == [0.0, 0.0]


def test_concat_names_the_keys_that_are_not_in_all():
    other = rows(2) | {"values": torch.zeros(1, 2)}
    with pytest.raises(ValueError, match=r"\['values'\]"):
        B.pad_and_concat([rows(2), other])


def test_pack_keeps_real_tokens_in_order():
    flat = B.pack(rows(2, 3))
    assert flat["input_ids"].tolist() == [1, 2, 11, 12, 13]
    assert flat["cu_seqlens"].tolist() == [0, 2, 5]
    assert flat["rewards"].tolist() == [0.0, 1.0]
    assert "attention_mask" not in flat


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


def assert_same_pictures(batch, expected):
    keys = {"image_count", *B.PER_IMAGE, *B.PER_ENTRY}
    assert_same({key: batch[key] for key in keys}, {key: expected[key] for key in keys})


PICTURES = st.lists(st.lists(st.text("abcdef", min_size=1, max_size=5), max_size=3), min_size=1, max_size=6)


@given(PICTURES, st.data())
def test_pictures_are_selected_with_their_rows(pictures, data):
    chosen = data.draw(st.lists(st.integers(0, len(pictures) - 1), max_size=8))
    selected = B.select_rows(with_pictures(*pictures), chosen)
    assert_same_pictures(selected, with_pictures(*[pictures[i] for i in chosen]))


@given(PICTURES, PICTURES)
def test_pictures_are_concatenated_with_their_rows(left, right):
    joined = B.pad_and_concat([with_pictures(*left), with_pictures(*right)])
    assert_same_pictures(joined, with_pictures(*left, *right))


@given(PICTURES)
def test_pictures_are_not_packed(pictures):
    batch = with_pictures(*pictures)
    assert_same_pictures(B.pack(batch), batch)
    assert_same_pictures(B.unpack(B.pack(batch)), batch)


def test_bytes_of_rows_follow_their_rows():
    batch = rows(2, 3, 1) | {
        "calls_bytes": torch.tensor([2, 0, 3], dtype=torch.int32),
        "calls_data": torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8),
    }
    joined = B.pad_and_concat([batch, batch])
    selected = B.select_rows(joined, [2, 4, 3])
    assert selected["calls_bytes"].tolist() == [3, 0, 2]
    assert selected["calls_data"].tolist() == [3, 4, 5, 1, 2]
    assert_same(B.unpack(B.pack(selected)), selected)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 3))
def test_unpack_undoes_pack_at_any_width(lengths, extra):
    batch = B.pad_and_concat([rows(*lengths)])
    batch = {k: B._widen(k, t, max(lengths) + extra) for k, t in batch.items()}
    assert_same(
        B.unpack(B.pack(batch), max(lengths) + extra), {"attention_mask": batch["attention_mask"]} | batch
    )


def test_canonical_order_is_by_prompt_then_sample():
    batch = rows(1, 2, 3, prompt_ids=[7, 3, 3])
    batch["sample_id"] = torch.tensor([0, 1, 0], dtype=torch.int32)
    assert B.sort_canonical(batch)["rewards"].tolist() == [2.0, 1.0, 0.0]


def test_canonical_order_refuses_rows_that_share_a_name():
    with pytest.raises(ValueError, match=r"\(3, 0\)"):
        B.sort_canonical(rows(1, 1, prompt_ids=[3, 3]))


def test_selected_rows_are_trimmed_to_their_longest():
    assert B.select_rows(rows(1, 4, 2), [2, 0])["input_ids"].tolist() == [[21, 22], [1, 0]]


def test_first_fit_decreasing_matches_a_literal_result():
    # 6, 5 and 4 open a group each, as no two of them fit into 8. 2 fits each, all have one member:
    # 4 is the smallest sum. 1 joins 5, the smaller of the two groups that still have one member.
    assert B.first_fit_decreasing([6, 5, 4, 2, 1], capacity=8) == [[0], [1, 4], [2, 3]]


def test_a_sequence_longer_than_a_micro_batch_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"90 tokens .* of 64"):
        B.first_fit_decreasing([10, 90], capacity=64)


def test_ranks_get_the_same_number_of_micro_batches():
    groups = B.split_rows([3, 3], max_tokens=6, agree_on_max=lambda count: max(count, 3))
    assert groups == [[0, 1], [], []]
