"""Files of hang collections and dumps of every tool, and Flight Recorder pickles on their own."""

import io
import json
import pickle
import random
import tarfile
from pathlib import Path

from hangdoctor.diagnose import diagnose
from hangdoctor.errors import HangInputError
from hangdoctor.parse.read import read_snapshot

from ..hangdoctor.analysis.test_hostile_input import check_reports, seeds
from .inputs import Case, Edit, Files, pickle_edit
from .targets import Target


def collection() -> Files:
    """One file of each kind, with numbered names where two have the same."""
    files: Files = {}
    for number, (name, data) in enumerate(seeds()):
        files[name if name not in files else f"{number}_{name}"] = data
    return files


def tar_of(files: Files) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(f"job/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def bases(folder: Path) -> dict[str, Files]:
    files = collection()
    loose = {name: data for name, data in files.items() if "/" not in name and name != "collection.json"}
    some = {name: files[name] for name in ("collection.json", "samples/0/rank_0.json", "rank_0.txt")}
    return {"collection": files, "loose": loose, "tar": {"job.tar": tar_of(some)}}


def run(case: Case, box: Path) -> None:
    folder = case.write(box / "hang")
    snapshot = read_snapshot([folder])
    diagnosis = diagnose(snapshot)
    check_reports(diagnosis, snapshot)
    assert sorted(path.name for path in box.iterdir()) == ["hang"]


def special(chance: random.Random) -> Edit:
    name = chance.choice(
        ["rank_5.txt", "samples/0/rank_7.json", "fr/rank_3.pickle", "logs/rank_1.log", "a.tar"]
    )
    return chance.choice(
        [
            ["fifo", name],
            ["link", name, chance.choice(["/etc/passwd", "/dev/zero", "..", "collection.json"])],
            ["copy", "collection.json", name],
            ["repeat", name, chance.choice(["    f (x.py:1)\n", "{", "Rank 1:\n", "\n"]), 20_000, ""],
            [
                "text",
                name,
                chance.choice(['Process 1: \u202ex\n\nThread 1 (idle): "M"\n    f (a.py:1)\n', "\ud800"]),
            ],
        ]
    )


def recorder_bases(folder: Path) -> dict[str, Files]:
    plain = next(pickle.loads(data) for name, data in seeds() if name == "fr/rank_0.pickle")
    raw = {f"protocol {number}": {"data": pickle.dumps(plain, number)} for number in (2, 4)}
    return {
        "document": {"a.pickle": pickle.dumps(plain)},
        "json": {"a.json": json.dumps(plain).encode()},
    } | raw


def run_recorder(case: Case, box: Path) -> None:
    from hangdoctor.parse.flight_recorder import parse_flight_recorder

    for data in case.files.values():
        parse_flight_recorder(data, 0)


TARGETS = {
    "hang": Target(bases, run, (HangInputError,), special),
    "flight_recorder": Target(recorder_bases, run_recorder, (HangInputError,), pickle_edit),
}
