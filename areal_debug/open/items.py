"""Read each thing that a run left: a verdict, a sentence, and how to write its page.

What cannot be read gets the verdict "error" and the reason, and the rest is still shown.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.safety.received import read_received
from areal_debug.open.find import Found, read_document
from areal_debug.render import format_bytes, with_progress
from areal_debug.report.frame import Frame, Link
from areal_debug.report.links import RecordPage
from areal_debug.report.model import Facts, Report, Row, tone_of
from areal_debug.report.page import write_report, write_template

if TYPE_CHECKING:
    from recorder import Record

# Of a page: with the links of its header, and the page of the run's record.
Write = Callable[[Path, Sequence[Link], RecordPage | None], None]
COMMANDS = {"record": "record show", "metrics": "doctor", "trace": "trace", "hang": "hang diagnose"}
MAX_HTML_BYTES = 20_000_000


@dataclass
class Item:
    """What was found, as the workbench shows it.

    Args:
        verdict: one word; "error" if it could not be read, "" where nothing is judged.
        page: address of its page in the workbench, "" if it has none.
        write: writes that page.
        record: the record of this item, which other pages link to.
    """

    found: Found
    verdict: str = ""
    summary: str = ""
    page: str = ""
    write: Write | None = None
    record: "Record | None" = None

    @property
    def command(self) -> str:
        """The verb that prints more about it, "" if there is none."""
        verb = COMMANDS.get(self.found.kind, "")
        return f"areal-debug {verb}" if verb else ""


def examine(found: Found, scratch: Path) -> Item:
    """Read what was found; `scratch` is an empty folder for files that reading needs."""
    try:
        return READERS[found.kind](found, scratch)
    except (ValueError, OSError) as error:
        return Item(found, "error", str(error))


def examine_record(found: Found, scratch: Path) -> Item:
    """Check that every step which a record should hold is there, without reading the steps."""
    from recorder import open_record
    from recorder.integrity.chain import missing_steps
    from recorder.reader import describe_steps, read_end

    record = open_record(found.path)
    end, steps = read_end(record.storage), record.steps
    missing = missing_steps(steps, set(), record.header.recording, record.gaps)
    last = None if end is None or end.last is None else end.last.step
    if missing:
        verdict, state = "damaged", f"{len(missing)} steps are missing, the first is {missing[0]}"
    elif last is not None and (not steps or steps[-1] != last):
        verdict, state = "damaged", f"its last step should be {last}"
    elif end is None:
        verdict, state = "unfinished", "no end mark: the run records, or was interrupted"
    else:
        verdict, state = "complete", "no step is missing"
    header = record.header
    facts = [
        describe_steps(steps),
        *([f"{header.num_ranks} ranks"] if header.num_ranks > 1 else []),
        *([f"trainer {header.trainer}"] if header.trainer else []),
        *([f"{len(record.anchors())} anchors"] if record.anchors() else []),
        state,
    ]
    write = (lambda page, links, _: write_tokens(record, page, links)) if steps else None
    return Item(found, verdict, "; ".join(facts), write=write, record=record)


def write_tokens(record: "Record", page: Path, links: Sequence[Link]) -> None:
    """Write the page of all steps; `page` is the index.html of a folder of its own."""
    from areal_debug.record.decode import load_decoder
    from areal_debug.view.page import Contents, FollowedRecord, Place, write_folder

    contents = Contents(FollowedRecord(record.path, load_decoder(record)))
    steps = contents.record.intact(record.steps, {})

    def document_of(stored: list[int]) -> dict[str, Any]:
        return contents.document(stored, Place(stored[-1]) if stored else None)

    def write(tick: Callable[[object], None]) -> int:
        return write_folder(contents, steps, document_of, page.parent, tick, links)

    with_progress(f"writing steps of {record.path}", len(record.steps), write)


def examine_metrics(found: Found, scratch: Path) -> Item:
    from areal_debug.doctor.examine import examine as judge
    from areal_debug.doctor.examine import verdict
    from areal_debug.doctor.read import read_run
    from areal_debug.doctor.report import report_of

    run = read_run(found.path)
    judged = judge(run)
    first = judged.alarms[0].title if judged.alarms else report_of(run, judged).verdict.lower()
    summary = f"{first}; {run.num_steps} steps"
    return Item(
        found,
        verdict(run, judged),
        summary,
        write=lambda page, links, record_page: write_report(
            page,
            report_of(run, judged, record_page),
            Frame("Doctor", run.source, "doctor", verdict(run, judged), links),
        ),
    )


def examine_trace(found: Found, scratch: Path) -> Item:
    """Find slow steps as `trace` does. The files of the ranks are merged outside of the run."""
    from areal_core.telemetry.trace_merge import merge
    from areal_debug.trace.read import read_merged
    from areal_debug.trace.report import report_of, verdict
    from areal_debug.trace.steps import report_on

    scratch.mkdir()
    for file in found.path.glob("rank-*.jsonl"):
        if file.is_file() and not file.is_symlink():
            (scratch / file.name).symlink_to(file.absolute())
    trace = read_merged(merge(scratch))
    trace.file = found.path
    report = report_on(trace)
    word = report.verdict
    return Item(
        found,
        word,
        ": ".join(verdict(report)),
        write=lambda page, links, record_page: write_report(
            page,
            report_of(trace, report, record_page=record_page),
            Frame("Steps", found.name, "trace", word, links),
        ),
    )


def examine_hang(found: Found, scratch: Path) -> Item:
    from areal_core.safety.durable import commit_file
    from areal_debug.hang.html import VERDICTS, page
    from areal_debug.hang.tree import exit_status
    from hangdoctor.diagnose import diagnose
    from hangdoctor.parse.read import read_snapshot

    snapshot = read_snapshot([found.path])
    found_cause = diagnose(snapshot)
    return Item(
        found,
        VERDICTS[exit_status(found_cause)],
        f"{found_cause.label} ({found_cause.confidence} confidence): {found_cause.summary}",
        write=lambda file, links, _: commit_file(file, page(found_cause, snapshot, found.name, links)),
    )


def examine_health(found: Found, scratch: Path) -> Item:
    """Read what a run has seen of its servers (`areal_core/servers/health.py`)."""
    try:
        servers = read_document(found.path)["servers"]
        states = Counter(str(server["state"]) for server in servers)
        bad = sum(server["state"] != "serving" or server["rejected"] > 0 for server in servers)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{found.path} is not a health file of this version: {error!r}") from error
    summary = f"{len(servers)} servers: {', '.join(f'{n} {state}' for state, n in states.items())}"
    return Item(found, "problem" if bad else "healthy", summary)


def examine_checkpoint(found: Found, scratch: Path) -> Item:
    sizes = [file.stat().st_size for file in found.path.iterdir() if file.is_file()]
    return Item(found, "", f"{len(sizes)} files, {format_bytes(sum(sizes))}")


def examine_report(found: Found, scratch: Path) -> Item:
    """Show a report that a verb wrote: its JSON as text, its page inert and inside a frame."""
    summary = f"report of `areal-debug {found.verb}`"
    if found.verb == "view" and found.path.suffix == ".html":  # it needs its scripts
        return Item(found, "", f"{summary}: open it by itself")
    if (size := found.path.stat().st_size) > MAX_HTML_BYTES:
        raise ValueError(f"{found.path} has {format_bytes(size)}: open it by itself")
    text = read_received(found.path).decode("utf-8", "replace")
    html, document = (text, {}) if found.path.suffix == ".html" else ("", read_document(found.path))
    step = document.get("step")

    def write(page: Path, links: Sequence[Link], record_page: RecordPage | None) -> None:
        heading = f"{found.verb}: {found.name}"
        frame = Frame(heading, found.name, found.verb, found.verdict, links)
        if html:
            write_template(
                page, "open/found_page.html", frame, {"heading": heading, "html": html}, inside=html
            )
            return
        address = record_page.address(step) if record_page and isinstance(step, int) else ""
        rows = [Row("the step in the record", f"step {step}", address=address)] if address else []
        rows += [Row(name, shown(value), is_code=True) for name, value in document.items()]
        write_report(page, Report(found.verdict, heading, tone_of(found.verdict), [Facts(rows)]), frame)

    return Item(found, found.verdict, summary, write=write)


def shown(value: object) -> str:
    """Return a JSON value as text: a string as it is, what is nested on several lines."""
    return value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False)


READERS: dict[str, Callable[[Found, Path], Item]] = {
    "record": examine_record,
    "metrics": examine_metrics,
    "trace": examine_trace,
    "hang": examine_hang,
    "health": examine_health,
    "checkpoint": examine_checkpoint,
    "report": examine_report,
}
