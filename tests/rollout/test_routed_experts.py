"""Experts in replies: asked for, checked, joined, made rows of a batch; those of a real server."""

from base64 import b64encode

import numpy as np
import pytest
import torch

from areal_core.data.routed_experts import RoutingSizes
from areal_core.engine.model import load_model
from areal_core.engine.routers import Routers, routing_sizes_of
from areal_core.rollout.types import ModelRequest, ModelResponse, Sampling
from areal_core.rollout.workflow import conversation_row
from areal_core.testing import make_tiny_family, make_tiny_tokenizer
from tests.rollout.sampled import ask

SIZES = RoutingSizes(num_layers=3, top_k=2, num_experts=8)


def query(servers, max_new_tokens=3, sizes=SIZES) -> ModelResponse:
    request = ModelRequest(input_ids=[5, 6], sampling=Sampling(max_new_tokens=max_new_tokens))
    return ask(servers, [request], sizes=sizes)[0]


def test_experts_of_all_tokens_but_the_last_are_asked_for(start_fake):
    fake = start_fake()
    experts = query([fake.server]).routed_experts
    body = fake.calls[0][1]
    assert (body["return_routed_experts"], body["routed_experts_start_len"]) == (True, 0)
    assert experts.dtype == np.int16
    # Positions 0 to 3 of 5 tokens: (position + 0 .. 5) % 4 in 3 layers of 2.
    assert experts.tolist() == [
        [[0, 1], [2, 3], [0, 1]],
        [[1, 2], [3, 0], [1, 2]],
        [[2, 3], [0, 1], [2, 3]],
        [[3, 0], [1, 2], [3, 0]],
    ]


@pytest.mark.parametrize(
    ("experts", "seen"),
    [
        (None, "it has none; start the server with --enable-return-routed-experts"),
        (np.zeros(23, np.int32), "23 numbers, and [4, 3, 2] were expected"),
        (np.full(24, 8, np.int32), "experts from 8 to 8, and the model has 8"),
        (np.full(24, -1, np.int32), "experts from -1 to -1"),
    ],
)
def test_experts_that_do_not_fit_are_refused(start_fake, caplog, experts, seen):
    bad, good = start_fake(), start_fake()

    def spoil(reply):
        reply["meta_info"]["routed_experts"] = None if experts is None else b64encode(experts).decode()
        return reply

    bad.spoil = spoil

    requests = [
        ModelRequest(input_ids=[5, 6], sampling=Sampling(max_new_tokens=3), metadata={"prompt_id": i})
        for i in range(2)
    ]
    responses = ask([bad.server, good.server], requests, sizes=SIZES)
    # The second request of the good server has experts from 4.
    assert all(response.routed_experts.max() < 8 for response in responses)
    assert "quarantined" in caplog.text
    assert f"a reply breaks the rule routed_experts: {seen}" in caplog.text


def response_of(prompt, output, first) -> ModelResponse:
    num_known = len(prompt) + len(output) - 1
    experts = np.arange(num_known * 2, dtype=np.int16).reshape(-1, 1, 2) + first
    return ModelResponse(
        input_tokens=prompt,
        output_tokens=output,
        output_logprobs=[-1.0] * len(output),
        output_versions=[0] * len(output),
        stop_reason="stop",
        routed_experts=experts,
    )


def test_a_conversation_has_the_experts_of_the_turn_that_computed_a_token_first():
    first = response_of([1, 2], [3, 4], 0)  # experts of positions 0 to 2
    second = response_of([1, 2, 3, 4, 5], [6], 50)  # of 0 to 4
    row = conversation_row([first, second], 1.0)
    assert row["routed_experts"][0, :, 0, 0].tolist() == [0, 2, 4, 56, 58, -1]


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
