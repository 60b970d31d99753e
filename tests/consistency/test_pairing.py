"""Rows have other rows' log-probs, or numbers of their own, only where they fit better than by chance."""

from types import SimpleNamespace

import numpy as np
import pytest

from consistency.diagnose import forbidden_until_drawn, from_a_place, mispaired_rows, shifted, with_derived
from consistency.transforms import Prediction, Replays

NUM_ROWS = 64


def rows_of(num_tokens, seed):
    random = np.random.default_rng(seed)
    return -random.exponential(size=(NUM_ROWS, num_tokens)), np.repeat(np.arange(NUM_ROWS), num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 16])
def test_rows_with_other_logprobs_of_the_same_law_are_not_paired(num_tokens):
    engine, row = rows_of(num_tokens, 0)
    base, _ = rows_of(num_tokens, 1)
    found = mispaired_rows(engine.ravel(), base.ravel(), row)
    assert found.parameter == 0
    assert np.array_equal(found.logprobs, base.ravel())


@pytest.mark.parametrize(("num_tokens", "noise"), [(2, 1e-6), (3, 0.005), (16, 0.02)])
def test_exchanged_rows_are_paired(num_tokens, noise):
    base, row = rows_of(num_tokens, 0)
    random = np.random.default_rng(2)
    engine = np.roll(base, 5, axis=0) + noise * random.standard_normal(base.shape)
    found = mispaired_rows(engine.ravel(), base.ravel(), row)
    assert found.parameter == 1
    assert np.abs(found.logprobs - engine.ravel()).max() < 6 * noise


def test_a_token_that_is_far_off_in_many_rows_is_no_shift():
    base, row = rows_of(8, 0)
    engine = base.copy()
    engine[::2, 6] = base[::2, 7]
    later = shifted(base.ravel(), row, 1)
    assert np.array_equal(from_a_place(engine.ravel(), base.ravel(), later, 1, row).logprobs, base.ravel())


def test_eos_may_be_forbidden_up_to_its_first_place_in_any_row():
    everywhere = Prediction("R06", "EOS forbidden", 0.0, np.array([-0.9, -0.9, -0.9, -0.9, -np.inf, -0.9]))
    found = forbidden_until_drawn(np.full(6, -1.0), everywhere, np.tile([0, 1, 2], 2))
    assert (found.parameter, found.logprobs.tolist()) == (1.0, [-0.9, -1.0, -1.0, -0.9, -1.0, -1.0])


def test_answers_of_few_kinds_that_an_engine_finds_likelier_are_not_paired():
    random = np.random.default_rng(0)
    kinds = np.array([[-0.1, -0.01], [-0.6, -0.02], [-1.9, -0.4], [-4.2, -0.05]])
    base = kinds[random.choice(4, NUM_ROWS)] - 0.02 * random.random((NUM_ROWS, 2))
    engine = kinds[random.choice(2, NUM_ROWS)] - 0.02 * random.random((NUM_ROWS, 2))
    row = np.repeat(np.arange(NUM_ROWS), 2)
    assert mispaired_rows(engine.ravel(), base.ravel(), row).parameter == 0


def test_a_number_of_its_own_for_each_row_explains_nothing_where_other_rows_stay_wrong():
    base, row = rows_of(8, 0)
    engine = base.copy()
    engine[:, 0] -= np.where(np.arange(NUM_ROWS) % 2, 0.1, -0.1) * np.arange(NUM_ROWS)
    tried = tuple(
        Prediction("R05", "penalty", by, (base - 0.1 * by * (np.arange(8) == 0)).ravel())
        for by in range(NUM_ROWS)
    )
    rows, at = SimpleNamespace(row_of_token=row, scored=np.arange(len(row))), np.arange(len(row))
    found = with_derived(Replays(at, at, engine.ravel(), base.ravel(), tried), rows)
    assert not [one for one in found.predictions if one.rows]
