"""Embedded servers with one fault in their weight updates, each in a process of its own."""

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from areal_core.launch.server_process import free_port
from areal_core.servers.server import Server, wait_until_healthy
from areal_core.testing import embedded_server
from areal_core.testing.embedded_server import EmbeddedServer

DROPPED = "model.layers.1.mlp.down_proj.weight"


def drops_a_tensor(server: EmbeddedServer) -> None:
    change_loads(server, lambda tensors: [pair for pair in tensors if pair[0] != DROPPED])


def ignores_a_repeated_part(server: EmbeddedServer) -> None:
    last = [""]

    def keep(tensors):
        names = ",".join(name for name, _ in tensors)
        is_repeated, last[0] = names == last[0], names
        is_part = len(tensors) < len(server._replica._parameters) - 1  # one is tied
        return [] if is_repeated and is_part else tensors

    change_loads(server, keep)


def change_loads(server: EmbeddedServer, change) -> None:
    load = server.sampler.load
    server.sampler.load = lambda tensors, *rest, **options: load(change([*tensors]), *rest, **options)


def keeps_the_prefix_cache(server: EmbeddedServer) -> None:
    server._replica.prefixes.clear = lambda: None


def keeps_the_first_adapter(server: EmbeddedServer) -> None:
    read, seen = embedded_server.read_adapter, []
    embedded_server.read_adapter = lambda folder: (seen or seen.append(read(folder)) or seen)[0]


def reports_the_version_before_the_load(server: EmbeddedServer) -> None:
    load = server._load_from_group

    def early(body):
        server.sampler.version = body.weight_version or server.sampler.version
        return load(body)

    server._load_from_group = early


def labels_tokens_with_the_last_version(server: EmbeddedServer) -> None:
    reply = server._reply

    def relabelled(job, seconds):
        job.versions = job.versions[-1:] * len(job.versions)
        return reply(job, seconds)

    server._reply = relabelled


def serve(model: str, port: int, plant) -> None:
    server = EmbeddedServer(model)
    if plant is not None:
        plant(server)
    web.run_app(server.application(), host="127.0.0.1", port=port, print=None, loop=asyncio.new_event_loop())


@contextmanager
def serving(model: str, plant=None) -> Iterator[str]:
    """Yield the address of a server in another process: both ends of a group need their own."""
    forks, port = multiprocessing.get_context("forkserver"), free_port()
    forks.set_forkserver_preload(["areal_core.testing.embedded_server"])
    process = forks.Process(target=serve, args=(model, port, plant), daemon=True)
    process.start()
    try:
        wait_until_healthy([Server(f"127.0.0.1:{port}")], 120.0)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.join()
