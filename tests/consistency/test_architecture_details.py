"""An engine that computes a detail of the architecture otherwise is named, whatever the family."""

import json
import shutil

import numpy as np
import pytest

from benchmarks import model_families as families
from consistency.alternatives.variants import over_ranks, scored_with, variant_alternatives, variants_of
from consistency.score import load_scorer, score_logprobs
from consistency.tokens import Completion, sequences_from_completions

LOCAL = {"rope_type": "default", "rope_theta": 1e4}
SCALED = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
ROPE = {"sliding_attention": LOCAL, "full_attention": SCALED}
RANKS = {"q_norm": lambda *given: over_ranks(2, *given), "k_norm": lambda *given: over_ranks(2, *given)}


DETAILS = [
    ("granite", {"residual_multiplier": 1.0}, {}, "residual_multiplier of GraniteDecoderLayer left out"),
    ("deepseek_v3", {"routed_scaling_factor": 6.25}, {}, "routed_scaling_factor of DeepseekV3TopkRouter"),
    ("mistral", {"sliding_window": 9}, {}, "a window one token wider"),
    ("gpt_neox", {"use_parallel_residual": False}, {}, "attention beside the MLP, or before it"),
    ("gemma3_text", {"rope_parameters": ROPE}, {}, "positions of full_attention layers divided by 8"),
    ("olmo2", {}, RANKS, "q_norm and k_norm over each of 2 ranks alone"),
    ("qwen2_moe", {}, {"shared_expert_gate": lambda *given: given[-1] + 99}, "without its gate"),
]


def sides(family, options, hooks, tmp_path):
    """Return the trainer, and rows with the log-probs of an engine with the details."""
    families.write_tiny(family, str(tmp_path / "model"))
    config = shutil.copytree(tmp_path / "model", tmp_path / "engine") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | options))
    engine, trainer = (load_scorer(str(tmp_path / side)) for side in ("engine", "model"))
    for path, module in engine.model.named_modules():
        if (hook := hooks.get(path.rpartition(".")[2])) is not None:
            module.register_forward_hook(hook, with_kwargs=True)
    ids = np.random.default_rng(0).integers(3, 103, (12, 40))
    rows = sequences_from_completions([Completion(row[:8], row[8:], np.zeros(32)) for row in ids])
    rows.engine_logprobs[rows.scored] = score_logprobs(engine, rows)
    return trainer, rows


@pytest.mark.parametrize(("family", "options", "hooks", "name"), DETAILS)
def test_a_variant_with_the_name_of_the_detail_computes_what_the_engine_does(
    family, options, hooks, name, tmp_path
):
    trainer, rows = sides(family, options, hooks, tmp_path)
    engine = rows.engine_logprobs[rows.scored]
    assert np.abs(score_logprobs(trainer, rows) - engine).max() > 0.5
    named = [variant for variant in variants_of(trainer.model) if name in variant.name]
    assert min(np.abs(scored_with(one, trainer, rows, 1.0) - engine).max() for one in named) < 1e-5


# Hundreds of variants compete: seconds a family.
COMPETING = [
    pytest.param(*detail, marks=[pytest.mark.long] * (detail[0] != "qwen2_moe")) for detail in DETAILS
]


@pytest.mark.parametrize(("family", "options", "hooks", "name"), COMPETING)
def test_a_detail_that_differs_is_named_among_all_variants(family, options, hooks, name, tmp_path):
    assert name in variant_alternatives(*sides(family, options, hooks, tmp_path), 1.0)[0].name
