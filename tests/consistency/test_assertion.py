"""`assert_consistent` passes on a healthy record, and its failure names cause, gate and command."""

import functools

import pytest

from consistency import transforms
from consistency.report import assert_consistent

from .records import save_model, write_record


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), seed=0)


def test_healthy_record_passes_and_is_returned(model, tmp_path):
    record = write_record(tmp_path / "record", model)
    assert assert_consistent(record, gate="mean_abs=0.02").diagnosis.verdict == "healthy"


def test_failure_names_cause_gate_and_command(model, tmp_path):
    transform = functools.partial(transforms.at_temperature, temperature=0.7)
    record = write_record(tmp_path / "record", model, draws=transform, reports=transform)
    with pytest.raises(AssertionError) as failed:
        assert_consistent(record, str(model), gate="mean_abs=0.02")
    message = str(failed.value)
    assert message.startswith("mismatch: temperature differs (R01), mean |D| ")
    assert "the engine's logprobs are of temperature 0.7" in message
    assert "gate mean_abs <= 0.02 does not hold" in message
    assert message.endswith(f"for the full report run: areal-debug consistency {record}")
