"""A reader written from FORMAT.md alone reads plans, losses, RNG states and checksums."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from replayer.goto import goto
from tests.recorder.document_reader import parameter_checksum, read_by_the_document, read_results, read_rng


def test_plans_and_outcomes_of_a_trained_record_are_read_and_agree(tiny_run):
    for step, arrays in read_by_the_document(Path(tiny_run.path)):
        plan, outcome, text = read_results(Path(tiny_run.path) / "steps" / f"{step['step']:06d}", 0, 1)
        assert (plan["step"], plan["version"] + 1, outcome["version"]) == (
            step["step"],
            step["version"],
            step["version"],
        )
        division = [
            rows for minibatch in plan["details"]["minibatches"] for rows in minibatch["micro_batches"]
        ]
        assert [micro_batch["rows"] for micro_batch in outcome["micro_batches"]] == division
        for number, minibatch in enumerate(plan["details"]["minibatches"]):
            taken = [item for item in outcome["micro_batches"] if item["minibatch"] == number]
            assert sorted(row for item in taken for row in item["rows"]) == sorted(minibatch["rows"])
            assert sum(item["weight"] for item in taken) == minibatch["loss_denominator"]
            loss = sum(item["loss"] for item in taken) / minibatch["loss_denominator"]
            assert loss == pytest.approx(float.fromhex(minibatch["loss"]), rel=1e-6)
        assert outcome["stats"]["ppo_actor/update/lr"] == float.fromhex(minibatch["lr"])
        rewards = arrays["batch-00000-of-00001.safetensors", "rewards"].tolist()
        assert [line["reward"] for line in text] == rewards
        assert [line["row"] for line in text] == list(range(len(rewards)))


def test_generator_states_of_a_trained_record_continue_as_the_run_did(tiny_run):
    recorded = tiny_run.record.step(3).plan(0)
    states = read_rng(recorded.rng)
    seen = {}

    def look(scene):
        seen["torch"] = torch.rand(3).tolist()
        seen["numpy"] = np.random.rand(3).tolist()
        seen["python"] = random.random()

    goto(tiny_run.path, 3, look)
    torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    assert seen == {
        "torch": torch.rand(3).tolist(),
        "numpy": np.random.rand(3).tolist(),
        "python": random.random(),
    }


def test_parameter_checksums_are_those_of_the_weights_after_the_step(tiny_run):
    weights = {}
    goto(
        tiny_run.path,
        5,
        lambda scene: weights.update(
            {name: tensor.numpy().copy() for name, tensor in scene.trainer.actor.named_full_tensors()}
        ),
    )
    outcome = json.loads((Path(tiny_run.path) / "steps/000004/outcome-00000-of-00001.json").read_text())
    assert {name: parameter_checksum(array) for name, array in weights.items()} == outcome["checksums"]
