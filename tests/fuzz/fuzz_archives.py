"""Archives: metadata, layouts and names mutated; records with hostile names to be packed."""

import contextlib
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import zarr

from recorder import open_record, verify
from recorder.archive.array_streams import ArrayStream
from recorder.archive.extract import extract_record
from recorder.archive.pack import archive_record
from recorder.documents import checksum
from recorder.errors import RecordError

from .fuzz_records import NAMES, prepared, read_everything, write_full
from .fuzz_records import bases as record_bases
from .fuzz_records import special as record_edit
from .inputs import Case, Edit, Files, dump_sealed, load_sealed
from .targets import Target, read_folder

ESCAPED = Path("/tmp/fuzz-escaped")
SECRET = "the user's own file, which no archive may hold"


def bases(folder: Path) -> dict[str, Files]:
    write_full(folder / "record")
    archive_record(folder / "record", folder / "archive")
    return {"archive": read_folder(folder / "archive")}


def special(chance: random.Random) -> Edit:
    """A layout mutated: [kind, "layout", step or "", what, value]."""
    place = chance.choice(["steps/000000", "steps/000001", "anchors/000001", ""])
    if chance.random() < 0.3:
        return v2_store(chance)
    number = chance.choice([0, 1, -1, 10**9, 3 * 10**9, 2**63, 0.5, "x", None])
    return ["layout", place, chance.choice(["name", "array", "offset", "count", "stored", "repeat", "whole"]),
            chance.choice([number, chance.choice(NAMES), "../" * 40 + str(ESCAPED)[1:], "@target"])]  # fmt: skip


def v2_store(chance: random.Random) -> Edit:
    """An array in the form of zarr v2 or with another codec, in place of a real one."""
    codec = chance.choice(
        ["pickle", "vlen-utf8", "gzip", "numcodecs.pickle", "numcodecs.zlib", "evil", 5, None]
    )
    array = chance.choice(["all/documents", "steps/000001", ""])
    if chance.random() < 0.5:
        filters = [{"id": "vlen-utf8"}, {"id": codec}]
        v2 = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "|O", "compressor": None}
        text = json.dumps(v2 | {"filters": filters, "fill_value": None, "order": "C"})
        return ["file", f"{array}/.zarray".lstrip("/"), text]
    return ["set", f"{array}/zarr.json".lstrip("/"), ["codecs"], [{"name": codec, "configuration": {}}]]


def changed_layout(root: Path, place: str, what: str, value: Any) -> None:
    """Replace the layout of a group by a mutated one, in an array of its own."""
    group = zarr.open_group(root, mode="r+", use_consolidated=False)
    owner = group[place] if place else group
    array, offset, count, _ = owner.attrs["layout"]
    layout = json.loads(bytes(group[array][offset : offset + count]))
    name = next(iter(layout))
    value = str(root.parent / "escaped") if value == "@target" else value
    match what:
        case "name":
            layout[str(value)] = layout[name]
        case "repeat":
            layout[name] = layout[name] * (4000 // len(layout[name]) or 1)
        case "whole":
            layout = value
        case _:
            layout[name][0][["array", "offset", "count", "stored"].index(what)] = value
    stream = ArrayStream(group, "other" + place.replace("/", ""), packed=False)
    part = stream.append("documents", "U8", json.dumps(layout).encode())
    stream.close()
    owner.attrs["layout"] = list(vars(part).values())


def run(case: Case, box: Path) -> None:
    """No file appears outside of the destination, whatever the names are."""
    layouts = [edit for edit in case.special if edit[0] == "layout"]
    case.special = [edit for edit in case.special if edit[0] not in ("layout", "seal")]
    root = case.write(box / "archive")
    for _, *edit in layouts:
        try:
            changed_layout(root, *edit)
        except Exception:
            break  # an earlier edit has made it unreadable for zarr
    tempfile.tempdir = str(box / "tmp")  # where anchors of an archive are copied to
    (box / "tmp").mkdir()
    ESCAPED.unlink(missing_ok=True)
    before = {path.name for path in box.iterdir()}
    for read in (lambda: verify(root), lambda: read_everything(open_record(root))):
        with contextlib.suppress(RecordError):
            read()
    try:
        extract_record(root, box / "extracted")
    finally:
        assert {path.name for path in box.iterdir()} - {"extracted"} <= before
        assert not ESCAPED.exists()


def pack_edit(chance: random.Random) -> Edit:
    """A name in step.json or a link that leads to another file of the user."""
    up = "../" * chance.choice([1, 2, 3])
    name = chance.choice([f"{up}secret", "@secret", "extra"])
    return chance.choice(
        [
            record_edit(chance),
            [
                "link",
                chance.choice(["note.txt", "gaps.json", "steps/000001/extra", "anchors"]),
                f"{up}secret",
            ],
            ["set", "steps/000001/step.json", ["files", name], "@secret"],
            ["key", "steps/000001/step.json", ["files", "plan-00000-of-00001.json"], name],
        ]
    )


def run_pack(case: Case, box: Path) -> None:
    """An archive holds files of its record only."""
    entry = {"size_bytes": len(SECRET), "crc32c": checksum(SECRET.encode())}
    for name in [
        name for name in case.files if b"@secret" in case.files[name] and name.endswith("/step.json")
    ]:
        document = load_sealed(case.files[name])
        listed = document["files"]
        document["files"] = {
            file.replace("@secret", str(box / "secret")): entry if "secret" in file else listed[file]
            for file in listed
        }
        case.files[name] = dump_sealed(document)
    path = prepared(case, box)
    (box / "secret").write_text(SECRET)
    archive_record(path, box / "archive")
    held = zarr.open_group(box / "archive", mode="r", use_consolidated=False)["all"]
    columns = [bytes(held[name][:]) for name in ("documents", "checkpoints") if name in held]
    assert not any(SECRET.encode() in column for column in columns), (
        "a file from outside of the record is in it"
    )


TARGETS = {
    "archive": Target(bases, run, (ValueError,), special),
    "pack": Target(record_bases, run_pack, (ValueError,), pack_edit),
}
