"""The first layer and operator of an engine that computes something else, created or inherited."""

import pytest
import torch

from areal_core.engine.model import own_attention, set_attention
from benchmarks import layer_faults
from consistency.layers.hooks import Site
from consistency.layers.judge import LIMIT, compare_layers, reference_of, run
from consistency.layers.observed import Row, observe, own_forward

ROWS = [
    Row(torch.randint(5, 103, (length,), generator=torch.Generator().manual_seed(length)).tolist())
    for length in (24, 17)
]
# One of each kind; benchmarks/layers.py has all of them, in both dtypes.
KINDS = (
    "rope base 10000 -> 11000",
    "norm eps 1e-6 -> 1e-5",
    "k norm dropped in layer 1",
    "soft cap of attention 2 -> 3",
    "soft cap of logits 5 -> 30",
    "sliding window one too long",
    "router top-k 2 -> 3",
    "two experts exchanged",
    "down weights of layer 0",
    "stale layer",
    "adapter missing in layer 1",
    "values in float8",
    "gate and up exchanged in layer 1",
    "exact gelu for tanh in layer 1",
    "output bias missing",
    "head not tied",
    "rows of the embedding",
    "residual of the norm",
)
EVERYDAY = KINDS[::2]


def fault_of(name):
    return next(fault for fault in layer_faults.FAULTS if fault.name == name)


def observed(engine, **options):
    inner = engine.get_base_model() if hasattr(engine, "get_base_model") else engine
    set_attention(inner, own_attention(inner))
    return observe("engine", engine, own_forward(engine), ROWS, **options)


def report_of(fault, dtype=torch.float32):
    model, engine = fault.sides(dtype)
    with fault.running():
        values = observed(engine)
    return compare_layers(reference_of(model), values, ROWS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in EVERYDAY)) for name in KINDS]
)
def test_layer_and_operator_of_a_planted_fault_are_named(name):
    fault = fault_of(name)
    first = report_of(fault).first
    assert first is not None
    assert (first.site.layer, first.operator) == (fault.layer, fault.operator)


def test_a_gap_is_created_once_and_inherited_afterwards():
    report = report_of(fault_of("v weights of layer 1"))
    created = [site.site for site in report.sites if site.is_created]
    inherited = [site.site for site in report.sites if site.is_inherited]
    assert created == [Site("v", 1)]
    assert inherited[0] == Site("cache_v", 1)
    assert Site("logits") in inherited
    assert Site("residual", 0) not in inherited


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3_moe", torch.float32),
        ("gemma3_text", torch.bfloat16),
        pytest.param("qwen3_moe", torch.bfloat16, marks=pytest.mark.long),
        pytest.param("gemma3_text", torch.float32, marks=pytest.mark.long),
    ],
)
def test_other_kernels_of_the_same_model_are_healthy(family, dtype):
    model, engine = (layer_faults.make_model(family, dtype) for _ in range(2))
    report = compare_layers(reference_of(model), observed(engine, prefill=0.5, step=5), ROWS)
    assert (report.verdict, report.only_reference) == ("healthy", ())
    assert max(site.ratio for site in report.sites) < LIMIT / 1.5


def test_an_operator_is_fed_with_the_engines_values():
    model = layer_faults.make_model("llama")
    values = observed(model).rows[0]
    doubled = Site("input_norm", 1)
    values.values[doubled] = 2 * values.values[doubled]
    plain, forced = run(model, ROWS[0], None), run(model, ROWS[0], values)
    torch.testing.assert_close(forced[doubled], plain[doubled])  # what the model's own norm computes
    bias = model.model.layers[1].self_attn.q_proj.bias
    q = Site("q", 1)
    torch.testing.assert_close(forced[q] - bias, 2 * (plain[q] - bias), rtol=1e-4, atol=1e-5)


def test_results_that_the_engine_does_not_show_are_named_with_the_next_one():
    fault = fault_of("q norm dropped")
    model, engine = fault.sides(torch.float32)
    values = observed(engine)
    for row in values.rows:
        for site in [site for site in row.values if site.result in ("q_norm", "k_norm", "rope_k")]:
            del row.values[site]
    report = compare_layers(reference_of(model), values, ROWS)
    assert report.first.operator == "q norm or k norm or rope"
    assert report.only_reference == ("q_norm", "k_norm", "rope_k")
