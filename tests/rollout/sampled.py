"""Completions of real servers, and whether a model of Transformers sampled them."""

import asyncio
from collections.abc import Callable

import pytest
import torch

from areal_core.rollout.errors import WeightUpdateFailed
from areal_core.rollout.types import ModelRequest, ModelResponse, Sampling
from areal_core.servers.client import FleetClient
from areal_core.servers.delta import Delta
from areal_core.servers.pool import ServerPool
from areal_core.servers.sglang import SGLANG
from areal_core.servers.verification import WeightCheck
from areal_core.servers.weight_update import BroadcastUpdate, DiskUpdate

TEMPERATURE = 0.8
LENGTHS = [400, 500, 600, 700]  # unlike, so that a completion is under way at any time
MAX_UPDATES = 20  # until one meets a completion


def with_client(servers, body, wire=SGLANG, **options):
    """Return what `body(client)` returns, for a client with these options of servers, fake or real."""

    async def work():
        client = FleetClient([getattr(server, "server", server) for server in servers], wire, **options)
        try:
            return await body(client)
        finally:
            await client.aclose()

    return asyncio.run(work())


def ask(
    servers, requests: list[ModelRequest], version=0, retry_delay_s=0.01, **options
) -> list[ModelResponse]:
    """Send requests at once, by a client with these options that knows `version`."""

    async def body(client: FleetClient) -> list[ModelResponse]:
        if version:
            await asyncio.to_thread(client.set_version, version)
        return await asyncio.gather(*map(client.agenerate, requests))

    return with_client(servers, body, retry_delay_s=retry_delay_s, **options)


def generate(pool, num_requests=6, max_new_tokens=24, version=0, **sampling) -> list[ModelResponse]:
    law = Sampling(max_new_tokens=max_new_tokens, temperature=TEMPERATURE, **sampling)
    requests = [ModelRequest(input_ids=list(range(10, 14 + i)), sampling=law) for i in range(num_requests)]
    return ask(pool.servers, requests, version, wire=pool.wire, num_retries=1, retry_delay_s=0.1)


@torch.no_grad()
def logprobs_of(model, prompt: list[int], tokens: list[int], temperature=1.0) -> torch.Tensor:
    """Return the log-probs by a plain forward of tokens that were sampled after a prompt."""
    ids = torch.tensor([prompt + tokens])
    logprobs = (model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]


def sample_while(client: FleetClient, update: Callable[[], None]) -> list[ModelResponse]:
    """Sample long completions, one after the other in four places, until `update` has returned."""

    async def sample(updating: asyncio.Task, length: int) -> list[ModelResponse]:
        sampling = Sampling(max_new_tokens=length, temperature=TEMPERATURE, ignore_eos=True)
        responses = []
        while not updating.done():
            request = ModelRequest(input_ids=[10, 11], sampling=sampling)
            responses.append(await client.agenerate(request))
        return responses

    async def work() -> list[ModelResponse]:
        updating = asyncio.create_task(asyncio.to_thread(update))
        responses = await asyncio.gather(*[sample(updating, n) for n in LENGTHS])
        await updating
        await client.aclose()
        return [response for place in responses for response in place]

    return asyncio.run(work())


def check_interrupted_completions(pool, model, model_path, folder, mode: str, version: int) -> None:
    """Check that completions go on with the weights of an update, in this mode of the pause."""
    before = generate(pool, 1, 1, ignore_eos=True)[0].output_versions[0]
    interrupting = ServerPool(pool.servers, pool.wire, 60.0, pause_mode=mode)
    update = DiskUpdate(interrupting, folder / "update", model_path, check=WeightCheck(every=1))
    assert before < version
    for _ in range(MAX_UPDATES):
        client = FleetClient(pool.servers, pool.wire)
        responses = sample_while(client, lambda: update.send(model.named_parameters(), version))
        assert {len(response.output_tokens) for response in responses} == set(LENGTHS)
        assert all(r.output_versions == sorted(r.output_versions) for r in responses)
        assert_sampled_by(model, responses)
        if {before, version} in [set(response.output_versions) for response in responses]:
            break
        update.send(model.named_parameters(), before)  # on a busy machine all may have ended before the pause
    else:
        pytest.fail(f"none of {MAX_UPDATES} updates met a completion that was under way")
    interrupting.close()


