"""`areal-debug serve`: start, list and stop inference servers to debug agents against."""

import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from areal_core.safety.private import default_names_root
from areal_debug.cli import Verb, json_option
from areal_debug.render import console, fail, is_quiet, note, print_json, styled
from areal_debug.waiting import leave_terminal

if TYPE_CHECKING:
    from areal_debug.serve.keeper import ServeSpec
    from areal_debug.serve.state import ServerState


@click.command(
    cls=Verb,
    context_settings={"ignore_unknown_options": True},
    example="areal-debug serve --model MODEL --background\nareal-debug serve --stop 127.0.0.1:30000",
)
@click.option("--model", help="Checkpoint folder, or a name on the hub.")
@click.option(
    "--backend",
    "engine",
    type=click.Choice(["sglang", "embedded"]),
    default="sglang",
    show_default=True,
    help="Kind of inference engine.",
)
@click.option("--background", is_flag=True, help="Return once it is healthy; it outlives the shell.")
@click.option("--status", is_flag=True, help="List the servers of this folder: health and load.")
@click.option("--stop", is_flag=True,
              help="Stop the servers at HOST:PORT..., or those started in this folder.")  # fmt: skip
@click.option("--all", "of_all", is_flag=True, help="With --status or --stop: all servers of this user.")
@click.option(
    "--join", "run", metavar="EXPERIMENT[/TRIAL]", help="Add the server to a run, which may be running."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port; by default any free one.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Device of the model."
)
@click.option("--dtype", default="auto", show_default=True, help="Data type of the weights.")
@click.option("--context-length", type=int, help="Longest sequence; by default the model's.")
@click.option("--names", "names_root", default=default_names_root, show_default="of this user in /tmp",
              help="Folder of the run's names (cluster.name_resolve.nfs_record_root).")  # fmt: skip
@click.option(
    "--timeout",
    "ready_timeout_s",
    type=float,
    default=300.0,
    show_default=True,
    help="Seconds to become ready.",
)
@json_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    model: str | None,
    background: bool,
    status: bool,
    stop: bool,
    of_all: bool,
    port: int,
    as_json: bool,
    arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Serve a model until it is stopped, and print AREAL_LLM_SERVER_ADDRS=host:port once it is
    healthy.

    ARGUMENTS after -- go to the server itself: areal-debug serve --model M -- --enable-multimodal.
    """
    from areal_core.errors import ServerFailed
    from areal_debug.serve.start import plan_server

    if status:
        show_status(port, of_all, as_json)
    if stop:
        stop_servers([*arguments, *([str(port)] if port else [])], of_all, as_json)
    if model is None:
        raise ValueError("--model is missing: give a checkpoint folder, or use --status or --stop")
    spec = plan_server(model=model, port=port, arguments=list(arguments), **options)
    report(as_json, f"starting {spec.engine} on {spec.address}; its log is {spec.log}")
    try:
        serve(spec, background, as_json)
    except ServerFailed as failure:
        fail(str(failure), 1)


def serve(spec: "ServeSpec", background: bool, as_json: bool) -> None:
    """Start the server, here or in the background, and print its facts once it is ready."""
    from areal_debug.serve.keeper import keep, keep_in_background

    if background:
        show_facts(keep_in_background(spec), as_json)
        report(
            as_json, "it outlives this shell: see `areal-debug serve --status`, `areal-debug serve --stop`"
        )
        return
    keep(spec, lambda state: show_facts(state, as_json))


def show_facts(state: "ServerState", as_json: bool) -> None:
    """Query the server's facts and print them; with --quiet its address alone."""
    from areal_core.servers.server import Server
    from areal_debug.report.terminal import print_report
    from areal_debug.serve.facts import read_facts
    from areal_debug.serve.report import address_line, document_of_server, report_of_server

    facts = read_facts(Server(state.address))
    if as_json:
        print_json(document_of_server(facts, state))
    elif is_quiet():
        console().print(address_line(facts.address))
    else:
        print_report(console(), report_of_server(facts, state))
    sys.stdout.flush()
    leave_terminal()  # it waits for requests


def show_status(port: int, of_all: bool, as_json: bool) -> NoReturn:
    """List the servers of this folder, at a port, or all; exit code 0 if there is at least one and all are ready, 2 if one starts."""
    from concurrent.futures import ThreadPoolExecutor

    from areal_debug.report.terminal import print_answer
    from areal_debug.serve.report import document_of_all, report_of_all, status_of
    from areal_debug.serve.state import known_servers

    known = [one for one in known_servers() if port in (0, int(one.address.rpartition(":")[2]))]
    states = known if of_all or port else of_this_folder(known)
    with ThreadPoolExecutor() as threads:
        statuses = list(threads.map(status_of, states))
    report = report_of_all(statuses, num_elsewhere=len(known) - len(states))
    print_answer(document_of_all(statuses), report, as_json)
    raise SystemExit(report.exit_code if statuses else 1)


def stop_servers(named: list[str], stops_all: bool, as_json: bool) -> NoReturn:
    """Stop the named servers, else those that were started in this folder, else refuse."""
    from areal_debug.serve.state import known_servers, stop_keeper

    known = known_servers()
    states = known if stops_all else of_this_folder(known)
    if named:  # addresses or ports
        by_name = {
            name: state for state in known for name in (state.address, state.address.rpartition(":")[2])
        }
        if lacking := [name for name in named if name not in by_name]:
            there_are = ", ".join(state.address for state in known) or "none"
            raise ValueError(f"there is no server at {', '.join(lacking)}; there are {there_are}")
        states = [by_name[name] for name in named]
    elif known and not states:
        others = ", ".join(f"{state.address} (in {state.folder or 'an unknown folder'})" for state in known)
        raise ValueError(f"no server was started in this folder, but {others}: name it, or add --all")
    for state in states:
        stop_keeper(state)
    if as_json:
        print_json({"stopped": [state.address for state in states]})
    else:
        listed = ", ".join(state.address for state in states)
        console().print(styled("stopped {}", listed) if states else "there is no server to stop")
    raise SystemExit(0 if states else 1)


def of_this_folder(known: "list[ServerState]") -> "list[ServerState]":
    return [state for state in known if state.folder == os.getcwd()]


def report(as_json: bool, text: str) -> None:
    """Print progress on standard error."""
    if not as_json:
        note(text)
