"""The fingerprint lists what can change bits, and nothing that should stay private."""

from recorder.difference import Difference
from recorder.documents import checksum, checksummed_bytes, parse_checksummed
from recorder.environment import diff_environment, environment, folder_identity


def test_the_fingerprint_survives_a_record_and_equals_itself():
    found = environment()
    assert parse_checksummed(checksummed_bytes(found), "x") == found
    assert diff_environment(found, environment()) == ()


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
