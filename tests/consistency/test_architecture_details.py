"""An engine that computes a detail of the architecture otherwise is named, whatever the family."""

import json
import shutil
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from benchmarks import model_families as families
from consistency.alternatives import variants
from consistency.alternatives.variants import permuted_experts, variant_alternatives
from consistency.score import load_scorer, score_logprobs
from consistency.tokens import Completion, sequences_from_completions

LOCAL = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
ROPE = {"rope_parameters": {"sliding_attention": LOCAL, "full_attention": LINEAR}}


def in_another_order(model):
    for number, layer in enumerate(model.model.layers):
        order = torch.tensor([3, 1, 0, 2] if number else [1, 0, 2, 3])
        for tensor in layer.mlp.experts.parameters(recurse=False):
            tensor.data = tensor.data[order]


@pytest.mark.parametrize(
    ("family", "options", "name"),
    [
        ("granite", {"residual_multiplier": 1.0}, "residual_multiplier of GraniteDecoderLayer left out"),
        ("deepseek_v3", {"routed_scaling_factor": 6.25}, "routed_scaling_factor of DeepseekV3TopkRouter"),
        ("gemma3_text", {"query_pre_attn_scalar": 9}, "scaling of Gemma3Attention times 1.33"),
        ("mistral", {"sliding_window": 9}, "a window one token wider"),
        ("gpt_neox", {"use_parallel_residual": False}, "attention beside the MLP, or before it"),
        ("gemma3_text", ROPE, "positions of full_attention layers divided by 8"),
        ("olmo2", {}, "q_norm and k_norm over each of 2 ranks alone"),
        ("qwen2_moe", {}, "the shared expert without its gate"),
        ("gpt_oss", {}, "model.layers.*.self_attn.sinks zero"),
        ("deepseek_v3", {}, "model.layers.*.mlp.gate.e_score_correction_bias zero"),
        ("qwen3", {}, "layers 0 to 1 with the weights of layers 2 to 3"),
        ("qwen3_moe", {}, "in another order, such as [1, 0, 2, 3] in the first"),
    ],
)  # fmt: skip
def test_a_detail_that_differs_is_named(family, options, name, tmp_path, monkeypatch):
    monkeypatch.setattr(variants, "TOKENS_TO_SCREEN", 64)
    families.write_tiny(family, str(tmp_path / "tiny"))
    for side, changed in (("model", {}), ("engine", options)):
        config = shutil.copytree(tmp_path / "tiny", tmp_path / side) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    engine, trainer = (load_scorer(str(tmp_path / side)) for side in ("engine", "model"))
    ids = np.random.default_rng(0).integers(3, 103, (12, 40))
    rows = sequences_from_completions([Completion(row[:8], row[8:], np.zeros(32)) for row in ids])
    planted = [one for one in variants.variants_of(engine.model) if not options and one.name == name]
    if "order" in name:
        in_another_order(engine.model)
    with ExitStack() as stack:
        for one in planted:
            stack.enter_context(one.applied())
        rows.engine_logprobs[rows.scored] = score_logprobs(engine, rows)
    search = permuted_experts if "order" in name else variant_alternatives
    assert name in search(trainer, rows, 1.0)[0].name
