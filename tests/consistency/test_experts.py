"""An engine and a trainer whose routers differ: the engine's experts name the cause."""

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_core.embedded.engine import EmbeddedEngine
from areal_core.embedded.replica import Replica
from areal_core.engine.model import load_model
from areal_core.rollout.types import ModelRequest
from areal_core.rollout.types import Sampling as EngineSampling
from areal_core.testing import make_tiny_family, make_tiny_tokenizer
from consistency.alternatives import variants
from consistency.alternatives.variants import Variant, scored_with, variants_of
from consistency.case import Request
from consistency.check import check
from consistency.score import load_scorer
from consistency.source import Sampled, Sampling, sampling_of
from consistency.tokens import Completion, sequences_from_completions

SAMPLING = Sampling(
    temperature=1.0, top_p=1.0, top_k=None, greedy=False, trainer_dtype="float32", engine_dtype="float32"
)


def make_model(folder, **options):
    make_tiny_tokenizer().save_pretrained(folder)
    given = {"vocab_size": 105, "eos_token_id": 1, "mlp_only_layers": []} | options
    return make_tiny_family(folder, "qwen3_moe", **given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("moe"), num_experts_per_tok=1, norm_topk_prob=True)


def sampled_from(folder, seed=0, **options):
    """Return what the embedded engine samples, with its experts."""
    replica = Replica(str(folder), torch.float32, torch.device("cpu"), keeps_experts=True, **options)
    engine = EmbeddedEngine(replica, 105)

    async def work():
        requests = [
            ModelRequest(input_ids=[7 + i, 9], sampling=EngineSampling(max_new_tokens=40, seed=8 * seed + i))
            for i in range(8)
        ]
        return await asyncio.gather(*map(engine.agenerate, requests))

    responses = asyncio.run(work())
    packed = sequences_from_completions(
        [Completion(r.input_tokens, r.output_tokens, r.output_logprobs) for r in responses]
    )
    last = [((0, 1), (0, 0), (0, 0))]
    experts = [np.pad(r.routed_experts, *last, constant_values=-1) for r in responses]
    return replace(packed, experts=np.concatenate(experts))


def diagnosis(rows, model, engine_dtype="float32"):
    sampling = replace(SAMPLING, engine_dtype=engine_dtype)
    return check(Sampled({"rows": rows}, sampling), Request(str(model))).diagnosis


def computed_with(variant_of, folder, seed=0):
    scorer, rows = load_scorer(str(folder)), replace(sampled_from(folder, seed), experts=None)
    rows.engine_logprobs[rows.scored] = scored_with(variant_of(scorer.model), scorer, rows, 1.0)
    return rows


@pytest.mark.long
@pytest.mark.parametrize("name", ["gate and up exchanged", "experts routed by a sigmoid"])
def test_experts_that_are_computed_otherwise_are_named(name, tmp_path, monkeypatch):
    monkeypatch.setattr(variants, "TOKENS_TO_SCREEN", 64)
    folder = make_model(tmp_path)
    rows = computed_with(lambda model: next(v for v in variants_of(model) if v.name == name), folder)
    assert name in diagnosis(rows, folder).causes[0].name


@pytest.mark.long
def test_a_copy_of_the_weights_in_bfloat16_is_no_fault_of_an_engine_that_declares_it(folder):
    def copied(model):
        return Variant("", "", [(p, lambda old: old.bfloat16().float()) for p in model.parameters()])

    # at this seed experts near a tie move more than published noise
    found = diagnosis(computed_with(copied, folder, seed=8), folder, "bfloat16")
    assert (found.verdict, any(cause.fault for cause in found.causes)) == ("healthy", False)


def test_float8_that_a_config_declares_is_the_dtype_of_the_engine():
    assert sampling_of({"rollout": {"quantization": "fp8"}}, {}, "bfloat16")[0].engine_dtype == "float8"


def test_equal_routers_are_healthy(folder):
    assert diagnosis(sampled_from(folder), folder).verdict == "healthy"


@pytest.mark.parametrize(
    ("scale", "name"),
    [
        (None, "engine and trainer choose different experts"),  # other routers
        (0.2, "engine and trainer weigh the same experts differently"),
    ],
)
def test_the_mismatch_is_split_into_the_choice_of_experts_and_their_weights(tmp_path, scale, name):
    folder = make_model(tmp_path, norm_topk_prob=True)
    rows = sampled_from(folder, keeps_weights=True)
    model = load_model(str(folder), dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("mlp.gate.weight") and scale is None:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.005)
            elif key.endswith("mlp.gate.weight"):
                parameter.mul_(scale)
    model.save_pretrained(tmp_path / "other")
    make_tiny_tokenizer().save_pretrained(tmp_path / "other")
    (cause, *_) = diagnosis(rows, tmp_path / "other").causes
    assert (cause.id, cause.name, cause.confidence > 0.95) == ("R42", name, True)
    live, ids, both = map(float, re.findall(r"([\d.e-]+) with the ", cause.evidence))
    assert both < 1e-6 < ids < live