def assert_sampled_by(model, responses: list[ModelResponse]) -> None:
    for r in responses:
        expected = logprobs_of(model, r.input_tokens, r.output_tokens, TEMPERATURE)
        torch.testing.assert_close(torch.tensor(r.output_logprobs), expected, atol=1e-5, rtol=0)


@torch.no_grad()
def perturb(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)


def assert_not_sampled_by(model, responses: list[ModelResponse]) -> None:
    with pytest.raises(AssertionError):
        assert_sampled_by(model, responses)


def check_logprobs(pool, model):
    responses = generate(pool)
    assert_sampled_by(model, responses)
    assert {v for r in responses for v in r.output_versions} == {0}
    assert all(r.stop_reason == "stop" or len(r.output_tokens) == 24 for r in responses)


def check_stop_tokens(pool):
    (free,) = generate(pool, 1, 12, greedy=True, ignore_eos=True)
    stop = free.output_tokens[3]
    (stopped,) = generate(pool, 1, 12, greedy=True, stop_token_ids=[stop])
    assert stopped.output_tokens == free.output_tokens[: free.output_tokens.index(stop) + 1]
    assert stopped.stop_reason == "stop"


def check_update_by_disk(pool, model, model_path, tmp_path):
    perturb(model, 1)
    assert_not_sampled_by(model, generate(pool))
    check = WeightCheck(every=1)
    DiskUpdate(pool, tmp_path / "update", model_path, check=check).send(model.named_parameters(), 7)
    responses = generate(pool)
    assert_sampled_by(model, responses)
    assert {v for r in responses for v in r.output_versions} == {7}


def check_updates_by_broadcast(pool, model, bucket_bytes):
    update = BroadcastUpdate(pool, "gloo", bucket_bytes=bucket_bytes, check=WeightCheck(every=1))
    for version in (8, 9):
        perturb(model, version)
        assert_not_sampled_by(model, generate(pool))
        update.send(iter(model.named_parameters()), version)
        responses = generate(pool)
        assert_sampled_by(model, responses)
        assert {v for r in responses for v in r.output_versions} == {version}
    update.leave()


class SeenDelta(Delta):
    """Keeps the names of what it sends."""

    def changed(self, weights, pool, is_proved):
        self.names = []
        for name, tensor in super().changed(weights, pool, is_proved):
            self.names.append(name)
            yield name, tensor


def check_updates_by_delta(pool, model, version):
    """Check what six updates send and what the server samples from after each."""
    delta = SeenDelta(anchor_interval=2)
    update = BroadcastUpdate(pool, "gloo", check=WeightCheck(every=1), delta=delta)
    names = [name for name, _ in model.named_parameters()]
    some = [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    ]  # parts of fused ones

    def sent(version):
        update.send(model.named_parameters(), version)
        responses = generate(pool)
        assert_sampled_by(model, responses)
        assert {v for r in responses for v in r.output_versions} == {version}
        return delta.names

    perturb(model, version)
    assert sent(version) == names
    for name in some:
        model.get_parameter(name).data += 0.05
    assert sent(version + 1) == some
    assert sent(version + 2) == names[-1:]  # nothing has changed, and the version comes with a tensor
    assert sent(version + 3) == names  # two deltas have been sent
    other = [(name, tensor.detach() + 0.1) for name, tensor in model.named_parameters() if name in some]
    update.leave()
    foreign = BroadcastUpdate(pool, "gloo")
    foreign.send(other, version + 3)  # another program sends weights under the same version
    foreign.leave()
    with pytest.raises(WeightUpdateFailed, match=r"WeightsDiffer: .* 2 tensors, .*qkv_proj"):
        update.send(model.named_parameters(), version + 4)
    assert delta.names == names[-1:]
    assert sent(version + 5) == names  # after a failure
    update.leave()
