"""A recorded run that computed with given experts and their weights, and its replay to the bit."""

from dataclasses import replace

import torch

from areal_core.testing import make_tiny_family
from replayer.crosscheck.opinions import crosscheck
from replayer.crosscheck.step_rows import from_json, read_rows, to_json
from replayer.goto import goto

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


def test_a_run_with_given_experts_and_weights_replays_to_the_same_bits(record_run, weights_of, tmp_path):
    options = {"vocab_size": 105, "mlp_only_layers": [], "num_experts": NUM_EXPERTS}
    model = make_tiny_family(tmp_path / "model", "qwen3_moe", **options)
    options = {"rollout__return_routed_experts": True, "rollout__return_routed_weights": True}
    run = record_run(tmp_path / "run", model, 2, add_experts, **options)
    assert run.record.step(1).batch(0)["routed_experts"].dtype == "int32"
    other = record_run(tmp_path / "other", model, 2)
    assert other.weights[1] != run.weights[1]
    rows = from_json(to_json(read_rows(run.record, 0)))
    (found,) = crosscheck(rows, ("float64",)).opinions
    stages = {stage.stage: stage.verdict for stage in found.stages}
    assert [stages[name] for name in ("loss", "gradient")] == ["equal", "equal"]
    (found,) = crosscheck(replace(rows, experts=None), ("float64",)).opinions  # by the model's own experts
    assert {stage.stage: stage.verdict for stage in found.stages}["loss"] == "differs"
    seen = []
    report = goto(run.path, 1, lambda scene: seen.append(weights_of(scene.trainer)))
    assert seen == [run.weights[1]]
    assert report.faithful
