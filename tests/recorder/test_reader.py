"""Reading is lazy, checked, and needs neither torch nor the complete record."""

import subprocess
import sys

import pytest

from recorder import DamagedRecord, NotARecord, open_record, verify
from recorder.testing import scripted_batch


def test_a_step_that_lost_its_commit_later_is_damage_and_not_unfinished(record_of_two_ranks):
    (record_of_two_ranks / "steps/000001/step.json").unlink()
    record = open_record(record_of_two_ranks)
    assert record.uncommitted == ()
    with pytest.raises(DamagedRecord, match=r"steps/000001/step.json: is missing"):
        record.step(1)
    assert record.step(2).batch(0)["rewards"].shape == (4,)


def test_a_record_is_read_and_verified_where_torch_cannot_be_imported(record_of_one_rank):
    code = f"""
import sys
for name in ("torch", "transformers", "safetensors", "deepdiff"):
    sys.modules[name] = None
from recorder import open_record, verify
step = open_record({str(record_of_one_rank)!r}).step(0)
assert verify({str(record_of_one_rank)!r}).intact
print(step.batch(0)["input_ids"].sum(), step.outcome(0).stats["grad_norm"], step.plan(0).version)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    total = scripted_batch([3, 8, 6, 4], seed=0)["input_ids"].sum()
    assert done.stdout.split() == [str(total), str(1 / 3), "0"]


@pytest.mark.parametrize("read", [open_record, verify])
def test_a_folder_of_records_is_refused_with_their_names(record_of_one_rank, read):
    with pytest.raises(NotARecord, match=f"give one of those below it: {record_of_one_rank}"):
        read(record_of_one_rank.parent)
