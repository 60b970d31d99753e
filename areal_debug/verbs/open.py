"""`areal-debug open`: a record, or everything that a run left, as pages: served here or written.

A record is one page: curves over steps, and every token of a step; with `--compare`, a second
record or step beside the first one. A folder of a run is a workbench of pages.
"""

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal_debug.cli import Verb, force_option, json_option, output_option, sample_option, step_option
from areal_debug.confined import ANYWHERE, reads_untrusted
from areal_debug.render import (
    console,
    count,
    end_if_damaged,
    fail,
    format_bytes,
    print_json,
    refuse_existing,
    styled,
    with_progress,
)
from areal_debug.waiting import leave_terminal

if TYPE_CHECKING:
    from areal_debug.open.items import Item
    from areal_debug.view.page import Contents, FollowedRecord, Place

CPU_S = 60.0  # a long record costs more than its bytes
At = tuple[int, int | None, int | None]


class Asked(NamedTuple):
    """The options that say what the page shows."""

    step: int | None
    other: Path | None
    other_step: int | None
    at: At | None
    all_steps: bool


NOTHING_ASKED = Asked(None, None, None, None, False)


def parsed_at(context: click.Context, option: click.Parameter, text: str | None) -> At | None:
    if text is None:
        return None
    found = re.fullmatch(r"(-?[0-9]{1,18})(?:\.([0-9]{1,18})(?:\.([0-9]{1,18}))?)?", text)
    if not found:
        raise click.BadParameter(f"{text!r} is no place: give PROMPT.SAMPLE or PROMPT.SAMPLE.TOKEN, as 4.1.7")
    prompt, sample, token = (None if number is None else int(number) for number in found.groups())
    assert prompt is not None
    return prompt, sample, token


@click.command(
    cls=Verb,
    example="areal-debug open --sample\nareal-debug open runs\nareal-debug open runs/record --step 3 --at 4.1 -o step3.html\n"
    "areal-debug open runs/record --compare runs/other --all-steps -o pages",
)
@click.argument("path", metavar="RECORD|RUN", required=False, type=click.Path(path_type=Path))
@sample_option
@step_option("the last")
@click.option(
    "--compare", "other", type=click.Path(path_type=Path), metavar="RECORD",
    help="Show the same step of this record beside it, sample by sample and token by token.",
)  # fmt: skip
@click.option(
    "--compare-step", "other_step", type=int, metavar="N",
    help="Step of --compare; by default the same. Without --compare, of RECORD itself.",
)  # fmt: skip
@click.option(
    "--at", metavar="PROMPT.SAMPLE[.TOKEN]", callback=parsed_at, help="Open the page at a sample or token."
)
@click.option(
    "--all-steps", is_flag=True,
    help="Write every step: a folder that loads a step when it is shown, or one file if -o ends in .html.",
)  # fmt: skip
@output_option("File or folder to write the pages into; without it, they are served on this machine.")
@click.option(
    "--save",
    is_flag=True,
    hidden=True,  # of `view`: a page named after the record and its step
)
@force_option
@click.option("--serve", is_flag=True, hidden=True)  # the default since 0.3
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port of the server; by default any free one."
)
@json_option
def command(
    path: Path | None,
    sample: bool,
    output: Path | None,
    save: bool,
    force: bool,
    serve: bool,
    port: int,
    as_json: bool,
    **asked: object,
) -> None:
    """Show RECORD as a page that needs no network: curves over steps, groups, histograms, samples,
    every token with its numbers, and a search. Or find what a run left below the folder RUN, and
    show it in one workbench of pages: records, metrics, hangs, traces, inference servers,
    checkpoints, reports.

    Without -o the pages are served at 127.0.0.1 and follow the record or run as it grows. With
    --json and without -o, what a run left is listed.
    """
    from areal_debug.doctor.rows import is_record
    from areal_debug.sample import unpacked

    if (path is None) != sample:
        raise click.UsageError("Give a RECORD, the folder of a RUN, or --sample.")
    path = path or unpacked()
    if output is not None and output.suffix == ".html" and path.is_dir() and not is_record(path):
        path = only_record(path, output)
    wanted = Asked(**asked)  # type: ignore[arg-type]
    lists = as_json and output is None and not save and not serve
    if (is_record(path) and not lists) or save or serve or wanted != NOTHING_ASKED:
        if serve or (output is None and not save and not as_json):
            serve_page(path, wanted, port, as_json)
        else:
            write_view(
                record=path, other=wanted.other, asked=wanted, output=output, force=force, as_json=as_json
            )
        return
    open_run(path, output, force, port, as_json)


