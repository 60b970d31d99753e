"""Membership of a run's servers: discovery, identity, routing, and selection by current weights."""

import asyncio
import json
import logging

import pytest
from aiohttp import web

from areal_core.rollout.errors import RequestRefused, ServerDied
from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.servers.client import FleetClient
from areal_core.servers.discovery import Discovery, FolderNames, register_server, wait_until_ready
from areal_core.servers.identity import run_model
from areal_core.servers.router import SPARE_REQUESTS, Router
from areal_core.servers.server import Server
from areal_core.servers.sglang import SGLANG
from tests.rollout.sampled import with_client

A, B = Server("a:1"), Server("b:2")


def write_config(folder, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- discovery


def test_a_dead_discovered_server_is_forgotten_but_a_configured_one_is_waited_for(
    start_fake, pool_of, caplog, tmp_path
):
    alive, dead = start_fake(), start_fake()
    dead.stop()
    names = FolderNames(tmp_path)
    for fake in (alive, dead):
        register_server(names, "exp", "trial", fake.server.address)
    discovery = Discovery((), names, "exp", "trial")
    assert wait_until_ready(discovery, timeout_s=1) == [alive.server]
    pool_of(alive, discovery=discovery).refresh()
    assert discovery.servers() == [alive.server]
    with pytest.raises(ServerDied, match=f"not ready after 0 s: server {dead.server.address}"):
        wait_until_ready(Discovery((dead.server,)), timeout_s=0)
    waited = f"waiting up to 0 s for inference servers that do not answer yet: {dead.server.address}"
    assert waited in caplog.messages


# ---- identity


def test_a_server_of_the_runs_model_is_accepted_wherever_its_machine_mounts_it(start_fake, tmp_path):
    fake = start_fake()
    model = run_model(str(write_config(tmp_path / "tiny", architectures=["LlamaForCausalLM"])))
    SGLANG.check_identity(fake.server, SGLANG.ask_identity(fake.server), model)


def test_a_wrong_server_that_joins_a_running_training_is_ignored_with_one_warning(
    start_fake, pool_of, caplog, tmp_path
):
    good, wrong = start_fake(), start_fake()
    wrong.server_info["version"] = "0.3.0"
    names = FolderNames(tmp_path)
    discovery = Discovery((good.server,), names, "e", "t")
    pool = pool_of(good, discovery=discovery, model=run_model("tiny"))
    register_server(names, "e", "t", wrong.server.address)
    with caplog.at_level(logging.WARNING):
        pool.refresh()
        pool.refresh()
    assert pool.servers == [good.server]
    assert [r.message for r in caplog.records if "cannot join" in r.message] == [
        f"an inference server cannot join: the server at {wrong.server.address} is SGLang 0.3.0, which is too old: "
        "use 0.5 (0.5.23 is tested)"
    ]


def test_a_server_updated_by_an_earlier_run_reloads_the_models_own_weights_first(start_fake, pool_of):
    fresh, used = start_fake(), start_fake()
    used.weight_version = "12"
    pool_of(fresh, used, model=run_model("tiny")).load_first_weights(version=0)
    assert fresh.calls == []
    assert used.calls == [
        ("/update_weights_from_disk", {"model_path": "tiny", "weight_version": "0", "flush_cache": True})
    ]


# ---- routing


def test_prompts_take_turns_and_all_requests_of_a_prompt_go_to_one_server():
    router = Router([A, B])
    assert [router.choose(prompt) for prompt in (0, 1, 2, 0, 1, 2)] == [A, B, A, A, B, A]


def test_an_overloaded_server_loses_its_prompts():
    router = Router([A, B])
    home = router.choose("p")
    running = [router.request_to(home) for _ in range(SPARE_REQUESTS)]
    for request in running:
        request.__enter__()
    assert router.choose("p") == home  # 8 against 0 is not too much yet
    with router.request_to(home):
        assert router.choose("p") != home
    for request in running:
        request.__exit__(None, None, None)


def test_the_prompts_of_a_server_that_is_gone_find_another_and_a_failed_one_is_avoided():
    router = Router([A, B])
    assert router.choose("p") == A
    assert router.choose("p", avoid=A) == B
    router.servers = [A]
    assert router.choose("p") == A
    assert router.choose("p", avoid=A) == A  # there is no other
    router.servers = []
    assert router.choose("p") is None


# ---- the client


def sample(client: FleetClient, num_tokens: int = 3):
    return client.agenerate(ModelRequest(input_ids=[5], sampling=Sampling(max_new_tokens=num_tokens)))


def test_only_servers_with_the_current_weights_get_requests(start_fake):
    updated, missed, behind = start_fake(), start_fake(), start_fake()
    updated.weight_version, behind.weight_version = "1", "0"

    async def body(client):
        await asyncio.to_thread(client.set_version, 1)
        responses = [await sample(client) for _ in range(4)]
        missed.weight_version = "2"  # as during a weight update: newer weights are accepted
        client.refresh()
        return responses, set(client.router.servers)

    responses, requested = with_client([updated, missed, behind], body)
    assert [r.output_versions for r in responses] == [[1, 1, 1]] * 4
    assert missed.calls == behind.calls == []
    assert requested == {updated.server, missed.server}


def test_a_server_of_another_model_gets_no_request_even_before_the_first_update(start_fake, tmp_path):
    good, wrong = start_fake(), start_fake()
    wrong.server_info["version"] = "0.3.0"
    names = FolderNames(tmp_path)
    register_server(names, "e", "t", wrong.server.address)

    async def body(client):
        await asyncio.to_thread(client.refresh)
        return list(client.router.servers)

    discovery = Discovery((good.server,), names, "e", "t")
    assert with_client([good], body, discovery=discovery, model=run_model("tiny")) == [good.server]


def test_tokens_of_a_server_that_restarted_with_old_weights_are_discarded(start_fake):
    restarted, good = start_fake(), start_fake()
    restarted.weight_version = good.weight_version = "3"

    async def body(client):
        await asyncio.to_thread(client.set_version, 3)
        restarted.weight_version = "default"  # killed, and started again at its address
        return [await sample(client) for _ in range(3)]

    responses = with_client([restarted, good], body)
    assert [r.output_versions for r in responses] == [[3, 3, 3]] * 3
    assert len(restarted.calls) == 1


def test_first_weights_keep_their_version_when_the_reply_comes_after_an_update(start_fake):
    """The server reports "default"; the version at the time of arrival would be wrong."""

    async def body(client):
        requested = asyncio.create_task(sample(client))
        await asyncio.sleep(0)  # the request has read the version
        client.version = 5
        return await requested

    assert with_client([start_fake()], body, version=4).output_versions == [4, 4, 4]


def test_a_server_that_hangs_loses_its_requests_to_another(start_fake, serve_application):
    async def never(request):
        await asyncio.sleep(60)

    application = web.Application()
    application.router.add_route("*", "/{route}", never)
    servers = [serve_application(application), start_fake()]

    async def body(client):
        return await asyncio.wait_for(sample(client), 20)

    response = with_client(servers, body, health_interval_s=0.01, health_timeout_s=0.05)
    assert response.output_tokens == [6, 7, 8]


def test_a_server_that_answers_500_to_one_request_is_not_dropped(start_fake):
    fake = start_fake()
    fake.script = [(500, "boom")] * 3

    async def body(client):
        with pytest.raises(RequestRefused, match="answered 500: boom"):
            await sample(client)
        return await sample(client)

    assert with_client([fake], body, num_retries=2, retry_delay_s=0.001).output_tokens == [6, 7, 8]
