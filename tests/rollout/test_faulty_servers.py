"""Servers that answer wrongly, hang, or ask for a delay, beside one that does not."""

import asyncio
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from aiohttp import web

from areal_core.rollout.errors import RequestRefused, ServerDied, WeightUpdateFailed
from areal_core.rollout.types import ModelRequest, ModelResponse, Sampling
from areal_core.servers import health
from areal_core.servers.health import State
from areal_core.servers.identity import RunModel
from areal_core.servers.sglang import SGLANG
from areal_core.servers.verification import WeightCheck
from tests.rollout.chaos.faults import REFUSED, WRONG_BODY, WRONG_JSON, WRONG_STATUS, with_logprob
from tests.rollout.sampled import ask, with_client

VOCABULARY = 1000
MODEL = RunModel("tiny", {"vocab_size": VOCABULARY})


def run_requests(fakes, count=20, num_tokens=3, **options):
    """Return the client, closed, and the response to each request, or its exception."""
    sampling = Sampling(max_new_tokens=num_tokens)
    requests = [
        ModelRequest(input_ids=[i], sampling=sampling, metadata={"prompt_id": i}) for i in range(count)
    ]

    async def body(client):
        return client, await asyncio.gather(*map(client.agenerate, requests), return_exceptions=True)

    return with_client(fakes, body, model=MODEL, retry_delay_s=0.01, knows_versions=True, **options)


def spoiling(kind):
    """Return a `spoil` with a fault of the schedules."""

    def spoil(reply):
        if kind in WRONG_STATUS:
            return WRONG_STATUS[kind], REFUSED.decode(), {}
        if kind in WRONG_BODY:
            return 200, WRONG_BODY[kind](json.dumps(reply).encode()).decode(), {}
        WRONG_JSON[kind](reply)
        return reply

    return spoil


