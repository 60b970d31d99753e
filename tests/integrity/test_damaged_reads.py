"""Every verb that reads, times every file of a record, times every kind of damage.

A verb is right about a damaged record if it never says that what it did not read is sound: it ends
with code 1 and names the file, or it did not need that file, and says what it says of the intact
record. It never ends with a traceback or a sentence of a library.
"""

import itertools
import shutil
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from recorder import open_record
from recorder.archive.pack import archive_record
from tests.command_line import invoke

from ..recorder.full_record import write_full_record
from ..recorder.pictured import pictured_batch

STEPS, DAMAGED, INTACT = (1, 2, 3), 2, "3"
KINDS = ("bit", "cut", "missing", "empty", "folder", "other step's")
# What a reader of a library's error would see.
LIBRARY = ("Traceback", "buffer size", "must be a multiple", "NoneType", "Error(", "zlib", "struct.error")
# Verb -> its arguments: A and B are the intact and the damaged record, OUT what it writes.
VERBS = {
    "why": "why A B --no-replay",
    "why of the damaged one": "why B A --no-replay",
    "diff": "diff A B",
    "bisect-step": "bisect-step A B",
    "open a pair": "open A --compare B --step 2 -o OUT.html",
    "open": "open B -o OUT.html --step 2",
    "open --all-steps": "open B --all-steps -o OUT",
    "open an intact step": f"open B -o OUT.html --step {INTACT}",
    "record ls": "record ls B",
    "record show": "record show B --step 2",
    "record show an intact step": f"record show B --step {INTACT}",
    "record verify": "record verify B",
    "record archive": "record archive B --to OUT.zip",
    "record archive --skip-damaged": "record archive B --to OUT.zip --skip-damaged",
    "record export": "record export B --format jsonl --to OUT.jsonl",
    "record export --skip-damaged": "record export B --format jsonl --to OUT.jsonl --skip-damaged",
    "record export an intact step": f"record export B --format jsonl --to OUT.jsonl --step {INTACT}",
    "record cut": "record cut B --step 2 --to OUT.zip --no-check",
    "record redact": "record redact B --to OUT --without-text",
    "query": "query B OF_TOKENS",
    "query of steps": "query B OF_STEPS",
    "replay": "replay B",
    "doctor": "doctor B --json",
}
SQL = {
    "OF_TOKENS": "select step, count(*), sum(logprob), sum(token_id) from tokens group by step order by step",
    "OF_STEPS": "select step, num_tokens, mean_reward from steps order by step",
}
# Verbs that judge the record as a whole: a file of a step that they pass over is a false all-clear.
JUDGES = {"why", "why of the damaged one", "diff", "bisect-step", "record verify", "record archive",
          "record archive --skip-damaged", "record cut", "replay"}  # fmt: skip
# Files that no verb but these needs.
OF_THE_WHOLE = {"end.json", "gaps.json", "anchors", "checkpoints"}
COMPARES = {"why", "why of the damaged one", "diff", "bisect-step"}


# Steps 1 to 3 of four, with text, pictures, plans, an anchor and gaps.
write_record = partial(write_full_record, num_steps=4, batch=pictured_batch, text=True)


def files_to_damage(record: Path) -> list[str]:
    """Return the files at the top, of the damaged step and the anchor, and a picture."""
    names = sorted(str(path.relative_to(record)) for path in record.rglob("*") if path.is_file())
    of_step = [name for name in names if not name.startswith(("steps/", "images/"))]
    of_step += [name for name in names if name.startswith(f"steps/{DAMAGED:06}/")]
    return of_step + [name for name in names if name.startswith("images/")][-1:]


