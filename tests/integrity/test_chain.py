"""Deleted, exchanged and inserted steps are found, also where every file is sealed."""

import os
import shutil

import pytest

from recorder import DamagedRecord, Recording, RecordingOptions, RecordWriter, Retention, open_record, verify
from recorder.header import Gaps, write_gaps
from recorder.integrity.chain import missing_steps, without_ranges
from recorder.testing import scripted_batch, send_step
from tests.recorder.test_continued import start_facts

STEP = "steps/00000{}"


def problems(record):
    return [(problem.file, problem.what) for problem in verify(record).problems]


@pytest.mark.parametrize(
    ("deleted", "missing"),
    [
        ((4, 5), (4, 5)),  # by the end mark
        ((0, 1), (1,)),  # by the link of the next: step 2 has its digest
        ((3,), (3,)),
    ],
)
def test_deleted_steps_are_found(record, deleted, missing):
    for step in deleted:
        shutil.rmtree(record / STEP.format(step))
    assert problems(record) == [(STEP.format(step), "is missing") for step in missing]
    assert verify(record).steps_missing == missing


def test_a_sealed_change_of_an_older_step_is_found_by_the_next(record, change):
    change(record / STEP.format(2) / "step.json", lambda step: step.update(version=3, num_ranks=1))
    assert problems(record) == [
        (
            f"{STEP.format(3)}/step.json",
            "step 3 is linked to another step 2 than the one here (sha256 of its step.json)",
        )
    ]


def test_a_step_in_the_place_of_another_is_found(record, change):
    shutil.rmtree(record / STEP.format(3))
    shutil.copytree(record / STEP.format(4), record / STEP.format(3))
    change(record / STEP.format(3) / "step.json", lambda step: step.update(step=3))
    found = problems(record)
    for file, what in (
        (f"{STEP.format(3)}/plan-00000-of-00001.json", "belongs to step 4"),
        (f"{STEP.format(3)}/outcome-00000-of-00001.json", "belongs to step 4"),
        (f"{STEP.format(3)}/step.json", "step 3 is linked to step 3, which cannot come before it"),
        (f"{STEP.format(4)}/step.json", "has prompt 400000, which step 3 has, too"),
    ):
        assert (file, what) in found


def test_a_link_is_found(record):
    folder = record / STEP.format(3)
    shutil.move(folder, record.parent / "elsewhere")
    folder.symlink_to(record.parent / "elsewhere")
    (what,) = [what for file, what in problems(record) if file == f"{STEP.format(3)}/step.json"]
    assert "goes through the link 000003: links are not followed" in what


@pytest.mark.parametrize("name", ["record.json", "steps/000002/step.json", "end.json"])
def test_a_fifo_is_found_and_not_waited_for(record, name):
    (record / name).unlink()
    os.mkfifo(record / name)
    (what,) = [what for file, what in problems(record) if file == name]
    assert what.endswith("is no regular file: nothing else is read or written")
    if name == "record.json":
        with pytest.raises(DamagedRecord, match="is no regular file"):
            open_record(record)


def test_a_folder_with_a_huge_number_costs_nothing(record):
    (record / "steps/999999999").mkdir()
    (record / "steps/9999999999").mkdir()
    report = verify(record)
    assert [p.kind for p in report.problems if p.file == "steps/9999999999"] == ["foreign"]
    assert [p.kind for p in report.problems if p.file == "steps/999999999/step.json"] == ["unfinished"]
    assert len(report.steps_missing) == 1001
    assert open_record(record).uncommitted == (999999999,)


def test_missing_steps_are_counted_from_ranges_and_not_one_by_one():
    gaps = Gaps(removed=((1, 400_000_000), (400_000_002, 900_000_000)), dropped=(900_000_001,))
    assert missing_steps([0, 900_000_003], set(), Recording(), gaps) == [400_000_001, 900_000_002]
    assert missing_steps([0], {30}, Recording(every=10), Gaps()) == [10, 20, 30]
    assert missing_steps([3, 9], set(), Recording(steps=(9, 3, 5)), Gaps()) == [5]
    assert missing_steps([], set(), Recording(), Gaps()) == []
    assert list(without_ranges(2, 9, ((0, 2), (4, 5), (9, 12)))) == [(3, 3), (6, 8)]
    assert list(without_ranges(2, 9, ((0, 20),))) == []


def test_a_run_that_never_started_leaves_the_end_mark_of_the_record_alone(record):
    before = verify(record)
    writer = RecordWriter(record, options=RecordingOptions(overwrite=True))
    writer("end", steps=0, error="ConfigError: x")
    assert verify(record) == before


def test_retention_and_dropped_steps_keep_a_chain_that_verifies(tmp_path):
    options = RecordingOptions(retention=Retention(keep_last=2, keep_every=3))
    writer = RecordWriter(tmp_path / "record", options=options)
    writer("start", **start_facts())
    for step in (0, 1, 2, 3, 5, 6, 7):
        send_step(writer, step, scripted_batch([3], seed=step))
    writer.kept.add_dropped([4])
    writer("end", steps=8, error=None)
    report = verify(tmp_path / "record")
    assert (report.problems, report.steps_ok) == ((), (0, 3, 6, 7))
    write_gaps(tmp_path / "record", Gaps(dropped=(4,)))  # somebody removed the steps, not retention
    assert verify(tmp_path / "record").steps_missing == (1, 2, 5)
