"""Adapter updates of servers: order of calls, requests that name a version, a real server."""

import asyncio
import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_core.engine.lora import Adapter, AdapterTensors, add_adapters, trained_parameters
from areal_core.rollout.errors import RequestRefused, WeightUpdateFailed
from areal_core.rollout.types import ModelRequest, ModelResponse, Sampling
from areal_core.servers.client import FleetClient
from areal_core.servers.server import Server, call
from areal_core.servers.sglang import SGLANG
from areal_core.servers.verification import WeightCheck
from areal_core.servers.weight_update import AdapterUpdate
from areal_core.testing.embedded_server import EmbeddedServer

from .sampled import ask, logprobs_of, sample_while, with_client
from .test_embedded_server import Gate

RANK, TEMPERATURE = 4, 0.8


@pytest.fixture
def adapted(tiny_model):
    """The tiny model with an adapter that changes its completions."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    add_adapters(model, Adapter(RANK, 8, str(tiny_model)), [], dtype=torch.float32, seed=0)
    change(model, 1)
    return model


@torch.no_grad()
def change(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in trained_parameters(model).items():
        if "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


@pytest.fixture
def update_of(tiny_model, tmp_path, pool_of):
    """Create an adapter update for some servers."""

    def make(*servers: Server, every: int = 0) -> AdapterUpdate:
        adapter = Adapter(RANK, 8, str(tiny_model))
        pool = pool_of(*servers, timeout_s=60.0)
        return AdapterUpdate(pool, tmp_path / "update", adapter, "tiny", check=WeightCheck(every))

    return make


@pytest.fixture
def embedded(tiny_model, serve_application):
    """Start embedded servers of the tiny model in this process."""
    started = []

    def start() -> Server:
        started.append(EmbeddedServer(str(tiny_model)))
        return serve_application(started[-1].application())

    yield start
    for server in started:
        server.sampler.close()


def generate(servers: list[Server], version: int = 0, count: int = 4) -> list[ModelResponse]:
    """Return the responses to a client that knows this version."""
    sampling = Sampling(max_new_tokens=16, temperature=TEMPERATURE, ignore_eos=True)
    requests = [ModelRequest(input_ids=list(range(10, 14 + i)), sampling=sampling) for i in range(count)]
    return ask(servers, requests, version=version, lora_name="tiny")


def own_logprobs(model, r: ModelResponse) -> torch.Tensor:
    return logprobs_of(model, r.input_tokens, r.output_tokens, TEMPERATURE)


def worst_difference(model, responses: list[ModelResponse]) -> float:
    """Return the largest difference between the logprobs of the engine and of the model."""
    return max(
        float((torch.tensor(r.output_logprobs) - own_logprobs(model, r)).abs().max()) for r in responses
    )


def with_adapters(fake) -> None:
    """Reply as a server with the adapter that was loaded last, and one of an earlier run."""
    fake.refuse["/load_lora_adapter"] = (
        200,
        {"success": True, "loaded_adapters": {"tiny-v3": "f", "tiny-v9": "old", "other": "f"}},
    )


def test_an_update_writes_a_folder_loads_it_aborts_requests_in_flight_and_unloads_older_adapters(
    start_fake, update_of, adapted, tiny_model, tmp_path
):
    fake = start_fake()
    with_adapters(fake)
    update = update_of(fake.server)
    written = {}
    post = update.pool.post

    def look_then_post(call, **options):
        if call.path == "/load_lora_adapter":
            folder = Path(call.payload["lora_path"])
            written.update(load_file(folder / "adapter_model.safetensors"))
            assert (folder / "adapter_config.json").exists()
        return post(call, **options)

    update.pool.post = look_then_post
    update.send(AdapterTensors(adapted, torch.device("cpu")), 3)
    assert fake.calls == [
        ("/load_lora_adapter", {"lora_name": "tiny-v3", "lora_path": str(tmp_path / "update" / "v3")}),
        ("/update_weight_version", {"new_version": "3", "abort_all_requests": False}),
        ("/pause_generation", {"mode": "abort"}),
        ("/unload_lora_adapter", {"lora_name": "tiny-v9"}),  # and not "other", of another run
        ("/continue_generation", {}),
    ]
    assert len(written) == 2 * len([n for n in trained_parameters(adapted) if "lora_A" in n])
    trained = dict(adapted.named_parameters())["model.layers.0.self_attn.q_proj.lora_B.default.weight"]
    assert torch.equal(written["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"], trained)
    assert list((tmp_path / "update").iterdir()) == []


def test_a_server_that_refuses_the_adapter_is_reported_and_never_stops(start_fake, update_of, adapted):
    fake = start_fake()
    fake.refuse["/load_lora_adapter"] = (
        400,
        {"success": False, "error_message": "rank 4 is above max_lora_rank 2"},
    )
    tensors = iter(AdapterTensors(adapted, torch.device("cpu")))
    with pytest.raises(WeightUpdateFailed, match="rank 4 is above max_lora_rank 2"):
        update_of(fake.server).send(tensors, 1)
    assert "/update_weight_version" not in fake.routes()
    assert "/pause_generation" not in fake.routes()
    assert list(tensors) == []  # other ranks wait in them


def test_a_server_that_lost_the_loaded_adapter_is_named(start_fake, update_of, adapted):
    fake = start_fake()
    fake.refuse["/load_lora_adapter"] = (200, {"success": True, "loaded_adapters": {}})
    with pytest.raises(
        WeightUpdateFailed, match=rf"{fake.server.address} reports the adapters \[\] after tiny-v1 was loaded"
    ):
        update_of(fake.server).send(AdapterTensors(adapted, torch.device("cpu")), 1)


def assert_served_once_updated(update, server, adapted, base, version):
    """Send another adapter; the server then samples with it, and not with the base model."""
    change(adapted, version)
    update.send(AdapterTensors(adapted, torch.device("cpu")), version)
    responses = generate([server], version)
    assert worst_difference(adapted, responses) < 1e-5
    assert worst_difference(base, responses) > 0.1
    assert {v for r in responses for v in r.output_versions} == {version}


def test_an_embedded_server_samples_with_each_adapter_and_keeps_the_base_model(
    embedded, update_of, adapted, tiny_model
):
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    server = embedded()
    assert SGLANG.ask_identity(server).serves_adapters
    update = update_of(server, every=1)  # each update is followed by a comparison of the base model
    assert worst_difference(base, generate([server])) < 1e-5
    for version in (1, 2):
        assert_served_once_updated(update, server, adapted, base, version)
    with pytest.raises(RequestRefused, match="names the LoRA adapter tiny-v1, and the server has tiny-v2"):
        call(server, "POST", "/generate", {"input_ids": [10], "lora_path": "tiny-v1"})


def test_a_request_that_is_behind_its_server_takes_the_newer_adapter(embedded, update_of, adapted):
    """Between an update and `set_version` the client requests the old adapter, now unloaded."""
    server = embedded()
    update_of(server).send(AdapterTensors(adapted, torch.device("cpu")), 1)
    (response,) = generate([server], count=1)
    assert set(response.output_versions) == {1}
    assert worst_difference(adapted, [response]) < 1e-5


def test_a_completion_that_an_update_aborts_continues_with_the_new_adapter(
    serve_application, update_of, adapted, tiny_model
):
    engine = EmbeddedServer(str(tiny_model))
    server, sampler = serve_application(engine.application()), engine.sampler
    update = update_of(server)
    update.send(AdapterTensors(adapted, torch.device("cpu")), 1)
    first = copy.deepcopy(adapted)
    change(adapted, 2)
    sampler._model = gate = Gate(sampler._model)
    gate.stop_at = 19
    client = FleetClient([server], SGLANG, lora_name="tiny")
    client.set_version(1)

    def is_cut() -> bool:
        with sampler._changed:
            return sampler._changed.wait_for(lambda: sampler._paused == "abort", 120)

    async def work() -> ModelResponse:
        sampling = Sampling(max_new_tokens=40, temperature=TEMPERATURE, ignore_eos=True)
        task = asyncio.create_task(client.agenerate(ModelRequest(input_ids=[10, 11], sampling=sampling)))
        assert await asyncio.to_thread(gate.reached.wait, 120)
        tensors = AdapterTensors(adapted, torch.device("cpu"))
        updating = asyncio.create_task(asyncio.to_thread(update.send, tensors, 2))
        assert await asyncio.to_thread(is_cut)
        gate.released.set()
        await updating
        response = await task
        await client.aclose()
        return response

    response = asyncio.run(work())  # whose client does not know version 2
    client.close()
    sampler.close()
    assert response.output_versions == [1] * 20 + [2] * 20
    logprobs = torch.tensor(response.output_logprobs)
    for model, part in ((first, slice(0, 20)), (adapted, slice(20, 40))):
        torch.testing.assert_close(logprobs[part], own_logprobs(model, response)[part], atol=1e-5, rtol=0)
    assert (logprobs - own_logprobs(first, response))[20:].abs().max() > 0.05


def test_a_server_that_restarts_without_the_adapter_gets_no_more_requests(embedded, update_of, adapted):
    good, bad = embedded(), embedded()
    update_of(good, bad).send(AdapterTensors(adapted, torch.device("cpu")), 1)
    sampling = Sampling(max_new_tokens=4, temperature=TEMPERATURE)
    requests = [ModelRequest(input_ids=[10, 11 + i], sampling=sampling) for i in range(6)]

    async def body(client):
        await asyncio.to_thread(client.set_version, 1)
        before = list(client.router.servers)
        lost = {"lora_name": "tiny-v1"}, {"new_version": "default"}  # what a restart leaves
        await asyncio.to_thread(call, bad, "POST", "/unload_lora_adapter", lost[0])
        await asyncio.to_thread(call, bad, "POST", "/update_weight_version", lost[1])
        responses = await asyncio.gather(*map(client.agenerate, requests))
        return before, responses, list(client.router.servers)

    before, responses, after = with_client([good, bad], body, lora_name="tiny")
    assert (before, after) == ([good, bad], [good])
    assert worst_difference(adapted, responses) < 1e-5


@pytest.mark.long
@pytest.mark.sglang
def test_a_real_server_samples_with_the_adapters_that_are_sent(tiny_model, adapted, update_of, sglang):
    """SGLang 0.5.23 on the CPU: logprobs within 1e-5 of the adapted model's, for three versions."""
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    lora = {"enable_lora": True, "max_lora_rank": RANK, "lora_target_modules": ["all-linear"]}
    with sglang(tiny_model, **lora) as started:
        server = started.server
        assert SGLANG.ask_identity(server).serves_adapters
        update = update_of(server, every=1)
        assert worst_difference(base, generate([server])) < 1e-5
        for version in (1, 2, 3):
            assert_served_once_updated(update, server, adapted, base, version)
        cut = aborted_by_an_update(server, update, adapted)
        assert cut.output_versions == sorted(cut.output_versions)
        ends = torch.tensor(cut.output_logprobs) - own_logprobs(adapted, cut)
        assert ends[torch.tensor(cut.output_versions) == 4].abs().max() < 1e-5
        ask = partial(call, server, "POST", "/generate")
        body = {"input_ids": [10, 11], "sampling_params": {"max_new_tokens": 2}}
        ask(body | {"lora_path": "tiny-v3"})  # of the version before
        with pytest.raises(RequestRefused, match="tiny-v2"):
            ask(body | {"lora_path": "tiny-v2"})


def aborted_by_an_update(server: Server, update: AdapterUpdate, adapted) -> ModelResponse:
    client = FleetClient([server], SGLANG, lora_name="tiny")
    client.set_version(3)

    def send() -> None:
        change(adapted, 4)
        update.send(AdapterTensors(adapted, torch.device("cpu")), 4)

    responses = sample_while(client, send)
    return next(response for response in responses if set(response.output_versions) == {3, 4})
