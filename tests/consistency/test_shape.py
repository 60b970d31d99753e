"""Onset and shape of |D|, and the share of it that the token id explains."""

import numpy as np
import pytest

from consistency.checks.shape import explained_by_key, onset, trend

RNG = np.random.default_rng(0)
POSITION = np.tile(np.arange(100), 40)
NOISE_SIZE = np.abs(RNG.normal(0, 0.01, len(POSITION)))


def test_a_ramp_is_a_line_and_a_jump_is_a_step():
    ramp = trend(POSITION, NOISE_SIZE + 0.01 * POSITION)
    jump = trend(POSITION, NOISE_SIZE + 1.0 * (POSITION >= 50))
    assert ramp.line > 0.99 > ramp.step
    assert jump.step > 0.99 > jump.line
    assert jump.step_place == pytest.approx(50, abs=3)
    assert (ramp.first < 0.2, ramp.last > 0.8) == (True, True)


def test_onset_is_the_first_bad_position_after_clean_ones():
    assert onset(POSITION, NOISE_SIZE + 0.5 * (POSITION >= 64), 0.02) == 64
    assert onset(POSITION, NOISE_SIZE, 0.02) is None
    assert onset(POSITION, NOISE_SIZE + 0.5, 0.02) is None


def test_share_explained_by_a_key_is_evaluated_on_held_out_tokens():
    keys = RNG.integers(0, 50, 4000)
    of_key, noise = np.tile([1.0, -1.0], 25)[keys], RNG.normal(0, 1, 4000)
    assert explained_by_key(keys, of_key) == pytest.approx(1.0)
    assert explained_by_key(keys, of_key + noise) == pytest.approx(0.5, abs=0.1)
    assert abs(explained_by_key(keys, noise)) < 0.1
