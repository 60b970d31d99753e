"""Metrics: literal numbers computed manually, identities for any input, bad input excluded."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from consistency.checks.numerics import heavy_tail
from consistency.measure import measure, tail
from consistency.tokens import Excluded

from .tables import table_of

LN2 = math.log(2)


@pytest.fixture(scope="module")
def metrics():
    # D = ln 2, -ln 2 | 0, 0
    return measure(table_of([[-1.0, -1.0 - LN2], [-2.0, -3.0]], [[-1.0 - LN2, -1.0], [-2.0, -3.0]])).metrics


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mean_abs", LN2 / 2),
        ("p50_abs", LN2 / 2),
        ("max_abs", LN2),
        ("mean", 0.0),
        ("rmse", LN2 / math.sqrt(2)),
        ("share_positive", 0.25),
        ("share_zero", 0.5),
        ("k1", 0.0),
        ("k2", LN2**2 / 4),
        ("k3", 0.125),  # (2 - 1 - ln 2 + 1/2 - 1 + ln 2) / 4
        ("reverse_k3", 0.125),
        ("ratio_mean", 1.125),
        ("ratio_max", 2.0),
        ("chi2_token", 0.5625),  # (4 + 1/4 + 1 + 1) / 4 - 1
        ("ess_token", 1.125**2 / 1.5625),
        ("mult_prob_error_mean", 1.5),
        ("share_outside_eps_0.2", 0.5),
        ("geometric_ratio_mean", 1.0),
        ("chi2_sequence", 0.0),
        ("ess_sequence", 1.0),
        ("log_ppl_diff", 0.0),
        ("kurtosis", 2.0),
        ("ppl_trainer", math.exp((7 + LN2) / 4)),
    ],
)
def test_metric_of_four_tokens_is_the_number_computed_manually(metrics, name, value):
    assert metrics[name] == pytest.approx(value, abs=1e-12)


def test_bad_logprobs_are_counted_by_name_and_not_averaged():
    engine = [[-1.0, math.nan, -math.inf, -9999.0, 0.5, -2.0, -3.0]]
    table = table_of([[-1.0, -1.0, -1.0, -1.0, -1.0, -2.0, math.nan]], engine)
    assert (table.excluded, table.excluded.num_tokens) == (Excluded(1, 2, 1, 1), 5)
    assert table.position.tolist() == [1, 6]
    assert measure(table).metrics["mean_abs"] == 0.0


def test_engines_of_different_noise_have_no_tail_together():
    random = np.random.default_rng(1)
    precise, coarse = 1e-6 * random.standard_normal((20, 24)), 0.03 * random.standard_t(2.5, (20, 24))
    few = precise.copy()
    few[::2, 5] = 1.0

    def found(rows):
        table = table_of(rows * 0 - 2.0, rows - 2.0, worker=np.arange(len(rows)) % 2)
        setting = SimpleNamespace(has_experts=False)
        facts = {"explanation": None, "is_of_flips": False, "level": 0.02, "mean_abs": 0.1}
        return heavy_tail(SimpleNamespace(**facts, setting=setting, table=table, measurement=measure(table)))

    both = np.stack([precise, coarse], 1).reshape(40, 24)
    together = tail(both.ravel())
    assert min(together["kurtosis"], together["p99_over_p50"]) > 20
    assert found(both) is None
    assert found(np.stack([precise, few], 1).reshape(40, 24)).id == "R42"
