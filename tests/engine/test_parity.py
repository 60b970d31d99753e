"""The check at load: which models it refuses, which it computes row by row, and what it costs."""

import logging
import math

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.lfm2 import modeling_lfm2

from areal_core.config import MicroBatchSpec, TrainEngineConfig
from areal_core.engine import parity as P
from areal_core.engine.logits import output_layer
from areal_core.errors import ModelError
from areal_core.testing import TINY_FAMILIES, make_tiny_family, make_tiny_model
from areal_core.trainer.build import build_engine, shard_engine
from benchmarks import model_families as families

# What makes each special: logits scaled after the output layer, or hidden states before it; a bias
# of the output layer; attention sinks; frequencies by length; float32 rotary embeddings; latent
# attention; experts.
PACKED = ["cohere", "cohere2", "granite", "granitemoe", "minicpm3", "phi", "gpt_oss", "phi3, LongRoPE"]
PACKED += ["llama, dynamic RoPE", "olmo", "ernie4_5", "gemma2", "deepseek_v3", "nanochat", "gpt2"]
PACKED += [name for name in TINY_FAMILIES if name not in PACKED]
# Layers with a state, chunked attention, a mask from the values, lengths that layers do not get.
ALONE = ["qwen3_next", "qwen3_5_text", "lfm2", "falcon_h1", "bamba", "jamba", "minimax", "recurrent_gemma"]
ALONE += ["llama4_text", "doge", "stablelm", "bloom", "mpt", "mamba", "granitemoehybrid"]


# Every other family of the list has something in common with one of these.
QUICK = {"gpt_oss", "mamba"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in PACKED + ALONE]
)
def test_a_family_trains_on_the_logprobs_and_gradients_of_transformers(ranks, name):
    found = families.measure(name, ranks)
    assert found.get("packs") == (name in PACKED), found
    assert found["float32"] < 5e-6  # nats, against Transformers, one row at a time
    assert found["gradient"] < 2e-5  # relative
    assert found["export"] < 1e-5
    assert found["bfloat16"] < 0.05
    if name in ALONE and found["packed"] is not None:
        assert found["packed"] > 0.01, "packed rows are right: the family need not be computed row by row"


def engine_of(path, ranks, **options):
    return build_engine(TrainEngineConfig(path=str(path), dtype="float32", **options), ranks, total_steps=1)


def test_rows_that_see_each_other_are_computed_alone_and_it_is_said_once(ranks, tmp_path, caplog):
    families.write_tiny("lfm2", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        engine = engine_of(tmp_path, ranks, mb_spec=MicroBatchSpec(max_tokens_per_mb=100))
    assert not engine.packs_rows
    [record] = [r for r in caplog.records if "one at a time" in r.message]
    assert "rows of a 'lfm2' model are computed one at a time" in record.message
    assert "other tokens in one packed row change the log-probs of the next" in record.message
    assert engine.divide(P.batch_of([torch.arange(3), torch.arange(5)])) == [[0], [1]]
    engine.granularity = 2  # pairs stay together
    assert engine.divide(P.batch_of([torch.arange(3)] * 4)) == [[0, 1], [2, 3]]


def test_layers_that_use_the_numbers_of_rows_are_packed(ranks, tmp_path, monkeypatch):
    """Transformers' convolution of LFM2 ignores `seq_idx` on a CPU; its GPU kernel uses it."""

    def by_row(hidden, weight, bias=None, activation=None, *, seq_idx=None, **options):
        if seq_idx is None:
            return plain(hidden, weight, bias, activation, **options)
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        return torch.cat([plain(row, weight, bias, activation) for row in hidden.split(lengths, dim=2)], 2)

    plain = modeling_lfm2.causal_conv1d_fn
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", by_row)
    families.write_tiny("lfm2", str(tmp_path))
    engine = engine_of(tmp_path, ranks)
    assert engine.packs_rows
    assert engine.numbers_rows
    rows = families.rows()
    expected = [P.own_columns(engine, row) for row in rows]
    assert families.difference(P.columns_of(engine, rows), expected) < 5e-6


def test_logprobs_that_are_not_the_models_own_are_refused(ranks, tiny_model, monkeypatch):
    """A fault in our own head, as an unknown transformation of logits would be."""

    def halved(engine, rows):
        return [columns * 0.5 for columns in right(engine, rows)]

    right = P.columns_of
    monkeypatch.setattr(P, "columns_of", halved)
    with pytest.raises(ModelError) as refusal:
        engine_of(tiny_model, ranks)
    message = str(refusal.value)
    assert "a 'llama' model gets log-probs that differ by" in message
    assert "actor.parity_check=false" in message
    difference = float(message.split("differ by ")[1].split()[0])
    assert difference == pytest.approx(math.log(105) / 2, rel=0.2)  # half of a near-uniform log-prob


def test_weights_that_are_not_finite_are_refused(ranks, tmp_path):
    make_tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="log-probs that are not finite in its own forward"):
        engine_of(tmp_path, ranks)


def test_the_check_leaves_random_state_and_model_as_they_were(ranks, tmp_path):
    make_tiny_family(tmp_path, "gemma2")
    engine = shard_engine(TrainEngineConfig(path=str(tmp_path), dtype="float32"), ranks)
    head = output_layer(engine.model)
    before = (torch.get_rng_state(), engine.model.config.to_dict(), engine.model.forward, head.forward)
    result = P.measure_parity(engine)
    assert result.lengths == (11, 1, 6, 11)  # the last is longer than the sliding window of 8
    after = (torch.get_rng_state(), engine.model.config.to_dict(), engine.model.forward, head.forward)
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert engine.model.config._attn_implementation == "packed_rows"
