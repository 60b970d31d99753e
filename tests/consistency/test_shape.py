"""Onset and shape of |D|, and the share of it that the token id explains."""

import numpy as np
import pytest

from consistency.alternatives.probes import noise_of_model
from consistency.case import NOISE, Alternative
from consistency.checks.shape import breaks, explained_by_key, onset, trend
from consistency.transforms import Replays

from .tables import table_of

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


def test_each_sequence_is_cut_where_it_goes_wrong():
    engine = np.full((2, 40), -3.0)
    trainer = engine.copy()
    trainer[0, 12:] += 1.0
    trainer[1, 30:] += 1.0
    found = breaks(table_of(trainer, engine))
    assert found.before_count.tolist() == [12, 30]
    assert found.place.tolist() == [13, 31]  # one token of prompt
    assert found.before.tolist() == [0.0, 0.0]
    assert found.after_median.tolist() == [1.0, 1.0]


def test_share_explained_by_a_key_is_evaluated_on_held_out_tokens():
    keys = RNG.integers(0, 50, 4000)
    of_key, noise = np.tile([1.0, -1.0], 25)[keys], RNG.normal(0, 1, 4000)
    assert explained_by_key(keys, of_key) == pytest.approx(1.0)
    assert explained_by_key(keys, of_key + noise) == pytest.approx(0.5, abs=0.1)
    assert abs(explained_by_key(keys, noise)) < 0.1


@pytest.mark.parametrize(("moves", "mean_abs"), [(0.05, 0.08), (0.005, 0.02)])
def test_noise_floor_is_the_published_one_or_that_of_the_model(moves, mean_abs):
    base = np.full(100, -2.0)
    replays = Replays(np.arange(1), np.arange(100), base, base, base * 0, base, ())
    other = Alternative("R38", "scoring in float32", base + moves * np.tile([1, -1], 50))
    assert noise_of_model(NOISE["bfloat16"], other, replays).mean_abs == pytest.approx(mean_abs)
    assert noise_of_model(NOISE["float32"], other, replays) == NOISE["float32"]
