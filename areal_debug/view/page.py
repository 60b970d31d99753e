"""The page of a record or of two, as one file, a folder or served, followed while a run records."""

import base64
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any

from areal_core.safety.durable import replacing
from areal_core.safety.scratch import unfinished_folder
from areal_debug.report.frame import Frame, Link, framed
from areal_debug.report.links import fragment_of
from areal_debug.report.local import LocalHandler, LocalServer, listen
from areal_debug.view.data import (
    MAX_CURVE_STEPS,
    Decode,
    RunView,
    StepView,
    calls_document,
    curves_of,
    image_document,
    read_run,
    read_step,
    run_document,
    step_point,
)
from areal_debug.view.pack import pack_json, pack_numbers, pack_text
from areal_debug.view.pairs import pair_document
from recorder import Record, RecordedStep, RecordError, StepNotRecorded, open_record
from recorder.format import STEPS_FOLDER, step_name
from recorder.reader import Damage
from recorder.verify import check_step, intact_steps

KEPT_STEPS = 4
SHORT, KEPT_TEXTS = 2, 1 << 20  # most texts are those of one token, decoded after another one


class FollowedRecord:
    """A record that may be growing.

    Args:
        path: path of the record.
        decode: decodes token ids, or None.
        tick: called for each step whose curve values were read.

    Attributes:
        damage: what is wrong with steps that are left out.
    """

    def __init__(
        self,
        path: str,
        decode: Decode | None,
        tick: Callable[[object], None] = lambda _: None,
    ) -> None:
        self._path, self._decode = path, decode and kept(decode)
        self.damage = Damage()
        self._record: Record = open_record(path, self.damage)
        self._run = read_run(self._record, tick, self.damage)
        curves = self._run.curves.items()
        self._points = {
            step: {name: values[place] for name, values in curves}
            for place, step in enumerate(self._run.steps)
        }
        self._views: OrderedDict[int, StepView] = OrderedDict()

    @property
    def is_foreign(self) -> bool:
        """Return whether another trainer recorded it."""
        return self._record.header.trainer is not None

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the steps that were committed when it was last read, without damaged ones."""
        places = [error.file.split("/") for error in self.damage.found.values()]
        damaged = {place[1] for place in places if place[0] == STEPS_FOLDER}
        return tuple(step for step in self._record.steps if step_name(step) not in damaged)

    def run(self) -> RunView:
        """Return the run with the steps recorded so far."""
        self._record = open_record(self._path, self.damage)
        new = [step for step in self.steps if step > max(self._points, default=-1)]
        for step in new:
            with self.damage.left_out():
                self._points[step] = step_point(self._record.step(step), lambda _: None)
        steps = list(self._points)[-MAX_CURVE_STEPS:]
        curves = curves_of([self._points[step] for step in steps])
        self._run = replace(self._run, steps=steps, curves=curves, num_steps=len(self.steps))
        return self._run

    def step(self, step: int) -> RecordedStep:
        """Return a committed step. Raises `RecordError`."""
        if step not in self._record.steps:
            self._record = open_record(self._path, self.damage)
        return self._record.step(step)

    def checked(self, step: int) -> RecordedStep:
        """Return a committed step after reading every byte of it. Raises `RecordError`."""
        self.step(step)
        return check_step(self._record, step)

    def intact(self, steps: Sequence[int], left_out: dict[str, int]) -> Iterator[int]:
        """Yield the steps that are intact, after reading every byte of them and before the next.

        What is wrong with others goes into `left_out`.
        """
        for step in intact_steps(self._record, steps, True, left_out):
            self._keep(step)
            yield step.manifest.step

    def view(self, step: int) -> StepView:
        """Return a step as columns; the last few are kept. Raises `RecordError`."""
        if step not in self._views:
            self._keep(self.step(step))
        self._views.move_to_end(step)
        return self._views[step]

    def _keep(self, step: RecordedStep) -> None:
        trainer = self._record.header.trainer
        self._views[step.manifest.step] = read_step(step, self._decode, trainer)
        if len(self._views) > KEPT_STEPS:
            self._views.popitem(last=False)


def kept(decode: Decode) -> Decode:
    """Return the decoder with the texts of short lists kept: those of all steps repeat."""
    short = lru_cache(maxsize=KEPT_TEXTS)(lambda ids: decode(list(ids)))
    return lambda ids: short(tuple(ids)) if len(ids) <= SHORT else decode(ids)


BLOB_NAME = re.compile(r"(?:([ab])-([0-9]{1,18})-(text|numbers|images|calls)|pair-([0-9]{1,18}))")
PACKERS = {"text": pack_text, "numbers": pack_numbers}


@dataclass(frozen=True)
class Place:
    """What a page opens at: a step, and a sample and token of it."""

    step: int
    prompt: int | None = None
    sample: int | None = None
    token: int | None = None

    def fragment(self) -> str:
        """Return the place as the fragment of a page's address."""
        return fragment_of(**asdict(self))


