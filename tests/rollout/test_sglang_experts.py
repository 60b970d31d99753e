"""The experts that a real SGLang server on the CPU reports, against those of Transformers."""

import pytest
import torch

from areal_core.engine.model import load_model
from areal_core.engine.routers import Routers, routing_sizes_of
from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.testing import make_tiny_family, make_tiny_tokenizer
from tests.rollout.sampled import ask


@pytest.mark.long
@pytest.mark.sglang
def test_experts_and_logprobs_are_those_of_transformers(sglang, tmp_path):
    make_tiny_tokenizer().save_pretrained(tmp_path)
    make_tiny_family(tmp_path, "qwen3_moe", vocab_size=128, eos_token_id=1, mlp_only_layers=[])
    with sglang(tmp_path, context_length=512, enable_return_routed_experts=True) as server:
        requests = [
            ModelRequest(input_ids=[7 + i, 9, 11], sampling=Sampling(max_new_tokens=12 + i)) for i in range(4)
        ]
        responses = ask([server.server], requests, sizes=routing_sizes_of(str(tmp_path)))
    model = load_model(str(tmp_path), dtype=torch.float32).eval()
    routers = Routers(model)
    for response in responses:
        tokens = response.input_tokens + response.output_tokens
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
        own = routers.choices()[:-1].sort(-1).values
        assert torch.equal(torch.from_numpy(response.routed_experts).sort(-1).values, own)
        first = len(response.input_tokens) - 1
        expected = log_p[first:-1].gather(1, torch.tensor(response.output_tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(response.output_logprobs), expected, rtol=0, atol=1e-5)
