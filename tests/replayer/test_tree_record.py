"""Recorded runs with trees, an adapter, or given experts: what is recorded, and the replay to the bit."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from areal_core.engine.lora import trained_parameters
from areal_core.testing import make_tiny_family
from replayer.crosscheck.opinions import crosscheck
from replayer.crosscheck.step_rows import read_confined
from replayer.goto import goto

from .conftest import digest_weights, train_and_record

MODEL = {"dtype": "float32", "mb_spec": {"max_tokens_per_mb": 64}, "enable_tree_training": True}
SHARED = 3  # tokens that the samples of a prompt begin with


def share_beginnings(batch, step):
    ids = batch["input_ids"]
    ids[:, :SHARED] = ids[::4, :SHARED].repeat_interleave(4, 0)
    return batch


@pytest.fixture(scope="module")
def tree_run(tmp_path_factory, tiny_model):
    """Three steps with a reference and a critic; an anchor before step 2."""
    others = {"path": str(tiny_model), **MODEL}
    return train_and_record(
        tmp_path_factory.mktemp("tree"),
        tiny_model,
        3,
        share_beginnings,
        debug__anchor_every_steps=2,
        actor__enable_tree_training=True,
        actor__kl_ctl=0.1,
        ref=others,
        critic=others | {"optimizer": {"lr": 1e-3}},
    )


def test_the_plan_has_the_distinct_tokens_of_each_micro_batch(tree_run):
    for step in range(3):
        recorded = tree_run.record.step(step)
        lengths = np.diff(recorded.batch(0)["cu_seqlens"]).tolist()
        details = recorded.plan(0).details
        for minibatch in details["minibatches"] + details["critic"]:
            for rows, computed in zip(minibatch["micro_batches"], minibatch["tree_tokens"], strict=True):
                prompts = len({row // 4 for row in rows})
                tokens = sum(lengths[row] for row in rows)
                # random tokens after the shared ones: hardly ever equal
                assert 0 <= tokens - SHARED * (len(rows) - prompts) - computed <= 2
        assert [len({row // 4 for row in part["rows"]}) for part in details["minibatches"]] == [2, 2]


@pytest.mark.parametrize(("step", "anchor"), [pytest.param(1, None, marks=pytest.mark.long), (2, 2)])
def test_the_run_replays_to_the_same_bits(tree_run, step, anchor):
    seen = []

    def look(scene):
        engines = (scene.trainer.actor, scene.trainer.reference, scene.trainer.critic)
        seen.append((digest_weights(scene.trainer), [engine.shares_prefixes for engine in engines]))

    report = goto(tree_run.path, step, look)
    assert seen == [(tree_run.weights[step], [True, True, True])]
    assert (report.anchor, report.faithful) == (anchor, True)


ADAPTER = {"actor__use_lora": True, "actor__lora_rank": 4, "actor__kl_ctl": 0.1}


@pytest.fixture(scope="module")
def adapted_run(tmp_path_factory, tiny_model):
    """Four steps with an anchor before step 2, against the base model."""
    reference = {"ref": {"path": str(tiny_model), "dtype": "float32", "mb_spec": {"max_tokens_per_mb": 64}}}
    folder = tmp_path_factory.mktemp("adapted")
    return train_and_record(folder, tiny_model, 4, debug__anchor_every_steps=2, **ADAPTER, **reference)


def test_a_step_has_the_checksum_of_each_tensor_of_the_adapter_and_of_nothing_else(adapted_run):
    outcomes = [adapted_run.record.step(step).outcome(0).checksums for step in range(4)]
    assert len(outcomes[0]) == 28
    assert all(".lora_A." in name or ".lora_B." in name for name in outcomes[0])
    for before, after in pairwise(outcomes):
        assert all(before[name] != after[name] for name in before)


@pytest.mark.parametrize(
    ("step", "anchor", "replayed"), [pytest.param(1, None, 1, marks=pytest.mark.long), (3, 2, 1)]
)
def test_the_run_of_an_adapter_replays_to_the_same_bits(adapted_run, step, anchor, replayed):
    seen = []

    def look(scene):
        trainer = scene.trainer
        seen.append(
            (
                digest_weights(trainer),
                type(trainer.reference).__name__,
                len(trained_parameters(trainer.actor.model)),
            )
        )

    report = goto(adapted_run.path, step, look)
    assert seen == [(adapted_run.weights[step], "BaseReference", 28)]
    assert (report.anchor, len(report.replayed), report.faithful) == (anchor, replayed, True)
    assert report.num_parameters == 28


TOP_K, NUM_EXPERTS, NUM_LAYERS = 2, 4, 2


def add_experts(batch, step):
    """Choose experts at random for all tokens but the last of a row, with weights that add to 1."""
    generator = torch.Generator().manual_seed(step)
    shape = (*batch["input_ids"].shape, NUM_LAYERS)
    chosen = torch.rand(*shape, NUM_EXPERTS, generator=generator).topk(TOP_K).indices
    weights = torch.rand(*shape, TOP_K, generator=generator).softmax(-1)
    packed = torch.cat([chosen.int(), weights.view(torch.int32)], -1)
    packed[~batch["attention_mask"].bool()] = 0
    packed[torch.arange(len(packed)), batch["attention_mask"].sum(1) - 1] = -1
    return batch | {"routed_experts": packed}


def test_a_run_with_given_experts_and_weights_replays_to_the_same_bits(tmp_path):
    options = {"vocab_size": 105, "mlp_only_layers": [], "num_experts": NUM_EXPERTS}
    model = make_tiny_family(tmp_path / "model", "qwen3_moe", **options)
    options = {"rollout__return_routed_experts": True, "rollout__return_routed_weights": True}
    run = train_and_record(tmp_path / "run", model, 2, add_experts, **options)
    assert run.record.step(1).batch(0)["routed_experts"].dtype == "int32"
    rows = read_confined(run.path, 0)
    (found,) = crosscheck(rows, ("float64",)).opinions
    stages = {stage.stage: stage.verdict for stage in found.stages}
    assert [stages[name] for name in ("loss", "gradient")] == ["equal", "equal"]
    (found,) = crosscheck(replace(rows, experts=None), ("float64",)).opinions  # by the model's own experts
    assert {stage.stage: stage.verdict for stage in found.stages}["loss"] == "differs"
    seen = []
    report = goto(run.path, 1, lambda scene: seen.append(digest_weights(scene.trainer)))
    assert seen == [run.weights[1]]
    assert report.faithful