# The rule that a fault breaks, and what is said of it.
FAULTS = {
    "nan": ("logprobs_finite", "nan at token 2"),
    "minus_infinity": ("logprobs_finite", "-inf at token 2"),
    "null_logprob": ("malformed", "TypeError"),
    "positive_logprob": ("logprobs_at_most_0", "3.0 at token 2"),
    "id_outside_vocabulary": ("ids_in_vocabulary", "1000000000 at token 2"),
    "negative_id": ("ids_in_vocabulary", "-3 at token 2"),
    "id_as_text": ("malformed", "TypeError"),
    "id_with_fraction": ("malformed", "TypeError"),
    "too_many_tokens": ("max_new_tokens", "300 tokens, and 3 were asked"),
    "unknown_finish": ("finish_reason", "weird"),
    "missing_finish": ("malformed", "KeyError"),
    "no_tokens": ("not_empty", "no token, and finish reason 'stop'"),
    "other_request": ("request_id", "'other'"),
    "no_request": ("request_id", "'None'"),
    "unknown_version": ("weight_version", "version 1000, and the newest is 1"),
    "wrong_count": ("counts_agree", "2 logprobs for 3 tokens"),
    "versions_of_other_tokens": ("counts_agree", "versions of 1000000000000 tokens for 3"),
    "cut_json": ("malformed", "JSONDecodeError"),
    "html": ("malformed", "Bad Gateway"),
    "null": ("malformed", "null"),
    "list": ("malformed", "[1]"),
    "empty": ("malformed", "JSONDecodeError"),
    "status_404": ("http_404", "answered 404: {"),
    "status_403": ("http_403", "answered 403: {"),
    "status_400": ("http_400", "answered 400: {"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_breaks_a_rule_is_quarantined_and_its_requests_are_sent_elsewhere(
    start_fake, caplog, fault
):
    rule, seen = FAULTS[fault]
    bad, good = start_fake(), start_fake()
    bad.spoil = spoiling(fault)
    with caplog.at_level(logging.WARNING):
        client, responses = run_requests([bad, good])
    assert [r.output_tokens for r in responses] == [[i + 1, i + 2, i + 3] for i in range(20)]
    assert all(max(r.output_logprobs) <= 0 for r in responses)
    record = client.health.record(bad.server)
    assert record.state is State.QUARANTINED
    assert record.ok == 0
    assert record.rejected[rule] >= 1
    assert seen in record.example
    assert client.health.record(good.server).ok == 20
    named = [message for message in caplog.messages if bad.server.address in message]
    assert len(named) == 1
    assert "quarantined" in named[0]
    [line] = client.health.lines()
    assert line.startswith(f"{bad.server.address} quarantined: 0 of ")
    assert rule in line


def test_a_positive_logprob_by_rounding_becomes_0(start_fake):
    fake = start_fake()
    fake.spoil = lambda reply: with_logprob(1.2e-7)(reply) or reply
    client, [response] = run_requests([fake], 1)
    assert response.output_logprobs == [-0.01, -0.02, 0.0]
    assert client.health.lines() == []


def test_a_request_that_is_never_answered_in_time_names_the_option(start_fake, serve_application):
    async def slowly(request):
        await asyncio.sleep(0 if request.method == "GET" else 30)
        return web.json_response({"weight_version": "default"})

    servers = []
    for _ in range(2):
        application = web.Application()
        application.router.add_route("*", "/{route}", slowly)
        servers.append(serve_application(application))

    request = ModelRequest(input_ids=[1], sampling=Sampling(max_new_tokens=3))
    with pytest.raises(ServerDied, match=r"no reply within 0.1 s \(rollout.request_timeout\), 3 times"):
        ask(servers, [request], timeout_s=0.1, num_retries=2)


@pytest.mark.long
def test_file_descriptors_that_run_out_are_no_fault_of_a_server(tmp_path):
    """256 descriptors and 600 requests at once, in a process of its own."""
    script = tmp_path / "many.py"
    script.write_text(MANY_REQUESTS)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.stdout == "600 answered, 2 serving, 0 errors\n", done.stderr[-2000:]


MANY_REQUESTS = """
import asyncio, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from aiohttp import web
from areal_core.servers.client import FleetClient
from areal_core.servers.server import Server
from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.servers.sglang import SGLANG


async def generate(request):
    body = await request.json()
    await asyncio.sleep(0.2)
    meta = {"id": body["rid"], "finish_reason": {"type": "length"}, "completion_tokens": 1,
            "weight_version": "0", "output_token_logprobs": [[-0.5, 7, None]]}
    return web.json_response({"meta_info": meta})


async def version(request):
    return web.json_response({"weight_version": "0"})


async def serve():
    application = web.Application()
    application.router.add_post("/generate", generate)
    application.router.add_get("/model_info", version)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return Server(f"127.0.0.1:{site._server.sockets[0].getsockname()[1]}"), runner


async def main():
    (one, first), (two, second) = await serve(), await serve()
    client = FleetClient([one, two], SGLANG)
    sampling = Sampling(max_new_tokens=1)
    responses = await asyncio.gather(
        *(client.agenerate(ModelRequest(input_ids=[i], sampling=sampling)) for i in range(600))
    )
    errors = sum(record.errors.total() for record in client.health.records())
    print(f"{len(responses)} answered, {len(client.health.serving())} serving, {errors} errors")
    await client.aclose()
    await first.cleanup()
    await second.cleanup()


asyncio.run(main())
"""


def test_a_request_that_every_server_refuses_is_ours_and_no_server_is_quarantined(start_fake):
    fakes = [start_fake(), start_fake(), start_fake()]
    for fake in fakes:
        fake.spoil = lambda reply: (400, "the context is too long", {})
    client, [refused] = run_requests(fakes, 1)
    assert isinstance(refused, RequestRefused)
    assert "the context is too long" in str(refused)
    assert [len(fake.calls) for fake in fakes] == [1, 1, 1]
    assert client.health.lines() == []


def test_a_request_that_a_server_refuses_waits_for_one_that_is_busy(start_fake):
    """Two faulty servers prove nothing about the request while a third one is only busy."""
    bad, worse, busy = start_fake(), start_fake(), start_fake()
    bad.spoil = worse.spoil = lambda reply: (400, "bad", {})
    replies = iter([(429, "slow down", {"Retry-After": "1"})])
    busy.spoil = lambda reply: next(replies, reply)
    client, [response] = run_requests([busy, bad, worse], 1)
    assert response.output_tokens == [1, 2, 3]
    assert {client.health.record(fake.server).state for fake in (bad, worse)} == {State.QUARANTINED}


def test_a_trial_ends_a_quarantine(start_fake, monkeypatch):
    monkeypatch.setattr(health, "QUARANTINE_S", 0.05)
    fake = start_fake()
    spoiled = iter([True, True])
    fake.spoil = lambda reply: spoiling("nan")(reply) if next(spoiled, False) else reply
    client, [response] = run_requests([fake], 1, health_interval_s=0.02)
    assert response.output_tokens == [1, 2, 3]
    assert client.health.record(fake.server).rejected == {"logprobs_finite": 1, "trial": 1}
    assert client.health.record(fake.server).state is State.SERVING


def test_the_only_server_that_never_recovers_ends_the_request_with_its_evidence(start_fake, monkeypatch):
    monkeypatch.setattr(health, "QUARANTINE_S", 0.01)
    fake = start_fake()
    fake.spoil = spoiling("nan")
    _, [died] = run_requests([fake], 1, health_interval_s=0.02)
    assert isinstance(died, ServerDied)
    assert "a reply breaks the rule logprobs_finite: nan at token 2" in str(died)


def test_a_server_that_asks_for_a_delay_gets_no_request_meanwhile(start_fake, caplog):
    busy, free = start_fake(), start_fake()
    busy.spoil = lambda reply: (429, "slow down", {"Retry-After": "30"})
    with caplog.at_level(logging.WARNING):
        client, responses = run_requests([busy, free])
    assert all(isinstance(response, ModelResponse) for response in responses)
    assert client.health.record(busy.server).state is State.SERVING
    assert caplog.text.count("asks for a delay (status 429): no requests for 30 s") == 1


@pytest.mark.parametrize(
    "route", ["/pause_generation", "/update_weights_from_disk", "/continue_generation", "/weights_checker"]
)
def test_one_server_that_refuses_a_weight_update_is_left_out_of_it(start_fake, update_by_disk, route):
    refusing, good = start_fake(), start_fake()
    refusing.refuse[route] = (500, {"error": {"message": "boom"}})
    update = update_by_disk(refusing, good, check=WeightCheck(every=0))
    if route == "/weights_checker":
        update.pool.post(SGLANG.checksums())
    else:
        update.send(iter({"w": torch.ones(2)}.items()), 1)
    assert update.pool.servers == [good.server]
    del refusing.refuse[route]
    update.send(iter({"w": torch.ones(2)}.items()), 2)
    assert set(update.pool.servers) == {refusing.server, good.server}


def test_a_weight_update_that_every_server_refuses_is_an_error(start_fake, update_by_disk):
    fakes = [start_fake(), start_fake()]
    for fake in fakes:
        fake.refuse["/update_weights_from_disk"] = (400, {"success": False, "message": "no such tensor"})
    with pytest.raises(WeightUpdateFailed, match="no such tensor"):
        update_by_disk(*fakes).send(iter({"w": torch.ones(2)}.items()), 1)