class Contents:
    """The data of a page, for several threads.

    Args:
        record: the record.
        other: the one it is compared with, or None.
        shift: step N of the record is compared with step N + `shift` of the other.
    """

    def __init__(self, record: FollowedRecord, other: FollowedRecord | None = None, shift: int = 0) -> None:
        self.record, self.other, self.shift = record, other, shift
        self._lock = threading.Lock()

    def document(self, stored: list[int] | None, opens: Place | None) -> dict[str, Any]:
        """Return what a page needs to begin.

        Args:
            stored: the steps that the page has; None if it has a server, which has all.
        """
        with self._lock:
            sides = [self.record, *([self.other] if self.other else [])]
            runs = [run_document(side.run()) for side in sides]
            stored = list(self.record.steps) if stored is None else stored
            return {
                "sides": runs,
                "stored": stored,
                "paired": [step for step in stored if self.has_partner(step)],
                "shift": self.shift,
                "opens": opens and asdict(opens),
            }

    def has_partner(self, step: int) -> bool:
        return self.other is not None and step + self.shift in self.other.steps

    def names(self, step: int) -> list[str]:
        other = step + self.shift
        names = [f"a-{step}-{kind}" for kind in self.kinds(self.record, step)]
        if self.other is not None and self.has_partner(step):
            names += [f"b-{other}-{kind}" for kind in self.kinds(self.other, other)] + [f"pair-{step}"]
        return names

    def kinds(self, side: FollowedRecord, step: int) -> list[str]:
        view = side.view(step)
        return [*PACKERS, *(["images"] if view.images else []), *(["calls"] if "calls" in view.rows else [])]

    def blob(self, name: str) -> bytes:
        """Return the data of a name that `BLOB_NAME` matches. Raises `RecordError`."""
        found = BLOB_NAME.fullmatch(name)
        assert found, name
        with self._lock:
            side, step, kind, paired = found.groups()
            if side == "a":
                return packed_step(self.record, int(step), kind)
            if self.other is None:
                raise StepNotRecorded("the page compares with no other record")
            if side == "b":
                return packed_step(self.other, int(step), kind)
            steps = self.record.checked(int(paired)), self.other.checked(int(paired) + self.shift)
            return pack_json(pair_document(*steps, (self.record.is_foreign, self.other.is_foreign)))


def packed_step(record: FollowedRecord, step: int, kind: str) -> bytes:
    if kind in PACKERS:
        return PACKERS[kind](record.view(step))
    return pack_json((image_document if kind == "images" else calls_document)(record.step(step)))


ASSETS = Path(__file__).parent / "assets"
STYLES = ("uplot.css", "view.css")
SCRIPTS = (
    "load", "blobs", "links", "colours", "charts", "curves", "histograms", "align", "columns", "table",
    "calls", "sample", "search", "app",
)  # fmt: skip
STEPS = "<!-- steps -->"  # data is escaped or encoded: it has no such text
# Of one file: a browser keeps all of it in memory. A folder has no limit.
MAX_FILE_BYTES = 256_000_000
# What may be loaded, and whom the page may ask, by where the steps are.
POLICIES = {"inline": ("", "'none'"), "files": ("'self' file:", "'none'"), "server": ("", "'self'")}


