"""The fingerprint lists what can change bits, and nothing that should stay private."""

import json

from recorder.difference import Difference
from recorder.documents import checksum, checksummed_bytes, parse_checksummed
from recorder.environment import diff_environment, environment, file_identity, folder_identity


def test_the_fingerprint_survives_a_record_and_equals_itself():
    found = environment()
    assert parse_checksummed(checksummed_bytes(found), "x") == found
    assert diff_environment(found, environment()) == ()


def test_only_named_variables_are_recorded(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret-value")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    found = environment()
    assert found["variables"]["OMP_NUM_THREADS"] == "7"
    assert "secret-value" not in json.dumps(found)


def test_a_changed_library_and_a_missing_variable_are_named(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    recorded = environment()
    monkeypatch.delenv("PYTHONHASHSEED")
    current = environment()
    current["libraries"]["torch"] = "9.9"
    assert diff_environment(recorded, current) == (
        Difference("libraries.torch", recorded["libraries"]["torch"], "9.9"),
        Difference("variables.PYTHONHASHSEED", "0", None),
    )


def test_a_model_folder_is_known_by_its_weight_config_and_tokenizer_files(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    (tmp_path / "README.md").write_text("x")
    (tmp_path / "original").mkdir()
    assert folder_identity(str(tmp_path)) == {
        "path": str(tmp_path),
        "files": {"model.safetensors": {"size_bytes": 4, "crc32c": checksum(b"1234")}},
    }


def test_a_large_file_has_the_checksum_of_all_its_bytes(tmp_path):
    data = bytes(range(256)) * (1 << 17)  # 32 MiB, two blocks
    (tmp_path / "a").write_bytes(data)
    assert file_identity(tmp_path / "a") == {"size_bytes": len(data), "crc32c": checksum(data)}
