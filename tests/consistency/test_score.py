"""Scores equal those of plain Transformers for any packing; saved scores load for their key."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from areal_core.engine.attention import PACKED
from benchmarks import model_families as families
from consistency import score as scoring
from consistency.score import load_scorer, score, score_logits, scorer_of
from consistency.tokens import Sequences

LONG = pytest.mark.long


def some_sequences(vocabulary_size: int, lengths=(7, 30, 2, 19, 1), seed: int = 0) -> Sequences:
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    return Sequences(
        rng.integers(3, vocabulary_size, total), bounds, rng.random(total) < 0.7, np.full(total, -1.0)
    )


def plain_logits(model, sequences: Sequences) -> torch.Tensor:
    """float32 logits [n, vocab] that predict the scored tokens, one row of the batch at a time."""
    rows, wanted = [], set(sequences.scored.tolist())
    for row in range(sequences.num_rows):
        part = sequences.row(row)
        with torch.inference_mode():
            logits = model(torch.as_tensor(sequences.input_ids[part])[None]).logits[0].float()
        rows += [logits[i - 1 - part.start] for i in range(part.start, part.stop) if i in wanted]
    return torch.stack(rows)


def check_against_plain(scores, logits, labels, temperature, tolerance):
    logprobs = torch.log_softmax(logits.double() / temperature, dim=1)
    probs = logprobs.exp()
    at_label = logprobs.gather(1, torch.as_tensor(labels)[:, None])
    entropy = -(probs * logprobs).sum(1)
    expected = {
        "logprob": at_label[:, 0],
        "entropy": entropy,
        "variance": (probs * logprobs**2).sum(1) - entropy**2,
        "mass_before": (probs * (logprobs > at_label)).sum(1),
        "top_logprobs": logprobs.topk(5).values,
    }
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(scores, name), values.numpy(), atol=tolerance, err_msg=name)
    rank = (logits > logits.gather(1, torch.as_tensor(labels)[:, None])).sum(1)
    np.testing.assert_array_equal(scores.rank, rank)
    np.testing.assert_array_equal(scores.top_ids[:, 0], logits.argmax(1))


@pytest.mark.parametrize(("temperature", "tokens_per_pass"), [(1.0, 4096), (0.7, 20)])
def test_scores_equal_those_of_plain_transformers(tiny_model, temperature, tokens_per_pass, monkeypatch):
    monkeypatch.setitem(scoring.LOGITS_AT_A_TIME, "cpu", 700)  # a few rows of logits at a time
    scorer = load_scorer(str(tiny_model))
    sequences = some_sequences(scorer.head.vocabulary_size)
    passed = []
    scores = score(
        scorer, sequences, temperature=temperature, tokens_per_pass=tokens_per_pass, progress=passed.append
    )
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    labels = sequences.input_ids[sequences.scored]
    check_against_plain(scores, plain_logits(plain, sequences), labels, temperature, 2e-5)
    assert sum(passed) >= len(sequences.scored)
    assert len(passed) == (1 if tokens_per_pass == 4096 else 2)


def test_a_soft_cap_and_a_sliding_window_are_those_of_the_model():
    config = Gemma2Config(
        vocab_size=90, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, sliding_window=8, final_logit_softcapping=2.0, attn_logit_softcapping=None, query_pre_attn_scalar=16, dtype="float32",
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = Gemma2ForCausalLM._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    packed = Gemma2ForCausalLM._from_config(config, attn_implementation=PACKED)
    packed.load_state_dict(plain.state_dict())
    sequences = some_sequences(90)
    logits, labels = plain_logits(plain, sequences), sequences.input_ids[sequences.scored]
    assert logits.abs().max() > 1.5  # the cap bends
    check_against_plain(score(scorer_of(packed), sequences), logits, labels, 1.0, 2e-5)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_next",
        "llama, dynamic RoPE",
        *(pytest.param(name, marks=LONG) for name in ("granite", "minicpm3", "phi", "stablelm")),
    ],
)
def test_scores_of_unusual_families_equal_those_of_transformers(name, tmp_path):
    families.write_tiny(name, str(tmp_path))
    scorer = load_scorer(str(tmp_path))
    assert scorer.packs_rows == (name not in ("qwen3_next", "stablelm"))
    sequences = some_sequences(105, lengths=(3, 11, 1, 6, 19))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    logits, labels = plain_logits(plain, sequences), sequences.input_ids[sequences.scored]
    check_against_plain(score(scorer, sequences), logits, labels, 1.0, 2e-5)


def test_scores_do_not_depend_on_the_rows_that_are_reduced_together():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(7, 1000, generator=generator), torch.randint(0, 1000, (7,))
    together, apart = (score_logits(logits.clone(), labels, 0.7, 5, size) for size in (7, 2))
    assert together.keys() == apart.keys()
    assert all(torch.equal(together[name], apart[name]) for name in together)
    logprobs = torch.log_softmax(logits.double() / 0.7, 1)
    at_label = logprobs.gather(1, labels[:, None])
    expected = torch.where(logprobs > at_label, logprobs.exp(), 0).sum(1)
    torch.testing.assert_close(together["mass_before"].double(), expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(together["rank"], (logprobs > at_label).sum(1))
    assert torch.equal(score_logits(logits.clone(), labels, 0.7, None)["logprob"], together["logprob"])
