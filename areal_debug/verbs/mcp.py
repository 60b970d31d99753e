"""`areal-debug mcp`: let a coding agent ask, as a server of the Model Context Protocol."""

from pathlib import Path

import click

from areal_debug.cli import Verb, json_option
from areal_debug.render import console, print_json, styled
from areal_debug.waiting import leave_terminal


@click.command(
    cls=Verb,
    example="areal-debug mcp --root runs\n"
    "claude mcp add areal-debug -- areal-debug mcp --root runs\n"
    "areal-debug mcp --root runs --http --port 8765",
)
@click.option(
    "--root",
    "roots",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder below which all paths must be, by default the current one; may be repeated.",
)
@click.option(
    "--allow-run",
    is_flag=True,
    help="Offer tools that execute code, start processes or read those of a job: replay, bisect, live hangs.",
)
@click.option(
    "--http", is_flag=True, help="Serve streamable HTTP on this machine, not standard input and output."
)
@click.option("--port", type=click.IntRange(0, 65535), help="Port of --http; by default any free one.")
@json_option
def command(roots: tuple[Path, ...], allow_run: bool, http: bool, port: int | None, as_json: bool) -> None:
    """Serve the Model Context Protocol: tools that answer a coding agent's questions about hangs,
    learning, log-probs and records, with a verdict and the next calls.

    Without --http the agent's program starts this command and talks to its standard input and
    output. With it, the address has a key, which only the user is shown; --json prints it as JSON.
    """
    if port is not None and not http:
        raise click.UsageError("--port is that of --http: give both.")
    if as_json and not http:
        raise click.UsageError("--json prints the address of --http: give both.")
    from importlib.metadata import version

    import anyio
    from mcp.server.stdio import stdio_server

    from areal_debug.mcp.roots import parse_roots
    from areal_debug.mcp.server import make_server

    server = make_server(parse_roots(roots), allow_run, version("areal-debug"))
    leave_terminal()
    if http:
        from areal_debug.mcp.listening import serve

        serve(server, port or 0, lambda address: show(address, as_json))
        return

    async def talk() -> None:
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    anyio.run(talk)


def show(address: str, as_json: bool) -> None:
    if as_json:
        print_json({"url": address})
    else:
        console().print(styled("the server is at {} (Ctrl-C ends it)", address))
