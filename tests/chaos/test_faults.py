"""Schedules are functions of their seed, and the proxy sends exactly what a fault says."""

import http.client
import json
import math
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from areal_debug.chaos.faults import (
    INNOCENT,
    KINDS,
    OF_CONTROL,
    PROCESS,
    WRONG_BODY,
    WRONG_JSON,
    WRONG_STATUS,
    Durations,
    Fault,
    make_schedule,
    spoil_json,
)
from areal_debug.chaos.proxy import FaultProxy
from areal_debug.chaos.scripted_server import VOCABULARY, ScriptedServer

BODY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}}


def test_a_seed_has_one_schedule_and_another_seed_another():
    schedules = [make_schedule(seed, 3, 200, Durations()) for seed in (1, 1, 2)]
    assert schedules[0] == schedules[1] != schedules[2]


def test_the_first_server_is_only_slow_busy_or_breaks_connections():
    schedule = make_schedule(1, 3, 2000, Durations())
    assert {fault.kind for fault in schedule if fault.server == 0} == set(INNOCENT)
    assert {fault.kind for fault in schedule if fault.server == 1 and fault.route == "generate"} == set(KINDS)
    assert {fault.kind for fault in schedule if fault.route == "control"} <= set(OF_CONTROL)


def test_kinds_that_are_not_wanted_are_not_scheduled():
    assert {fault.kind for fault in make_schedule(1, 3, 2000, Durations(), ("nan", "kill"))} == {
        "nan",
        "kill",
    }


def reply_bytes(count: int = 3) -> bytes:
    entries = [[-0.5, 10 + i, None] for i in range(count)]
    meta = {
        "finish_reason": {"type": "length"},
        "completion_tokens": count,
        "weight_version": "2",
        "weight_versions": [{"version": "2", "start": 0, "end": count}],
        "output_token_logprobs": entries,
    }
    return json.dumps({"output_ids": [10 + i for i in range(count)], "meta_info": meta}).encode()


@pytest.mark.parametrize("kind", WRONG_JSON)
def test_a_wrong_reply_is_json_and_differs_from_the_right_one(kind):
    body = spoil_json(kind, reply_bytes())
    spoiled, right = json.loads(body), json.loads(reply_bytes())
    assert json.dumps(spoiled) != json.dumps(right)
    entries = spoiled["meta_info"]["output_token_logprobs"]
    wrong = {
        "nan": lambda: math.isnan(entries[-1][0]),
        "minus_infinity": lambda: entries[-1][0] == -math.inf,
        "positive_logprob": lambda: entries[-1][0] > 0,
        "null_logprob": lambda: entries[-1][0] is None,
        "id_outside_vocabulary": lambda: entries[-1][1] == spoiled["output_ids"][-1] > VOCABULARY,
        "negative_id": lambda: entries[-1][1] < 0,
        "too_many_tokens": lambda: len(entries) == spoiled["meta_info"]["completion_tokens"] == 300,
        "wrong_count": lambda: len(entries) == spoiled["meta_info"]["completion_tokens"] - 1,
        "no_tokens": lambda: spoiled["meta_info"]["completion_tokens"] == len(entries) == 0,
        "unknown_finish": lambda: spoiled["meta_info"]["finish_reason"]["type"] == "weird",
        "missing_finish": lambda: "finish_reason" not in spoiled["meta_info"],
        "unknown_version": lambda: spoiled["meta_info"]["weight_versions"][0]["version"] == "1000",
    }
    assert wrong[kind]()


def test_a_reply_without_tokens_is_not_spoiled():
    assert spoil_json("nan", reply_bytes(count=0)) is None


@pytest.fixture(scope="module")
def behind():
    with closing_server(ScriptedServer("/models/tiny")) as server:
        yield server


