"""Whatever happens to the bytes of a record, `verify` finds it and names file and tensor."""

import json
from pathlib import Path

import pytest

from recorder import DamagedRecord, commit_anchor, open_record, verify
from recorder.documents import checksummed_bytes, parse_checksummed


def files_of(record: Path) -> list[Path]:
    return sorted(path for path in record.rglob("*") if path.is_file())


def regions_of(record: Path, file: Path) -> list[tuple[str | None, int, int]]:
    """Each tensor (None for a complete file) with begin and end of the bytes attributed to it."""
    if file.suffix != ".safetensors":
        return [(None, 0, file.stat().st_size)]
    entry = open_record(record).step(int(file.parent.name)).manifest.batches[file.name]
    tensors = [(name, t.offset, t.offset + t.size_bytes) for name, t in entry.tensors.items()]
    return [("(header)", 0, 8), ("(header)", 8, entry.header_bytes), *tensors]


def test_one_changed_bit_in_any_region_is_found_and_named(record_of_one_rank):
    record, num_regions = record_of_one_rank, 0
    for file in files_of(record):
        original, name = file.read_bytes(), str(file.relative_to(record))
        for tensor, begin, end in regions_of(record, file):
            num_regions += 1
            for position in {begin, end - 1, *range(begin, end, 7)}:
                changed = bytearray(original)
                changed[position] ^= 1 << position % 8
                file.write_bytes(changed)
                assert [(p.file, p.tensor) for p in verify(record).problems] == [(name, tensor)], position
        file.write_bytes(original)
    assert num_regions == 5 + 2 + 9  # JSON files, length and text of the safetensors header, tensors
    assert verify(record).intact


def test_a_change_that_parses_to_the_same_number_is_found():
    written = checksummed_bytes({"lr": 1e-06})
    changed = written.replace(b"1e-06", b"1E-06")
    assert json.loads(changed)["lr"] == json.loads(written)["lr"]
    with pytest.raises(DamagedRecord, match="do not match"):
        parse_checksummed(changed, "x")


@pytest.mark.parametrize(
    "name", ["notes.txt", "steps/notes.txt", "steps/000001/extra.json", "steps/000002/a.tmp"]
)
def test_a_foreign_file_is_named(record_of_two_ranks, name):
    (record_of_two_ranks / name).write_text("x")
    report = verify(record_of_two_ranks)
    assert [(p.file, p.what) for p in report.problems] == [(name, "is not part of the record")]


def test_two_swapped_step_folders_are_found(record_of_two_ranks):
    steps = record_of_two_ranks / "steps"
    for old, new in (("000000", "swap"), ("000001", "000000"), ("swap", "000001")):
        (steps / old).rename(steps / new)
    problems = verify(record_of_two_ranks).problems
    assert [problem.file for problem in problems] == ["steps/000000/step.json", "steps/000001/step.json"]
    with pytest.raises(DamagedRecord, match="belongs to step 1: a folder was renamed"):
        open_record(record_of_two_ranks).step(0)


def test_an_anchor_is_checked_like_a_step(record_of_one_rank):
    folder = record_of_one_rank / "anchors/000000"
    (folder / "optimizer").mkdir(parents=True)
    (folder / "model.distcp").write_bytes(b"weights")
    (folder / "optimizer/0.distcp").write_bytes(b"moments")
    assert open_record(record_of_one_rank).anchors() == ()
    commit_anchor(folder, step=0)
    record = open_record(record_of_one_rank)
    assert record.anchors() == (0,)
    assert record.anchor(0) == folder
    assert verify(record_of_one_rank).intact
    commit_anchor(folder, step=0)  # a run that resumes from it commits it again
    assert verify(record_of_one_rank).intact
    (folder / "optimizer/0.distcp").write_bytes(b"momentS")
    assert [p.file for p in verify(record_of_one_rank).problems] == ["anchors/000000/optimizer/0.distcp"]
    (folder / "optimizer/0.distcp").write_bytes(b"moment")
    with pytest.raises(DamagedRecord, match=r"optimizer/0.distcp: is missing or has another size"):
        record.anchor(0)
