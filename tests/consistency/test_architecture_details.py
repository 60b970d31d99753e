"""An engine that computes a detail of the architecture otherwise is named, whatever the family."""

import json
import shutil
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from benchmarks import model_families as families
from consistency.alternatives import variants
from consistency.alternatives.variants import scored_with, variant_alternatives, variants_of
from consistency.score import load_scorer, score_logprobs
from consistency.tokens import Completion, sequences_from_completions

LOCAL = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
ROPE = {"rope_parameters": {"sliding_attention": LOCAL, "full_attention": LINEAR}}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
OWN = {"attention_factor": YARN | {"attention_factor": 1.0}, "factor of the rotary scaling": LLAMA3}
FULL, SLIDING = "full_attention", "sliding_attention"


def hooked(hook, leaf):
    """Return a change of a model: hooks on the outputs of the modules of a name."""

    def change(model):
        for path, module in model.named_modules():
            if path.rpartition(".")[2] == leaf:
                module.register_forward_hook(hook)

    return change


def of_the_next_rank(model):
    for layer in model.model.layers:
        for tensor in layer.mlp.experts.parameters(recurse=False):
            tensor.data = tensor.data[[2, 3, 0, 1]]


def weighed_by_corrected_scores(router, args, output):
    logits, _, chosen = output
    scores = (logits.sigmoid() + router.e_score_correction_bias).gather(1, chosen)
    return logits, scores / scores.sum(-1, keepdim=True) * router.routed_scaling_factor, chosen


def with_whole_bias(experts, args, output):
    _, chosen, weights = args
    whole = torch.stack([experts.down_proj_bias[row].sum(0) for row in chosen])
    weighed = (weights[..., None] * experts.down_proj_bias[chosen]).sum(1)
    return output + (whole - weighed).view_as(output)


def joined_by_groups(model):
    size = model.config.hidden_size // model.config.num_attention_heads
    for layer in model.model.layers:
        heads = layer.self_attn.qkv_proj.weight.data.unflatten(0, (-1, size))
        shared = model.config.num_key_value_heads
        q, k, v = heads.split([model.config.num_attention_heads, shared, shared])
        parts = [part for one in zip(q.chunk(shared), k.split(1), v.split(1), strict=True) for part in one]
        layer.self_attn.qkv_proj.weight.data = torch.cat(parts).flatten(0, 1)


def in_blocks_of_32(model):
    for layer in model.model.layers:
        for linear in filter(lambda one: isinstance(one, torch.nn.Linear), layer.modules()):
            for block in (b for rows in linear.weight.data.split(32) for b in rows.split(32, dim=1)):
                scale = torch.exp2((block.abs().max() / 448).log2().ceil())
                block.copy_((block / scale).to(torch.float8_e4m3fn).float() * scale)