def write_file(
    contents: Contents,
    document: dict[str, Any],
    output: Path,
    tick: Callable[[object], None],
) -> int:
    """Write the page with the stored steps of the document as one file; return its size in bytes.

    Raises ValueError if it would have more than `MAX_FILE_BYTES`.
    """
    before, after = page_around("inline", document)
    size_bytes = len(before) + len(after)
    with replacing(output) as file:
        file.write(before)
        for step in document["stored"]:
            for name in contents.names(step):
                blob = f'<script type="text/plain" id="{name}">{encoded(contents.blob(name))}</script>\n'.encode()
                size_bytes += len(blob)
                if size_bytes > MAX_FILE_BYTES:
                    raise ValueError(
                        f"one file would have more than {MAX_FILE_BYTES // 10**6} MB at step {step}: "
                        "write a folder (-o FOLDER), which loads a step when it is shown"
                    )
                file.write(blob)
            tick(step)
        file.write(after)
    return size_bytes


def write_folder(
    contents: Contents,
    steps: Iterable[int],
    document_of: Callable[[list[int]], dict[str, Any]],
    output: Path,
    tick: Callable[[object], None],
    links: Sequence[Link] = (),
) -> int:
    """Write the page as a folder that loads a step when it is shown; return its size in bytes.

    Each step is read once; `document_of` gets those that were written.
    """
    size_bytes, stored = 0, []
    with unfinished_folder(output) as folder:
        (folder / "steps").mkdir(parents=True)
        for step in steps:
            for name in contents.names(step):
                script = f'receive("{name}", "{encoded(contents.blob(name))}");\n'
                size_bytes += (folder / "steps" / f"{name}.js").write_bytes(script.encode())
            stored.append(step)
            tick(step)
        page = b"".join(page_around("files", document_of(stored), links))
        size_bytes += (folder / "index.html").write_bytes(page)
    return size_bytes


def page_around(source: str, document: dict[str, Any], links: Sequence[Link] = ()) -> tuple[bytes, bytes]:
    records = [side["record"] for side in document["sides"]]
    names = " and ".join(PurePosixPath(record).name or record for record in records)
    loads, connect = POLICIES[source]
    data = f'<script type="text/plain" id="document-data" data-source="{source}">{encoded(pack_json(document))}</script>'
    licence = f"/*! uPlot\n{page_file('uplot.LICENSE.txt')}*/"
    own = (page_file(f"{name}.js") for name in SCRIPTS)
    page = framed(
        Frame(title=" and ".join(records), run=names, kind="view", links=links),
        f"{page_file('view.html')}{data}\n{STEPS}",
        style="".join(map(page_file, STYLES)),
        script="\n".join(['"use strict";', licence, page_file("uplot.js"), *own]),
        loads=loads,
        connect=connect,
        images="data:",
        tools=page_file("tools.html").strip(),
    )
    before, after = page.encode().split(STEPS.encode())
    return before, after


def encoded(data: bytes) -> str:
    """Return bytes as text that is inert in HTML and in a script."""
    return base64.b64encode(data).decode()


@cache
def page_file(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


RUN_PATH = re.compile(r"/run\.json(?:\?([0-9]{1,18}))?")


def make_server(contents: Contents, port: int, opens: Place | None = None) -> LocalServer:
    """Make a server at `127.0.0.1:port` that is not yet serving; port 0 takes any free one."""

    class Handler(LocalHandler):
        def reply(self, path: str) -> None:
            if path == "/":
                page = b"".join(page_around("server", contents.document(None, opens)))
                self.answer(HTTPStatus.OK, page, "text/html; charset=utf-8")
            elif found := RUN_PATH.fullmatch(path):
                document, last = contents.document(None, opens), found[1]
                if last is not None and document["stored"][-1:] == [int(last)]:
                    self.answer(HTTPStatus.NO_CONTENT, b"")
                else:
                    data = json.dumps(document, allow_nan=False).encode()
                    self.answer(HTTPStatus.OK, data, "application/json")
            elif found := BLOB_NAME.fullmatch(path.removeprefix("/blob/")):
                try:
                    self.answer(HTTPStatus.OK, contents.blob(found[0]), "application/octet-stream")
                except RecordError as error:
                    self.answer(HTTPStatus.NOT_FOUND, str(error).encode())
            else:
                self.answer(HTTPStatus.NOT_FOUND, b"no such page")

    return listen(Handler, port)
