"""Reading is lazy, checked, and needs neither torch nor the complete record; its verbs."""

import json
import subprocess
import sys

import pytest

from recorder import DamagedRecord, NotARecord, open_record, verify
from recorder.testing import scripted_batch, write_scripted_record
from tests.command_line import invoke


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


def test_ls_gives_one_line_a_step_and_names_the_unfinished(tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=3, num_ranks=2)
    (tmp_path / "record/steps/000002/step.json").unlink()
    (tmp_path / "record/end.json").unlink()
    result = invoke("record", "ls", tmp_path / "record")
    assert result.exit_code == 0
    lines = [line.split() for line in result.output.splitlines()]
    assert lines[0][:2] == ["2", "steps,"]
    assert ["0", "1", "8", "42"] in [line[:4] for line in lines]
    assert "step 2 was not finished and is not in the record" in result.output


def test_verify_reports_intact_with_exit_0_and_names_damage_with_exit_1(tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=2)
    result = invoke("record", "verify", tmp_path / "record")
    assert (result.exit_code, result.output) == (0, "intact: every byte of 2 steps is as written\n")
    file = tmp_path / "record/steps/000001/batch-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    result = invoke("record", "verify", tmp_path / "record")
    assert result.exit_code == 1
    assert (
        "steps/000001/batch-00000-of-00001.safetensors, tensor versions: bytes do not match" in result.output
    )
    report = json.loads(invoke("record", "verify", tmp_path / "record", "--json").output)
    assert (report["intact"], report["steps_ok"], report["steps_missing"]) == (False, [0], [])
    assert report["problems"][0]["tensor"] == "versions"
