"""`areal-debug view`: write a record as an HTML page: curves over steps, every token of a step."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from areal_core.safety.durable import commit_file
from areal_debug.cli import Verb, force_option, json_option, output_option, step_option
from areal_debug.confined import ANYWHERE, reads_untrusted
from areal_debug.render import (
    console,
    errors_as_sentences,
    fail,
    format_bytes,
    note,
    print_json,
    refuse_existing,
    styled,
    with_progress,
)

if TYPE_CHECKING:
    from areal_debug.view.text import Decode
    from recorder import Record


def compiled(
    context: click.Context, option: click.Parameter, patterns: tuple[str, ...]
) -> list[re.Pattern[str]]:
    """Compile the patterns; a wrong one is the user's mistake."""
    try:
        return [re.compile(pattern) for pattern in patterns]
    except re.error as error:
        raise click.BadParameter(f"{error.pattern!r} is no regular expression: {error}") from error


@click.command(cls=Verb, example="areal-debug view runs/record --step 3 -o step3.html")
@click.argument("record", type=click.Path(path_type=Path))
@step_option("the last")
@output_option("HTML file to write; by default RECORD-stepN.html.")
@force_option
@click.option("--redact", "patterns", multiple=True, metavar="PATTERN", callback=compiled,
              help="Replace text and token ids that match this regular expression; may be repeated.")  # fmt: skip
@click.option(
    "--serve", is_flag=True, help="Serve the page on this machine and follow the record as it grows."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port of --serve; by default any free one."
)
@json_option
@errors_as_sentences
def command(
    record: Path,
    step: int | None,
    output: Path | None,
    force: bool,
    patterns: list[re.Pattern[str]],
    serve: bool,
    port: int,
    as_json: bool,
) -> None:
    """Write RECORD as one HTML file that needs no network: curves over steps, samples, and every
    token with its numbers.
    """
    if serve:
        serve_page(record, patterns, port, as_json)
    else:
        write_view(record=record, step=step, output=output, force=force, patterns=patterns, as_json=as_json)


@reads_untrusted("record", outputs="output", reads=ANYWHERE)
@errors_as_sentences
def write_view(
    record: Path,
    step: int | None,
    output: Path | None,
    force: bool,
    patterns: list[re.Pattern[str]],
    as_json: bool,
) -> None:
    """Write the page of one step, in a confined child."""
    from areal_debug.record.decode import load_decoder
    from recorder import open_record

    opened = open_record(record)
    decode = load_decoder(opened)
    if not opened.steps:
        fail(f"{record} holds no committed step: nothing to show; --serve waits for the first")
    number = opened.steps[-1] if step is None else step
    output = output or Path(f"{record.absolute().name}-step{number}.html")
    refuse_existing(output, force)
    size_bytes = write_page(opened, number, decode, patterns, output)
    if as_json:
        print_json({"record": str(record), "step": number, "output": str(output), "size_bytes": size_bytes})
        return
    console().print(styled("{} ({}): open it in a browser", output, format_bytes(size_bytes)))


def write_page(
    record: "Record", step: int, decode: "Decode | None", patterns: list[re.Pattern[str]], output: Path
) -> int:
    """Write the page of one step; return its size in bytes."""
    from areal_debug.view.data import MAX_CURVE_STEPS, read_run, read_step, redacted_run
    from areal_debug.view.page import static_page

    view = read_step(record.step(step), decode, patterns, record.header.trainer)
    total = min(len(record.steps), MAX_CURVE_STEPS)
    run = with_progress("reading steps", total, lambda tick: read_run(record, tick))
    page = static_page(redacted_run(run, patterns), view).encode()
    commit_file(output, page)
    return len(page)


def serve_page(path: Path, patterns: list[re.Pattern[str]], port: int, as_json: bool) -> None:
    """Serve until interrupted."""
    from areal_debug.record.decode import load_decoder
    from areal_debug.view.server import FollowedRecord, make_server
    from recorder import open_record

    record = str(path)
    decode = load_decoder(open_record(path))
    try:
        server = make_server(FollowedRecord(record, decode, patterns), port)
    except OSError as error:
        raise ValueError(f"cannot listen on port {port}: {error.strerror}; choose another --port") from error
    with server:
        address = f"http://127.0.0.1:{server.server_port}/"
        if as_json:
            print_json({"record": record, "url": address})
        else:
            console().print(styled("{} at {} (Ctrl-C ends it)", record, address))
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            note("ended")