@contextmanager
def closing_server(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """Kill the server at the end."""
    try:
        yield server
    finally:
        server.kill()


def ask(proxy: FaultProxy, path: str = "/generate", timeout_s: float = 10.0):
    """Return status, body and headers of one request on a connection of its own."""
    connection = http.client.HTTPConnection(proxy.server.address, timeout=timeout_s)
    with closing(connection):
        connection.request("POST" if path == "/generate" else "GET", path, json.dumps(BODY))
        reply = connection.getresponse()
        return reply.status, reply.read(), reply.headers


def proxy_of(behind, *faults: Fault):
    return closing(FaultProxy(behind, "server 1", faults))


def test_without_a_fault_a_reply_is_passed_on_and_noted(behind):
    with proxy_of(behind) as proxy:
        status, body, _ = ask(proxy)
        assert status == 200
        meta = json.loads(body)["meta_info"]
        (noted,) = proxy.replies
        assert (noted.prompt, noted.fault, noted.server) == ((5, 6, 7), "", "server 1")
        assert list(noted.tokens) == [entry[1] for entry in meta["output_token_logprobs"]]
        assert list(noted.logprobs) == [entry[0] for entry in meta["output_token_logprobs"]]
        assert noted.versions == (0,) * 4
        assert ask(proxy, "/model_info")[0] == 200


@pytest.mark.parametrize("kind", WRONG_JSON)
def test_a_wrong_reply_is_noted_with_its_fault_and_the_next_one_is_right(behind, kind):
    with proxy_of(behind, Fault(1, 0, kind)) as proxy:
        assert ask(proxy)[1] != ask(proxy)[1]
        assert [reply.fault for reply in proxy.replies if reply.tokens or not reply.fault] in (
            [kind, ""],
            [""],
        )
        assert proxy.injected == {kind: 1}


@pytest.mark.parametrize("kind", [*WRONG_BODY, *WRONG_STATUS])
def test_a_reply_that_is_none_is_not_noted(behind, kind):
    with proxy_of(behind, Fault(1, 0, kind)) as proxy:
        status, body, headers = ask(proxy)
        assert status == WRONG_STATUS.get(kind, 200)
        assert headers.get("Retry-After") == ("1" if kind == "status_429" else None)
        if kind in WRONG_BODY:
            with pytest.raises((ValueError, TypeError, KeyError)):
                json.loads(body)["meta_info"]
        assert proxy.replies == []


@pytest.mark.parametrize(
    ("kind", "error"), [("reset", http.client.HTTPException), ("half_body", http.client.IncompleteRead)]
)
def test_a_connection_is_broken(behind, kind, error):
    with proxy_of(behind, Fault(1, 0, kind)) as proxy:
        with pytest.raises((error, ConnectionError)):
            ask(proxy)
        assert proxy.replies == []
        assert ask(proxy)[0] == 200


def test_a_reply_to_another_prompt_is_noted_as_one(behind):
    with proxy_of(behind, Fault(1, 1, "reply_of_another")) as proxy:
        first = ask(proxy)[1]
        assert ask(proxy)[1] == first
        assert [reply.fault for reply in proxy.replies] == ["", "reply_of_another"]


def test_a_reply_that_is_sent_twice_is_the_next_one_of_its_connection(behind):
    with proxy_of(behind, Fault(1, 0, "reply_twice")) as proxy:
        host, _, port = proxy.server.address.rpartition(":")
        body = json.dumps(BODY).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(head.encode() + body)
            received = b""
            while received.count(b"HTTP/1.1 200 OK") < 2 or not received.endswith(b"}"):
                received += connection.recv(65536)
        _, first, second = (reply.rpartition(b"\r\n\r\n")[2] for reply in received.split(b"HTTP/1.1 200"))
        assert json.loads(first) == json.loads(second)


def test_a_delay_lasts_and_the_reply_is_right(behind):
    with proxy_of(behind, Fault(1, 0, "delay", seconds=0.3)) as proxy:
        began = time.monotonic()
        assert ask(proxy)[0] == 200
        assert time.monotonic() - began >= 0.3
        assert [reply.fault for reply in proxy.replies] == [""]


def test_a_server_that_hangs_answers_when_it_continues(behind):
    with proxy_of(behind, Fault(1, 0, "stop", seconds=0.4)) as proxy:
        began = time.monotonic()
        assert ask(proxy)[0] == 200
        assert time.monotonic() - began >= 0.3


def test_a_killed_server_refuses_connections_and_restarts_with_its_first_weights():
    server = ScriptedServer("/models/tiny")
    with closing_server(server), proxy_of(server, Fault(1, 0, "kill", seconds=0.3)) as proxy:
        server.version = "7"
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            ask(proxy)
        with pytest.raises(ConnectionError):
            ask(proxy)
        proxy.end_faults()
        assert json.loads(ask(proxy, "/model_info")[1])["weight_version"] == "default"
        assert proxy.injected == {"kill": 1}
        assert set(proxy.injected) <= set(PROCESS)
