"""Serving from a thread: what is still connecting at the end leaves neither sockets nor tasks."""

import asyncio
import gc
import http.client
import logging
import socket
import time
import warnings

import pytest
from aiohttp import web

from areal_core.rollout.http_thread import HttpThread


async def answer(request: web.Request) -> web.Response:
    return web.Response(text="here")


async def never(request: web.Request) -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError


def application() -> web.Application:
    served = web.Application()
    served.router.add_get("/answer", answer)
    served.router.add_get("/never", never)
    return served


def test_requests_are_answered_until_it_is_closed_and_closing_again_does_nothing():
    served = HttpThread(application(), "served")
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=5)
    connection.request("GET", "/answer")
    assert connection.getresponse().read() == b"here"
    connection.close()
    served.close()
    served.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", served.port), timeout=5)
    assert not served.thread.thread.is_alive()


def test_a_request_that_is_no_http_is_refused_without_a_traceback_in_the_log(caplog):
    served = HttpThread(application(), "served")
    for request in (b"GET /answer HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"GET /" + b"a" * 9000 + b"\r\n"):
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection:
            connection.sendall(request)
            assert b" 400 Bad Request" in connection.recv(1000)
    served.close()
    assert "Error handling request" not in caplog.text


def test_connections_that_arrive_while_it_closes_are_closed(caplog):
    served = HttpThread(application(), "served")
    served.thread.loop.call_soon_threadsafe(time.sleep, 0.1)  # connections and the close arrive in one turn
    clients = [socket.create_connection(("127.0.0.1", served.port), timeout=5) for _ in range(20)]
    for client in clients:
        client.sendall(b"GET /never HTTP/1.1\r\nHost: here\r\n\r\n")
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.WARNING, "asyncio"):
        warnings.simplefilter("always")
        served.close()
        del served
        gc.collect()
    assert [str(warning.message) for warning in warned] == []
    assert caplog.messages == []
    for client in clients:
        client.close()
