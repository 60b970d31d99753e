"""Embedded servers with one fault in their weight updates, each in a process of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from aiohttp import web

from areal_core.testing import embedded_server
from areal_core.testing.embedded_server import EmbeddedServer

from ..rollout.conftest import ServerProcess

DROPPED = "model.layers.1.mlp.down_proj.weight"


def drops_a_tensor(server: EmbeddedServer) -> None:
    change_loads(server, lambda tensors: [pair for pair in tensors if pair[0] != DROPPED])


def ignores_a_repeated_part(server: EmbeddedServer) -> None:
    last = [[]]

    def keep(tensors):
        names = [name for name, _ in tensors]
        is_repeated, last[0] = names == last[0], names
        return [] if is_repeated and len(names) < 18 else tensors

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
    load, sampler = server._load_from_group, server.sampler

    def early(body):
        sampler.version = body.weight_version or sampler.version
        return load(body)

    server._load_from_group = early


def serve(plant, model: str, host: str, port: int) -> None:
    server = EmbeddedServer(model)
    plant(server)
    web.run_app(server.application(), host=host, port=port, print=None)


@contextmanager
def serving(model: str, plant=id) -> Iterator[str]:
    """Yield the address of a server in another process; `id` plants no fault, and can be pickled."""
    process = ServerProcess(model, serve=partial(serve, plant))
    try:
        yield process.wait_until_ready().server.address
    finally:
        process.kill()