# A detail is an option of the engine's config, a change of its model or, without one, the variant itself.
DETAILS = [
    ("granite", {"residual_multiplier": 1.0}, "residual_multiplier of GraniteDecoderLayer left out"),
    ("deepseek_v3", {"routed_scaling_factor": 6.25}, "routed_scaling_factor of DeepseekV3TopkRouter"),
    ("gemma3_text", {"query_pre_attn_scalar": 9}, "scaling of Gemma3Attention times 1.33"),
    ("mistral", {"sliding_window": 9}, "a window one token wider"),
    ("gpt_neox", {"use_parallel_residual": False}, "attention beside the MLP, or before it"),
    ("gemma3_text", ROPE, "positions of full_attention layers divided by 8"),
    ("phi", {}, "biases of layers that are summed over ranks doubled"),
    ("llama", {}, "q, k, v, gate and up with the rows of the first of 2 ranks on each"),
    ("qwen2_moe", {}, "the shared expert without its gate"),
    ("gpt_oss", {}, "model.layers.*.self_attn.sinks zero"),
    ("deepseek_v3", {}, "model.layers.*.mlp.gate.e_score_correction_bias zero"),
    ("qwen3", {}, "layers 0 to 1 with the weights of layers 2 to 3"),
    ("deepseek_v3", hooked(lambda *args: 3 * args[-1], "shared_experts"), "the shared expert times 3"),
    ("deepseek_v3", hooked(weighed_by_corrected_scores, "gate"), "by scores with their correction bias"),
    ("gpt_oss", hooked(with_whole_bias, "experts"), "the output bias of each expert added without its"),
    ("gemma3_text", {"layer_types": [FULL, SLIDING] * 2}, "of the type (window) of the next one"),
    ("cohere2", {}, "rotary positions in every layer"),
    ("llama", {"rope_parameters": LLAMA3 | {"factor": 32.0}}, "factor of the rotary scaling times 4"),
    ("phi3", joined_by_groups, "q, k and v joined in groups of heads, then cut"),
    ("llama", in_blocks_of_32, "scales of powers of two"),
    ("mistral", {"sliding_window": 16}, "a window of 16 tokens"),
    ("qwen3", {}, "q_norm and k_norm after the rotary positions"),
    ("llama", {"rope_parameters": YARN}, "rotary scaling without the attention_factor of the config"),
    ("qwen3_moe", of_the_next_rank, "experts of 1 of 2 ranks further"),
]


def sides(family, options, name, tmp_path):
    """Return the trainer, and rows with the log-probs of an engine with the detail."""
    families.write_tiny(family, str(tmp_path / "tiny"))
    own = next(({"rope_parameters": rope} for part, rope in OWN.items() if part in name), {})
    for side, changed in (("model", own), ("engine", {} if callable(options) else options)):
        config = shutil.copytree(tmp_path / "tiny", tmp_path / side) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changed))
    engine, trainer = (load_scorer(str(tmp_path / side)) for side in ("engine", "model"))
    ids = np.random.default_rng(0).integers(3, 103, (12, 40))
    rows = sequences_from_completions([Completion(row[:8], row[8:], np.zeros(32)) for row in ids])
    planted = [one for one in variants_of(engine.model) if not options and one.name == name]
    if callable(options):
        options(engine.model)
    with ExitStack() as stack:
        for one in planted:
            stack.enter_context(one.applied())
        rows.engine_logprobs[rows.scored] = score_logprobs(engine, rows)
    return trainer, rows


SEARCHED = ("times 3", "1.33")
# Options, changed weights, hooks, rounding.
EVERYDAY = ("mistral", "gpt_neox", "phi3", "deepseek_v3", "llama")
NAMED = [one for one in DETAILS if one[1] and not any(words in one[2] for words in SEARCHED)]


@pytest.mark.parametrize(
    ("family", "options", "name"),
    [pytest.param(*one, marks=[pytest.mark.long] * (one[0] not in EVERYDAY)) for one in NAMED],
)
def test_a_variant_with_the_name_of_the_detail_computes_what_the_engine_does(family, options, name, tmp_path):
    trainer, rows = sides(family, options, name, tmp_path)
    engine = rows.engine_logprobs[rows.scored]
    assert np.abs(score_logprobs(trainer, rows) - engine).max() > 0.02
    named = [variant for variant in variants_of(trainer.model) if name in variant.name]
    assert min(np.abs(scored_with(one, trainer, rows, 1.0) - engine).max() for one in named) < 1e-5


# Hundreds of variants compete: seconds a family.
COMPETING = [pytest.param(*one, marks=[pytest.mark.long] * (one[0] != "qwen3_moe")) for one in DETAILS]


@pytest.mark.parametrize(("family", "options", "name"), COMPETING)
def test_a_detail_that_differs_is_named_among_all_variants(family, options, name, tmp_path, monkeypatch):
    monkeypatch.setattr(variants, "TOKENS_TO_SCREEN", 64)
    trainer, rows = sides(family, options, name, tmp_path)
    assert name in variant_alternatives(trainer, rows, 1.0)[0].name