def only_record(run: Path, output: Path) -> Path:
    """Return the record of a run of which one page is wanted. Raises ValueError if it is not one."""
    records = [file.parent for file in run.glob("**/record.json")]
    if len(records) != 1:
        has = f"{run} has {count(len(records), 'record')}"
        raise ValueError(f"{output} is one page, and {has}: give -o FOLDER for all pages, or one record")
    return records[0]


def open_run(run: Path, output: Path | None, force: bool, port: int, as_json: bool) -> None:
    """Show what a run left below a folder."""
    if output is not None:
        refuse_existing(output, force)
        if output.resolve().is_relative_to(run.resolve()):  # the next search would find its pages
            raise ValueError(f"{output} is inside of {run}: give --output a folder elsewhere")
    if output is None and not as_json:
        from areal_debug.open.served import serve_workbench

        serve_workbench(run, port)
        return
    with tempfile.TemporaryDirectory(prefix="areal-debug-") as scratch:
        places = [Path(scratch) / "traces", *([output] if output else [])]
        write(run=run, output=output, places=places, as_json=as_json)


@reads_untrusted("run", outputs="places", reads=ANYWHERE, cpu_s=CPU_S)
def write(run: Path, output: Path | None, places: Sequence[Path], as_json: bool) -> None:
    """Read the run, and write or list what was found, in a confined child.

    `places` are what the child may write: a scratch folder, and the output.
    """
    from areal_core.safety.scratch import unfinished_folder
    from areal_debug.open.find import find
    from areal_debug.open.workbench import read_all, write_workbench
    from areal_debug.render import with_progress

    found, note = find(run)
    if not found:
        fail(f"{run} holds nothing that a run leaves: no record, metrics, trace, stacks or checkpoint")
    items = with_progress("reading", len(found), lambda tick: read_all(found, places[0], tick))
    if output is not None:
        with unfinished_folder(output) as folder:
            write_workbench(run, items, folder, note)
    show_found(run, items, output, note, as_json)


def show_found(run: Path, items: "Sequence[Item]", output: Path | None, note: str, as_json: bool) -> None:
    from areal_debug.open.workbench import worst_verdict
    from areal_debug.report.model import Cell, Report, Table, tone_of
    from areal_debug.report.terminal import print_report

    verdict = worst_verdict(items)
    if as_json:
        found = [document_of(item) for item in items]
        facts = {"run": str(run), "verdict": verdict, "found": found, "note": note}
        print_json(facts | {"output": output and str(output)})
        return
    rows = [
        (Cell(item.verdict or "-", tone_of(item.verdict)), item.found.kind, item.found.name, item.summary)
        for item in items
    ]
    page = "" if output is None else f"; open {output / 'index.html'} in a browser"
    table = Table(("verdict", "kind", "name", "summary"), rows)
    report = Report(str(run), f"{len(items)} found{page}", tone_of(verdict), [table], [note] if note else [])
    print_report(console(), report)


def document_of(item: "Item") -> dict[str, object]:
    """Return an item as JSON types."""
    return {
        "kind": item.found.kind,
        "name": item.found.name,
        "path": str(item.found.path),
        "verb": item.found.verb,
        "verdict": item.verdict,
        "summary": item.summary,
        "page": item.page,
    }


