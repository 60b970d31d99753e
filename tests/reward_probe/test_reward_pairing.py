"""Rewards that belong to other rows are recognised, and a function that differs is not excused."""

import numpy as np
import pytest

from areal_debug.reward.pairing import find_pairing

GROUPS = np.repeat(np.arange(12), 4)
RIGHT = np.random.default_rng(3).integers(0, 2, 48).astype(float)


def inserted(places):
    values = list(RIGHT)
    for place in places:
        values.insert(place, 0.0)
    return np.array(values[:48])


@pytest.mark.parametrize(
    ("recorded", "first_row", "says"),
    [
        (inserted([10]), 10, "the row 1 before it (1 values too many"),
        (inserted([10, 25, 31]), 10, "the row 3 before it (3 values too many"),
        (np.append(np.delete(RIGHT, 20), 0.0), 20, "the row 1 after it (1 values are missing"),
        (RIGHT[::-1].copy(), 0, "in the reverse order"),
        (RIGHT.reshape(-1, 4).T.ravel(), 1, "in the order of samples"),
    ],
)  # fmt: skip
def test_a_wrong_pairing_is_named(recorded, first_row, says):
    found = find_pairing(5, recorded, RIGHT, GROUPS)
    assert found is not None
    assert (found.step, found.agree > found.before) == (5, True)
    assert abs(found.first_row - first_row) <= 3
    assert says in found.sentence


def test_equal_and_unrelated_rewards_have_no_pairing():
    assert find_pairing(0, RIGHT, RIGHT, GROUPS) is None
    assert find_pairing(0, np.zeros(48), RIGHT, GROUPS) is None
    for seed in range(20):
        other = np.random.default_rng(100 + seed).integers(0, 2, 48).astype(float)
        assert find_pairing(0, other, RIGHT, GROUPS) is None
        strict = np.where(np.random.default_rng(seed).random(48) < 0.3, 0.0, RIGHT)
        assert find_pairing(0, strict, RIGHT, GROUPS) is None
