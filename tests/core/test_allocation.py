"""Every spelling of an allocation, and the errors of invalid ones."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_core.config import PPOConfig
from areal_core.config.allocation import Allocation, Parallel, parse_allocation
from areal_core.errors import AllocationError


def decoupled(servers: int, ranks: int) -> Allocation:
    return Allocation(Parallel(servers), Parallel(ranks), "sglang", "fsdp", "decoupled")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sglang:d1+fsdp:d2", decoupled(1, 2)),
        ("sglang.d4p1t1+d4p1t1", decoupled(4, 4)),
        ("sglang:d4p1t1+d4p1t1", decoupled(4, 4)),
        ("sglang[rollout]:d2+fsdp[actor]:d4", decoupled(2, 4)),
        ("d4p1t1", Allocation(None, Parallel(4), None, "fsdp", "train_only")),
        ("fsdp:d2", Allocation(None, Parallel(2), None, "fsdp", "train_only")),
        ("sglang:d4", Allocation(Parallel(4), None, "sglang", None, "servers_only")),
        ("sglang:d4t2+eval", Allocation(Parallel(4, 2), None, "sglang", None, "eval")),
        ("sglang:d4+cpu", Allocation(Parallel(4), None, "sglang", None, "eval")),
        ("embedded|eval", Allocation(Parallel(), None, "embedded", None, "eval")),
        ("embedded|fsdp:d2", Allocation(Parallel(2), Parallel(2), "embedded", "fsdp", "colocated")),
        ("fsdp:d2s2t1", Allocation(None, Parallel(2, context=2), None, "fsdp", "train_only")),
        # The engine is in one of the ranks with the same rows, with a complete model.
        (
            "embedded|fsdp:d2c2t2",
            Allocation(Parallel(2), Parallel(2, 2, context=2), "embedded", "fsdp", "colocated"),
        ),
        ("sglang:d2|fsdp:d2", Allocation(Parallel(2), Parallel(2), "sglang", "fsdp", "colocated")),
    ],
)
def test_spelling_is_read(text, expected):
    assert parse_allocation(text) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "found the end at character 1"),
        ("fsdp:d1c2s2", "each letter once, and 's' was given before"),
        ("sglang:d4+", "found the end at character 11, expected sizes"),
        ("sglang:x4", "found 'x4' at character 8, expected servers take d, t and p"),
        ("sglang d4", "found ' ' at character 7, expected ':'"),
        ("sglang:d0", "expected a size of 1 or more"),
        ("sglang:d2d2", "'d' was given before"),
        ("fsdp:d2p2", "p and e need Megatron"),
        ("fsdp:d2+fsdp:d2", "found '+' at character 8, expected the end"),
        ("embedded", "expected '|'"),
        ("vllm:d2c2+fsdp:d2", "found 'c2' at character 8, expected servers take d, t and p"),
        ("sglang:d2+megatron:d2", "megatron at character 11: there is no Megatron engine; use fsdp"),
    ],
)
def test_wrong_allocation_is_refused_with_its_position(text, sentence):
    with pytest.raises(AllocationError) as error:
        parse_allocation(text)
    assert sentence in str(error.value)


@given(st.text(alphabet="sglangfdptce:.+|[]0123456789 ", max_size=24))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(AllocationError):
        assert parse_allocation(text).kind


@pytest.mark.parametrize(
    ("text", "evaluation"),
    [
        ("sglang:d2t2+fsdp:d4", "sglang:d2t2+eval"),
        ("vllm:d2+eval", "vllm:d2+eval"),
        ("sglang:d2|fsdp:d2", "sglang:d2+eval"),
        ("embedded|fsdp:d4c2", "embedded|eval"),
    ],
)
def test_an_evaluation_has_the_engine_of_the_training_and_one_process(text, evaluation):
    found = parse_allocation(text).for_evaluation(samples=True)
    assert str(found) == evaluation
    assert parse_allocation(evaluation) == found
    assert found.num_ranks == 1
    assert PPOConfig(allocation_mode=evaluation).allocation == found


def test_two_spellings_that_disagree_are_refused():
    config = PPOConfig(allocation_mode="sglang:d1+fsdp:d2")
    config.rollout.backend, config.actor.backend = "sglang:d1", "fsdp:d4"
    with pytest.raises(AllocationError, match=r"sglang:d1\+fsdp:d2.*fsdp:d4.*keep one"):
        _ = config.allocation
