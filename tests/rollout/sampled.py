"""Completions of real servers, and whether a model of Transformers sampled them."""

import asyncio

import pytest
import torch

from areal_core.rollout.types import ModelRequest, ModelResponse, Sampling
from areal_core.servers.client import FleetClient

TEMPERATURE = 0.8


def generate(pool, num_requests=6, max_new_tokens=24, version=0, **sampling) -> list[ModelResponse]:
    """Sample from the servers of a pool, as a client that knows `version`."""

    async def work() -> list[ModelResponse]:
        client = FleetClient(pool.servers, pool.wire, num_retries=1, retry_delay_s=0.1)
        if version:
            await asyncio.to_thread(client.set_version, version)
        requests = [
            ModelRequest(
                input_ids=list(range(10, 14 + i)),
                sampling=Sampling(max_new_tokens=max_new_tokens, temperature=TEMPERATURE, **sampling),
            )
            for i in range(num_requests)
        ]
        try:
            return await asyncio.gather(*(client.agenerate(request) for request in requests))
        finally:
            await client.aclose()

    return asyncio.run(work())


@torch.no_grad()
def assert_sampled_by(model, responses: list[ModelResponse]) -> None:
    for r in responses:
        tokens = torch.tensor([r.input_tokens + r.output_tokens])
        logprobs = (model(tokens).logits[0, :-1] / TEMPERATURE).log_softmax(-1).gather(1, tokens[0, 1:, None])
        expected = logprobs[len(r.input_tokens) - 1 :, 0]
        torch.testing.assert_close(torch.tensor(r.output_logprobs), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def perturb(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)


def assert_not_sampled_by(model, responses: list[ModelResponse]) -> None:
    with pytest.raises(AssertionError):
        assert_sampled_by(model, responses)
