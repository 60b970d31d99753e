"""A record that somebody changed and sealed again gives findings and sentences, no traceback."""

import random
import shutil
import traceback
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_debug.verbs.record import command
from recorder import RecordError, open_record, verify
from recorder.reader import summarise_steps
from recorder.samples import read_samples
from tests.recorder.mutations import apply_mutation, write_full_record


def read_everything(path: Path) -> None:
    """Open a record and read all that its readers return."""
    record = open_record(path)
    summarise_steps(record, lambda step: None)
    for number in record.steps:
        step = record.step(number)
        for rank in range(step.manifest.num_ranks):
            step.batch(rank), step.learning(rank), step.plan(rank), step.outcome(rank), step.text(rank)
            rows = list(range(step.num_rows(rank)))
            read_samples(step, rank, rows, None)
            for row in rows:
                step.rows(rank, row)
    for anchor in record.anchors():
        record.anchor(anchor)


def crash_of(reader, path: Path) -> str | None:
    """Where a reader raised what is no RecordError, None if it did not."""
    try:
        reader(path)
    except RecordError:
        return None
    except BaseException as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}@{Path(frame.filename).name}:{frame.lineno}"
    return None


def run_verbs(path: Path) -> None:
    """Run the verbs that read a record."""
    for arguments in (["verify"], ["ls"], ["show"], ["show", "--tokens"]):
        result = CliRunner().invoke(command, [arguments[0], str(path), *arguments[1:]])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code in (0, 1, 2)


def count_crashes(original: Path, scratch: Path, readers, seeds) -> Counter:
    """Crashes by reader and place, over one changed record a seed."""
    crashes: Counter = Counter()
    for seed in seeds:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.copytree(original, scratch)
        mutation = apply_mutation(scratch, random.Random(seed))
        for reader in readers:
            if crash := crash_of(reader, scratch):
                crashes[f"{reader.__name__} {crash}"] += 1
                print(seed, reader.__name__, crash, mutation)
    return crashes


@pytest.fixture
def full_record(tmp_path) -> Path:
    write_full_record(tmp_path / "original")
    assert verify(tmp_path / "original").intact
    return tmp_path / "original"


@pytest.mark.parametrize("num_seeds", [8, pytest.param(25, marks=pytest.mark.long)])
def test_a_record_changed_and_sealed_again_never_raises_a_traceback(full_record, tmp_path, num_seeds):
    readers = (verify, read_everything, run_verbs)
    seeds = (*range(num_seeds), 3071)  # the last: a log-prob becomes a signalling NaN
    assert count_crashes(full_record, tmp_path / "changed", readers, seeds) == {}


@pytest.mark.long
def test_thousands_of_changed_records_never_raise_a_traceback(full_record, tmp_path):
    assert count_crashes(full_record, tmp_path / "changed", (verify, read_everything), range(4000)) == {}
    assert count_crashes(full_record, tmp_path / "changed", (run_verbs,), range(4000, 4600)) == {}
