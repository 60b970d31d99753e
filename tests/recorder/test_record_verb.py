"""`areal-debug record ls|show|verify` on the command line."""

import json

from recorder.testing import write_scripted_record
from tests.command_line import invoke


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
