"""The script of `make gpu-check` on a CPU, so that it works where it is needed, and its wheels."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal_debug.train import script
from tests.gpu import __main__ as check
from tests.gpu.row import MARK, failing


@pytest.mark.long
def test_every_row_passes_on_a_cpu_or_says_that_it_needs_a_gpu(tmp_path):
    call = [sys.executable, "-m", "tests.gpu", "--device", "cpu", "--json", tmp_path / "new/table.json"]
    done = subprocess.run(call, capture_output=True, text=True)
    rows = json.loads((tmp_path / "new/table.json").read_text())["rows"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(row["verdict"] == "pass" for row in rows) == 28
    assert {row["name"] for row in rows if row["verdict"] == "not measurable"} == {
        *("card", "out of memory", "offloading", "memory of a step", "sleeping servers"),
        *("hang: a kernel that never ends", "hang: a stream that waits"),
    }


@pytest.mark.long
def test_the_wheels_are_all_that_the_script_needs_beside_torch_and_transformers(tmp_path):
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    collect = [sys.executable, "-m", "tests.gpu.wheels", tmp_path / "wheels", python]
    done = subprocess.run(collect, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    install += ["--target", tmp_path / "site", *(tmp_path / "wheels").glob("*.whl")]
    subprocess.run(install, check=True)
    there = ("torch", "transformers", "safetensors", "numpy", "tqdm", "pip")
    names = {path.name.split("-")[0] for path in (tmp_path / "site").iterdir()}
    assert {"omegaconf", "zarr", "deepdiff", "cachebox"} <= names
    assert names.isdisjoint(there)


def test_a_group_that_ends_badly_is_a_row_and_its_earlier_rows_stay(monkeypatch, capsys):
    program = f'print({MARK!r} + \'{{"name": "a", "verdict": "pass", "what": ""}}\', flush=True); 1 / 0'
    started = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda call, **more: started([call[0], "-c", program], **more))
    rows = check.rows_of("hang", "cpu")
    assert [(row["name"], row["verdict"]) for row in rows] == [("a", "pass"), ("hang", "fail")]
    assert rows[1]["what"] == "the group ended with exit code 1: ZeroDivisionError: division by zero"


def test_a_machine_without_a_gpu_gets_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--only", "hang"])
    with pytest.raises(SystemExit) as ended:
        check.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("Error: torch sees no GPU: --device cpu tries")


def test_an_error_in_a_check_is_a_row_with_its_place(capsys):
    with failing("parity"):
        raise ValueError("no such model\nmore")
    row = json.loads(capsys.readouterr().out.removeprefix(MARK))
    assert (row["name"], row["verdict"]) == ("parity", "fail")
    assert row["what"].startswith("ValueError: no such model (test_an_error_in_a_check")


def test_a_run_out_of_memory_ends_with_one_sentence(monkeypatch):
    import torch

    ended = []
    monkeypatch.setattr(script, "end", lambda message, code: ended.append((message, code)))
    with script.mistakes_as_sentences():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has 1 GiB")
    assert ended == [(f"Error: the device's memory is full: CUDA out of memory; {script.SMALLER}", 1)]
    with pytest.raises(RuntimeError, match="another"), script.mistakes_as_sentences():
        raise RuntimeError("another")


def test_the_limits_of_the_groups_sum_to_eight_minutes():
    assert sum(check.GROUPS.values()) <= 8 * 60
    page = Path("docs/gpu.md").read_text()
    assert all(f"| {group} |" in page for group in check.GROUPS)