def damage(file: Path, kind: str) -> bool:
    """Damage a file; False if the kind does not apply."""
    data = file.read_bytes()
    if kind == "bit":
        changed = bytearray(data)
        changed[len(data) * 3 // 4] ^= 4
        file.write_bytes(changed)
    elif kind == "cut":
        file.write_bytes(data[: len(data) * 3 // 4])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "other step's":
        other = file.parent.parent / f"{DAMAGED + 1:06}" / file.name
        if file.parent.parent.name != "steps" or other.read_bytes() == data:
            return False
        shutil.copy(other, file)
    else:
        file.unlink()
        if kind == "folder":
            file.mkdir()
    return True


@dataclass(frozen=True)
class Said:
    """What a verb printed, and how it ended."""

    code: int
    text: str


def say(verb: str, intact: Path, damaged: Path, folder: Path) -> Said:
    out = folder / "out"
    places = {"A": str(intact), "B": str(damaged), **SQL}
    words = [places.get(word, word.replace("OUT", str(out))) for word in VERBS[verb].split()]
    done = invoke(*words)
    for path in folder.glob("out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return Said(done.exit_code, done.output)


def complaint(verb: str, file: str, said: Said, of_intact: Said, zipped: bool) -> str | None:
    """Return what is wrong about an answer on a damaged record; None if it is right."""
    if any(words in said.text for words in LIBRARY):
        return "a traceback or a library's words"
    if said.code == 1:
        named = (
            Path(file).name,
            f"step {DAMAGED}",
            f"{DAMAGED:06}",
            "anchors/",
            "is missing",
            *(("/", ".json") if zipped else ()),
        )
        return None if any(name in said.text for name in named) else "the damage is not named"
    if said.code == 2 and of_intact.code == 2 and said.text == of_intact.text:
        return None  # refused before anything was read
    if said.code != of_intact.code:
        return f"code {said.code}"
    is_apart = any(part in OF_THE_WHOLE for part in file.split("/"))
    if verb in JUDGES and not (is_apart and verb in COMPARES):
        return "said to be sound, and was not read"
    if file == "record.json" or (file.endswith("step.json") and "intact" not in verb):
        return "code 0 without a file that is needed"
    if not is_apart and "intact" not in verb and said.text != of_intact.text:
        return "code 0 with another answer"
    return None


@pytest.fixture
def in_process(monkeypatch):
    """Run what a confined child would do in this process: a fork for each of thousands is slow."""
    monkeypatch.setattr("recorder.confine.run_confined", lambda work, *_, **__: work())


# What no reader of ours needs: metadata of groups of zarr, and the commit of an anchor, without
# which it is an anchor that was being written.
UNUSED = {"all/zarr.json", "steps/zarr.json", "anchors/zarr.json"}
COMMITS_OF_ANCHORS = {"anchors/000002/anchor.json", "anchors/000002/zarr.json"}


def is_silent(name: str, kind: str) -> bool:
    """Return whether nothing in the record shows this damage."""
    gone = kind in ("missing", "folder")
    return (
        name in UNUSED or (gone and name in COMMITS_OF_ANCHORS) or (name == "end.json" and kind == "missing")
    )


def complaints(tmp_path: Path, num_ranks: int, zipped: bool, every: int) -> tuple[list[str], Counter[str]]:
    """Damage a record in one way of `every`; return what is wrong, and the answers by verb."""
    intact, damaged = tmp_path / "intact", tmp_path / "damaged"
    write_record(intact, num_ranks)
    names = files_to_damage(intact)
    if zipped:
        archive_record(intact, tmp_path / "a.zarr")
        shutil.rmtree(intact)
        (tmp_path / "a.zarr").rename(intact)
        names = sorted(str(path.relative_to(intact)) for path in intact.rglob("*") if path.is_file())
    of_intact: dict[str, Said] = {}
    wrong, asked = [], Counter[str]()
    ways = [way for way in itertools.product(VERBS, names, KINDS) if not is_silent(*way[1:])]
    for verb, name, kind in ways[::every]:
        shutil.copytree(intact, damaged)
        if verb not in of_intact:
            of_intact[verb] = say(verb, intact, damaged, tmp_path)
        if damage(damaged / name, kind):
            said = say(verb, intact, damaged, tmp_path)
            asked[verb] += 1
            if what := complaint(verb, name, said, of_intact[verb], zipped):
                wrong.append(f"{verb}, {name}, {kind}: {what}: {said.text[-300:]!r}")
        shutil.rmtree(damaged)
    return wrong, asked


SAMPLES = [(2, False, 97), (1, True, 397)]
COMPLETE = itertools.product((1, 2), (False, True), (1,))


@pytest.mark.parametrize(
    ("num_ranks", "zipped", "every"),
    [*SAMPLES, *(pytest.param(*one, marks=pytest.mark.long) for one in COMPLETE)],
)
def test_no_verb_passes_over_damage(tmp_path, in_process, num_ranks, zipped, every):
    wrong, asked = complaints(tmp_path, num_ranks, zipped, every)
    print(f"{asked.total() - len(wrong)} of {asked.total()} answers are right")
    assert not wrong
    assert len(asked) > 10


def test_what_is_left_out_is_named_and_the_rest_is_there(tmp_path, in_process):
    write_record(tmp_path / "a", 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    damage(tmp_path / "b/steps/000002/text-00000-of-00001.jsonl", "bit")
    (tmp_path / "b/notes").symlink_to("/etc/hostname")
    said = say("record archive", tmp_path / "a", tmp_path / "b", tmp_path)
    assert said.code == 1
    assert "nothing was written, --skip-damaged leaves out what is damaged" in said.text
    left_out = archive_record(tmp_path / "b", tmp_path / "c.zip", skip_damaged=True).left_out
    assert [what.split(": ")[0] for what in left_out] == ["notes", "steps/000002/text-00000-of-00001.jsonl"]
    assert open_record(tmp_path / "c.zip").steps == (1, 3)
    done = invoke("why", *(str(tmp_path / name) for name in "ab"), "--fast", "--no-replay")
    assert done.exit_code == 0
    assert "compared by their recorded checksums" in done.output.splitlines()[0]