@reads_untrusted("record", "other", outputs="output", reads=ANYWHERE)
def write_view(
    record: Path, other: Path | None, asked: Asked, output: Path | None, force: bool, as_json: bool
) -> None:
    from areal_debug.view.page import write_file, write_folder

    contents = open_contents(record, asked)
    recorded, left_out = list(contents.record.steps), dict[str, int]()
    is_folder = asked.all_steps and (output is None or output.suffix != ".html")
    if asked.all_steps and not is_folder:
        recorded = list(contents.record.intact(recorded, left_out))
    document: dict[str, Any] = {}

    def document_of(steps: list[int]) -> dict[str, Any]:
        if not steps:
            end_if_damaged((*left_out, *contents.record.damage.found))
            fail(
                f"{record} holds no committed step: nothing to show: open it without -o, which waits for the first"
            )
        opens = place_of(contents, asked, steps)
        document.update(contents.document(steps if asked.all_steps else [opens.step], opens))
        return document

    step: int = -1 if is_folder else document_of(recorded)["opens"]["step"]  # a folder has all
    if contents.other and not asked.all_steps:
        contents.other.step(step + contents.shift)  # raises if it is not recorded
    compared = f"-and-{other.absolute().name}" if other else ""
    ending = "pages" if asked.all_steps else f"step{step}.html"
    output = output or Path(f"{record.absolute().name}{compared}-{ending}")
    refuse_existing(output, force)
    present = {path.name for path in output.iterdir()} if is_folder and output.is_dir() else set()
    if present - {"index.html", "steps"}:  # not empty, and no page that this verb wrote
        raise ValueError(f"{output} holds other files than a page: choose another folder")
    target = output

    def write(tick: Callable[[object], None]) -> int:
        if not is_folder:
            return write_file(contents, document, target, tick)
        return write_folder(contents, contents.record.intact(recorded, left_out), document_of, target, tick)

    size_bytes = with_progress("writing steps", len(recorded) if asked.all_steps else 1, write)
    page = output / "index.html" if is_folder else output
    if as_json:
        facts = {"record": str(record), "compare": other and str(other), "step": document["opens"]["step"]}
        facts |= {
            "num_steps": len(document["stored"]),
            "output": str(output),
            "page": str(page),
            "size_bytes": size_bytes,
        }
        print_json(facts)
    else:
        console().print(styled("{} ({}): open it in a browser", page, format_bytes(size_bytes)))
    sides = [contents.record, *([contents.other] if contents.other else [])]
    end_if_damaged((*left_out, *(problem for side in sides for problem in side.damage.found)))


def open_contents(record: Path, asked: Asked) -> "Contents":
    from areal_debug.view.page import Contents

    followed = follow(record)
    path = asked.other or (record if asked.other_step is not None else None)
    if path is None:
        return Contents(followed)
    other = follow(path)
    shift = 0
    if asked.other_step is not None and followed.steps:
        other.step(asked.other_step)  # raises if it is not recorded
        shift = asked.other_step - (followed.steps[-1] if asked.step is None else asked.step)
    return Contents(followed, other, shift)


def follow(path: Path) -> "FollowedRecord":
    """Open a record with its tokenizer and read its curves."""
    from areal_debug.record.decode import load_decoder
    from areal_debug.view.data import MAX_CURVE_STEPS
    from areal_debug.view.page import FollowedRecord
    from recorder import open_record

    opened = open_record(path)
    decode = load_decoder(opened)
    total = min(len(opened.steps), MAX_CURVE_STEPS)
    return with_progress("reading steps", total, lambda tick: FollowedRecord(str(path), decode, tick))


def place_of(contents: "Contents", asked: Asked, steps: Sequence[int]) -> "Place":
    """Return what the page opens at: by default the last of `steps`.

    Raises ValueError if the record has no such place.
    """
    from areal_debug.view.page import Place

    step = steps[-1] if asked.step is None else asked.step
    rows = contents.record.view(step).rows
    if asked.at is None:
        return Place(step)
    prompt, sample, token = asked.at
    is_named = (rows["prompt"] == prompt) & (rows["sample"] == (rows["sample"] if sample is None else sample))
    found = is_named.nonzero()[0]
    named = str(prompt) if sample is None else f"{prompt}.{sample}"
    if not len(found):
        prompts = rows["prompt"]
        has = f"its prompts are {prompts.min()} to {prompts.max()}" if len(prompts) else "it has none"
        raise ValueError(f"step {step} has no sample {named}: {has}")
    if token is not None and token >= rows["length"][found[0]]:
        num_tokens = rows["length"][found[0]]
        raise ValueError(f"sample {named} of step {step} has {num_tokens} tokens, no token {token}")
    return Place(step, prompt, sample, token)


def serve_page(path: Path, asked: Asked, port: int, as_json: bool) -> None:
    from areal_debug.view.page import make_server

    contents = open_contents(path, asked)
    wants_place = asked.at is not None or asked.step is not None
    steps = contents.record.steps
    opens = place_of(contents, asked, steps) if steps and wants_place else None
    end_if_damaged(contents.record.damage.found, code=0)
    with make_server(contents, port, opens) as server:
        compared = "&compare=B" if contents.other else ""
        fragment = f"#{opens.fragment()}{compared}" if opens else ""
        address = f"{server.address}{fragment}"
        if as_json:
            print_json({"record": str(path), "url": address})
        else:
            console().print(
                styled("{} at {} (Ctrl-C ends it; -o FILE.html writes it and ends)", path, address)
            )
        leave_terminal()
        server.serve_until_interrupted()
