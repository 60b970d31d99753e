"""A recorded run that trained an adapter: its anchors, its checksums, and its replay to the bit."""

from itertools import pairwise

import pytest

from areal_core.engine.lora import trained_parameters
from replayer.goto import goto

ADAPTER = {"actor__use_lora": True, "actor__lora_rank": 4, "actor__kl_ctl": 0.1}


@pytest.fixture(scope="module")
def adapted_run(tmp_path_factory, tiny_model, record_run):
    """Five steps with an anchor before step 3, against the base model."""
    reference = {"ref": {"path": str(tiny_model), "dtype": "float32", "mb_spec": {"max_tokens_per_mb": 64}}}
    folder = tmp_path_factory.mktemp("adapted")
    return record_run(folder, tiny_model, 5, debug__anchor_every_steps=3, **ADAPTER, **reference)


def test_a_step_has_the_checksum_of_each_tensor_of_the_adapter_and_of_nothing_else(adapted_run):
    outcomes = [adapted_run.record.step(step).outcome(0).checksums for step in range(5)]
    assert len(outcomes[0]) == 28
    assert all(".lora_A." in name or ".lora_B." in name for name in outcomes[0])
    for before, after in pairwise(outcomes):
        assert all(before[name] != after[name] for name in before)


@pytest.mark.parametrize(
    ("step", "anchor", "replayed"), [pytest.param(2, None, 2, marks=pytest.mark.long), (4, 3, 1)]
)
def test_the_run_replays_to_the_same_bits(adapted_run, weights_of, step, anchor, replayed):
    seen = []

    def look(scene):
        trainer = scene.trainer
        seen.append(
            (
                weights_of(trainer),
                type(trainer.reference).__name__,
                len(trained_parameters(trainer.actor.model)),
            )
        )

    report = goto(adapted_run.path, step, look)
    assert seen == [(adapted_run.weights[step], "BaseReference", 28)]
    assert (report.anchor, len(report.replayed), report.faithful) == (anchor, replayed, True)
    assert report.num_parameters == 28
