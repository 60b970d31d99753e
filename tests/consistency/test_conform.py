"""Conformance of weight updates: a sound engine passes, each planted fault is named."""

import json
from functools import partial

import pytest

from areal_core.testing import make_tiny_model
from tests.command_line import invoke

from . import unsound_server as unsound

late = partial(pytest.param, marks=pytest.mark.long)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("small"), hidden_size=16, num_heads=2)


def conform(address, model, *options):
    return invoke("consistency", "--conform", "--engine", address, "--model", model, *options)


def test_a_sound_engine_passes_and_keeps_its_weights(small_model):
    with unsound.serving(str(small_model)) as address:
        done = conform(address, small_model)
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith("Conforms: 14 pass")


@pytest.mark.parametrize(
    ("plant", "names", "evidence"),
    [
        (unsound.drops_a_tensor, ("full update, folder", "full update, broadcast"), f"{unsound.DROPPED} as"),
        (unsound.has_two_faults, ("prefix cache", "versions"), ""),
        late(unsound.reports_the_version_before_the_load, ("versions",), "was loaded"),
        late(unsound.keeps_the_prefix_cache, ("prefix cache",), "after, on the cache of the old weights"),
        # An adapter of the same layers is a repeated part, too.
        late(unsound.ignores_a_repeated_part, ("chain, doubled part", "LoRA adapter"), ""),
        late(unsound.keeps_the_first_adapter, ("LoRA adapter",), "first adapter"),
    ],
)
def test_a_fault_is_named(small_model, plant, names, evidence):
    with unsound.serving(str(small_model), plant) as address:
        checks = json.loads(conform(address, small_model, "--json").stdout)["checks"]
    found = {check["name"]: check for check in checks if check["verdict"] == "fail"}
    assert tuple(found) == names
    assert all(evidence in check["held"] + check["evidence"] for check in found.values())


def test_a_wrong_model_is_one_sentence(small_model, model):
    with unsound.serving(str(model)) as address:
        done = conform(address, small_model)
    assert (done.exit_code, "does not hold the weights of" in done.stderr) == (2, True)
