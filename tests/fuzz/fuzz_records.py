"""Records in folders: JSON mutated and sealed again, tensors with any bytes, links and FIFOs."""

import contextlib
import random
import re
from pathlib import Path
from typing import Any

from recorder import open_record, verify
from recorder.documents import checksum
from recorder.errors import NotARecord, RecordError, RecordNotFound, UnknownFormat
from recorder.format import Recording
from recorder.reader import Record, summarise_steps
from recorder.step_files import commit_anchor
from recorder.testing import write_scripted_record
from recorder.writer import RecordingOptions
from tests.command_line import invoke

from .inputs import Case, Edit, Files, dump_sealed, load_sealed
from .targets import Target, read_folder

# What a terminal or a browser would obey. Our own output has line ends and nothing else of these.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
VERBS = [("ls",), ("show", "--step", "1"), ("verify",)]
NAMES = [
    *(
        "../x",
        "/etc/passwd",
        "a/../../x",
        ".",
        "..",
        "",
        "a\x00b",
        "a\x1b[2J",
        "x" * 300,
        "a/" * 100,
        "\ud800",
    ),
    *("step.json", "record.json", "batch-00000-of-00001.safetensors", "extra", "\u202e", "a\\b", "CON"),
]


def bases(folder: Path) -> dict[str, Files]:
    write_full(folder / "full")
    write_scripted_record(folder / "rollout", 2, 1, 2, options=RecordingOptions(Recording(scope="rollout")))
    write_scripted_record(folder / "two ranks", 2, 2, 2)
    return {path.name: read_folder(path) for path in folder.iterdir()}


def write_full(folder: Path) -> None:
    """Write a record of the largest scope, with an anchor."""
    write_scripted_record(folder, 2, 1, 2, options=RecordingOptions(Recording(scope="full")))
    anchor = folder / "anchors" / "000001"
    anchor.mkdir(parents=True)
    (anchor / "weights.raw").write_bytes(bytes(range(64)))
    commit_anchor(anchor, 1)


def sealed_again(case: Case) -> None:
    """Give edited files of a step the sizes and checksums that its step.json states."""
    for name in [name for name in case.files if name.endswith("/step.json")]:
        try:
            document = load_sealed(case.files[name])
            folder = name.removesuffix("step.json")
            for file, entry in document["files"].items():
                if folder + file in case.edited:
                    data = case.files[folder + file]
                    entry |= {"size_bytes": len(data), "crc32c": checksum(data)}
            for file, entry in document["batches"].items():
                if folder + file in case.edited:
                    seal_batch(case.files[folder + file], entry)
            case.files[name] = dump_sealed(document)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue  # a step.json that states none


def seal_batch(data: bytes, entry: dict[str, Any]) -> None:
    entry["header_crc32c"] = checksum(data[: entry["header_bytes"]])
    for tensor in entry["tensors"].values():
        tensor["crc32c"] = checksum(data[tensor["offset"] : tensor["offset"] + tensor["size_bytes"]])


def special(chance: random.Random) -> Edit:
    place = chance.choice(["record.json", "gaps.json", "steps/000001/step.json", "steps", "note.txt"])
    return chance.choice(
        [
            ["seal", "", ""],
            ["folder", f"steps/{chance.choice(['9999999999', '000005', '2', '-1', 'x', '9' * 200])}"],
            ["fifo", place],
            ["link", place, chance.choice(["/etc/passwd", "/dev/zero", "../secret", "record.json", "."])],
            ["remove", place],
            ["copy", "steps/000000/step.json", "steps/000001/step.json"],
            ["copy", "record.json", f"steps/000001/{chance.choice(NAMES)}"],
            ["set", "record.json", [chance.choice(["recording", "config"])], chance.choice(NAMES)],
            gaps(chance),
        ]
    )


def gaps(chance: random.Random) -> Edit:
    ranges = chance.choice(
        [[], [[0, 1]], [[0, 10**12]], [[5, 2]], [["a", 1]], 3, [[0]], None, [[-5, 10**30]]]
    )
    names = chance.choice([("dropped", "removed"), ("removed", "lost"), ("x", "y")])
    return ["file", "gaps.json", dump_sealed({names[0]: ranges, names[1]: ranges}).decode()]


def prepared(case: Case, box: Path) -> Path:
    seals = [edit for edit in case.special if edit[0] == "seal"]
    case.special = [edit for edit in case.special if edit[0] != "seal"]
    if seals:
        sealed_again(case)
    (box / "secret").write_text("the user's own file\n")
    return case.write(box / "record")


def run(case: Case, box: Path) -> None:
    path = prepared(case, box)
    with contextlib.suppress(RecordNotFound, NotARecord, UnknownFormat):
        assert all(str(problem) for problem in verify(path).problems)
    with contextlib.suppress(RecordError):
        read_everything(open_record(path))
    # one of the verbs, always the same for an input: a verb starts a process
    verb, *options = VERBS[sum(map(len, case.files.values())) % len(VERBS)]
    check_verb("record", verb, str(path), *options)


def read_everything(record: Record) -> None:
    """Read all that verbs read, each step on its own: one damaged step must not hide the next."""
    for step in record.steps:
        try:
            read_step(record, step)
        except RecordError:
            continue
    for step in record.anchors():
        try:
            record.anchor(step)
        except RecordError:
            continue
    summarise_steps(record, lambda _: None)


def read_step(record: Record, step: int) -> None:
    recorded = record.step(step)
    for rank in range(min(recorded.manifest.num_ranks, 4)):
        for row in range(min(recorded.num_rows(rank), 4)):
            recorded.rows(rank, row)
        recorded.text(rank)
        if record.header.recording.scope != "rollout":
            recorded.plan(rank), recorded.outcome(rank)
        if record.header.recording.scope == "full":
            recorded.learning(rank)


def check_verb(*arguments: str) -> None:
    """Run a verb: an exit code and text, no traceback, nothing that a terminal obeys."""
    done = invoke(*arguments)
    assert done.exit_code in (0, 1, 2)
    assert not OBEYED.search(done.output), "the output has control codes"


TARGETS = {"record": Target(bases, run, (), special)}
