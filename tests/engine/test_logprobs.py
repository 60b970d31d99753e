import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_core.engine import logprobs as L
from areal_core.engine.errors import ModelError


def naive(hidden, weight, labels, temperature, softcap):
    """Compute the definition in float64, with all logits at once."""
    logits = hidden[0].double() @ weight.double().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, -1)
    return torch.stack([log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)], dim=1)[None]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_logprobs_and_gradients_equal_the_definition(monkeypatch, temperature, softcap):
    monkeypatch.setattr(L, "TOKENS_PER_WEIGHT_GRADIENT", 6)  # ten tokens: one complete block and a rest
    monkeypatch.setattr(L, "LOGITS_AT_A_TIME", {"cpu": 4 * 23})  # four rows at a time
    torch.manual_seed(1)
    hidden = torch.randn(1, 10, 6, requires_grad=True)
    weight = torch.randn(23, 6, requires_grad=True)
    labels = torch.randint(23, (10,))
    got = L.ChunkedLogprobs.apply(hidden, weight, labels, temperature, softcap)
    want = naive(hidden, weight, labels, temperature, softcap)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)
    upstream = torch.randn(1, 10, 2)
    for g, w in zip(
        torch.autograd.grad(got, (hidden, weight), upstream),
        torch.autograd.grad(want, (hidden, weight), upstream.double()),
        strict=True,
    ):
        torch.testing.assert_close(g, w.float(), rtol=0, atol=2e-5)


def test_uniform_logits_give_log_of_vocabulary_size():
    pairs = L.ChunkedLogprobs.apply(
        torch.zeros(1, 3, 4), torch.ones(8, 4), torch.tensor([0, 3, 7]), 1.0, None
    )
    torch.testing.assert_close(pairs[0, :, 0], torch.full((3,), -2.0794415))  # -ln 8
    torch.testing.assert_close(pairs[0, :, 1], torch.full((3,), 2.0794415))


def test_a_model_that_scales_its_logits_outside_of_the_output_layer_is_refused():
    config = AutoConfig.for_model(
        "granite",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        logits_scaling=8.0,
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ModelError, match=r"GraniteForCausalLM scales its logits \(logits_scaling is 8\.0\)"):
        L.score_next_tokens(model)


def test_a_model_scores_the_given_labels_at_the_given_positions():
    config = AutoConfig.for_model(
        "gemma2",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        final_logit_softcapping=5.0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids, positions, labels = torch.randint(64, (1, 6)), torch.tensor([1, 4]), torch.tensor([7, 63])
    log_p = torch.log_softmax(model(input_ids=ids).logits[0, positions] / 0.7, -1)
    L.score_next_tokens(model)
    pairs = model(input_ids=ids, positions=positions, labels=labels, temperature=0.7)
    assert pairs.shape == (1, 2, 2)
    torch.testing.assert_close(pairs[0, :, 0], log_p.gather(1, labels[:, None])[:, 0])
    torch.testing.assert_close(pairs[0, :, 1], -(log_p.exp() * log_p).sum(-1))
