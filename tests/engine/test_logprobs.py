import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_core.engine import logprobs as L
from areal_core.engine.logits import LogitMap, measure_logit_map


def naive(hidden, weight, bias, labels, temperature, factor, softcap):
    """Compute the definition in float64, with all logits at once."""
    logits = hidden[0].double() @ weight.double().T
    if bias is not None:
        logits = logits + bias.double()
    logits = logits * factor
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, -1)
    return torch.stack([log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)], dim=1)[None]


@pytest.mark.parametrize(("factor", "has_bias"), [(1.0, False), (0.25, True)])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_logprobs_and_gradients_equal_the_definition(
    monkeypatch, temperature, softcap, factor, has_bias
):
    monkeypatch.setattr(L, "TOKENS_PER_WEIGHT_GRADIENT", 6)  # ten tokens: one complete block and a rest
    monkeypatch.setattr(L, "LOGITS_AT_A_TIME", {"cpu": 4 * 23})  # four rows at a time
    torch.manual_seed(1)
    hidden = torch.randn(1, 10, 6, requires_grad=True)
    weight = torch.randn(23, 6, requires_grad=True)
    bias = torch.randn(23, requires_grad=True) if has_bias else None
    labels = torch.randint(23, (10,))
    logit_map = LogitMap(factor=factor, softcap=softcap)
    got = L.ChunkedLogprobs.apply(hidden, weight, bias, labels, temperature, logit_map)
    want = naive(hidden, weight, bias, labels, temperature, factor, softcap)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)
    upstream = torch.randn(1, 10, 2)
    trained = (hidden, weight, bias) if has_bias else (hidden, weight)
    for g, w in zip(
        torch.autograd.grad(got, trained, upstream),
        torch.autograd.grad(want, trained, upstream.double()),
        strict=True,
    ):
        torch.testing.assert_close(g, w.float(), rtol=0, atol=2e-5)


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("llama", {}, LogitMap()),
        ("cohere", {"logit_scale": 0.25}, LogitMap(factor=0.25)),
        ("granite", {"logits_scaling": 8.0}, LogitMap(factor=0.125)),
        ("gemma2", {"final_logit_softcapping": 5.0}, LogitMap(softcap=5.0)),
        ("minicpm3", {"dim_model_base": 8}, LogitMap(input_factor=0.25)),
        (
            "opt",
            {"ffn_dim": 32, "word_embed_proj_dim": 32},
            LogitMap(),
        ),  # its base model is not what it calls
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_class_does_to_its_logits_is_measured(family, options, expected, device):
    config = AutoConfig.for_model(family, **SMALL | {"num_attention_heads": 2, "pad_token_id": 0} | options)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    before = dict(vars(model))
    assert measure_logit_map(model) == expected
    assert vars(model) == before
