"""Medians of windows of any width, as NumPy computes them one by one, in time that n allows."""

import numpy as np
import pytest

from areal_debug.doctor.series import Series, medians_between, running_medians
from areal_debug.doctor.sources.to_series import collect


@pytest.mark.parametrize(("count", "width"), [(1, 1), (2, 2), (9, 4), (64, 31), (100, 100), (257, 10)])
def test_running_medians_are_those_of_numpy(count, width):
    generator = np.random.default_rng(count)
    for values in (generator.normal(size=count), generator.integers(0, 3, count).astype(float)):
        windows = np.lib.stride_tricks.sliding_window_view(values, width)
        assert running_medians(values, width).tolist() == np.median(windows, axis=1).tolist()
        ends = np.sort(generator.integers(0, count + 1, (2, 50)), axis=0)
        expected = [np.median(values[a:b]) if a < b else np.nan for a, b in ends.T]
        np.testing.assert_array_equal(medians_between(values, *ends), expected)


def test_the_last_value_of_a_step_counts_in_any_order():
    rows = [{"step": step, "x": value} for step, value in ((3, 1.0), (1, 2.0), (3, 4.0), (2, float("nan")))]
    found = collect(rows)["x"]
    assert isinstance(found, Series)
    assert (found.steps.tolist(), found.values[[0, 2]].tolist()) == ([1, 2, 3], [2.0, 4.0])
