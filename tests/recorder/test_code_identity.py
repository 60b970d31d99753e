"""What a record says of code and environment: what can change bits, and nothing private."""

import hashlib
import json
import os
import time
from base64 import urlsafe_b64encode
from importlib.util import find_spec
from pathlib import Path

import pytest

from recorder.difference import Difference
from recorder.documents import checksum, checksummed_bytes, parse_checksummed
from recorder.environment import diff_environment, environment, folder_identity
from recorder.environment.code import changed_files, repository_identity
from tests.command_line import git
from tests.forks import run_anew, run_forked

PROGRAM = """
import json, sys
{body}
from recorder.environment import environment
print(json.dumps(environment()))
"""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_uncommitted_files_are_named_with_their_digests(tmp_path):
    git(tmp_path, "init", "--quiet")
    for name in ("kept.py", "changed.py", "removed.py"):
        (tmp_path / name).write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "Start")
    clean = repository_identity(tmp_path)
    assert (clean["dirty_sha256"], clean["dirty_files"]) == (None, {})
    (tmp_path / "changed.py").write_text("x = 2\n")
    (tmp_path / "new.py").write_text("x = 3\n")
    (tmp_path / "notes.txt").write_text("not code")
    (tmp_path / "removed.py").unlink()
    found = repository_identity(tmp_path)
    assert found["commit"] == clean["commit"]
    assert len(found["dirty_sha256"]) == 64
    assert found["dirty_files"] == {
        "changed.py": sha256(b"x = 2\n"),
        "new.py": sha256(b"x = 3\n"),
        "removed.py": None,
    }


def environment_of(start, folder, body, **variables):
    """Return what a script in the folder records, that `start` runs."""
    script = folder / "train.py"
    script.write_text(PROGRAM.format(body=body))
    environment = os.environ | {"PYTHONPATH": os.getcwd()} | variables
    done = start([str(script)], environment, folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("script")
    (folder / "rows.py").write_text("a = 1\n")
    (folder / "rewards.py").write_text("import shapes\n")  # runs in another process
    (folder / "shapes.py").write_text("b = 1\n")
    (folder / "unused.py").write_text("c = 1\n")
    body = """
import os, rows
reward_fn = 'rewards.py:even'
values = os.environ.get("BONUS"), os.getenv("WORDS"), os.environ.get("NOT_SET"), os.environ.get("MY_API_KEY")
"""
    given = {"BONUS": "0.25", "WORDS": "a sentence", "MY_API_KEY": "k-123456789", "UNREAD": "1"}
    return folder, environment_of(run_forked, folder, body, **given, CUDA_LAUNCH_BLOCKING="1")


def test_the_script_and_the_files_that_it_imports_or_names_are_recorded(recorded):
    folder, code = recorded[0], recorded[1]["code"]
    assert code["script"]["path"] == str(folder / "train.py")
    assert code["script"]["sha256"] == sha256((folder / "train.py").read_bytes())
    in_folder = {name: digest for name, digest in code["local_files"].items() if not name.startswith("/")}
    assert in_folder == {
        "rows.py": sha256(b"a = 1\n"),
        "rewards.py": sha256(b"import shapes\n"),
        "shapes.py": sha256(b"b = 1\n"),
    }


def test_variables_that_the_script_reads_are_recorded_without_secrets(recorded):
    found = recorded[1]
    variables = found["variables"]
    assert variables["BONUS"] == "0.25"
    assert variables["WORDS"].startswith("crc32c ")
    assert variables["NOT_SET"] is None
    assert variables["CUDA_LAUNCH_BLOCKING"] == "1"
    assert variables["TORCH_COMPILE_DISABLE"] is None
    assert not {"MY_API_KEY", "UNREAD"} & variables.keys()
    assert "k-123456789" not in json.dumps(found)
    assert "sentence" not in json.dumps(found)


def make_wheel(folder):
    """Install two files of a library, with a RECORD that is older than a later change."""
    files = {"lib/a.py": b"a = 1\n", "lib/b.py": b"b = 1\n"}
    lines = []
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (time.time() - 100,) * 2)
        digest = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}")
    record = folder / "lib-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("\n".join([*lines, "lib-1.0.dist-info/RECORD,,"]) + "\n")
    os.utime(record, (time.time() - 90,) * 2)
    return record, list(files)


@pytest.mark.parametrize("content", [b"a = 2\n", b"a = 10\n"])
def test_a_patched_file_of_a_library_is_found_also_if_its_size_is_the_same(tmp_path, content):
    record, names = make_wheel(tmp_path)
    assert changed_files(tmp_path, record, names) == {}
    (tmp_path / "lib/a.py").write_bytes(content)
    assert changed_files(tmp_path, record, names) == {"lib/a.py": sha256(content)}
    (tmp_path / "lib/a.py").write_bytes(b"a = 1\n")  # as it was, at another time
    assert changed_files(tmp_path, record, names) == {}


@pytest.mark.long
def test_a_library_in_place_of_the_installed_one_is_compared_with_its_wheel(tmp_path):
    (installed,) = find_spec("safetensors").submodule_search_locations
    package = tmp_path / "libraries" / "safetensors"
    package.mkdir(parents=True)
    for member in Path(installed).iterdir():
        if member.name not in ("__pycache__", "numpy.py"):
            (package / member.name).symlink_to(member)
    text = (Path(installed) / "numpy.py").read_text() + "# patched\n"
    (package / "numpy.py").write_text(text)
    body = "sys.path.insert(0, 'libraries')\nimport safetensors.numpy"
    code = environment_of(run_anew, tmp_path, body)["code"]
    assert code["changed_libraries"]["safetensors"] == {"safetensors/numpy.py": sha256(text.encode())}
    assert code["changed_libraries"]["numpy"] == {}
    assert code["local_files"] == {}


def test_facts_that_one_record_lacks_are_not_differences():
    old = {"variables": {"OMP_NUM_THREADS": "1"}, "code": {"commit": "a", "dirty_sha256": None}}
    new = {
        "variables": {"OMP_NUM_THREADS": "1", "CUDA_LAUNCH_BLOCKING": "1", "BONUS": None},
        "code": {"commit": "a", "dirty_sha256": None, "script": None, "local_files": {}},
    }
    assert diff_environment(old, new) == ()
    (found,) = diff_environment(old, new | {"variables": {"OMP_NUM_THREADS": "2"}})
    assert (found.where, found.recorded, found.current) == ("variables.OMP_NUM_THREADS", "1", "2")


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
