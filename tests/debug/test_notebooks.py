"""The notebooks of the examples, executed on records of a tiny run."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "examples/notebooks"


def executed(name: str, folder: Path, monkeypatch, **environment: str) -> list[str]:
    """Run a notebook as jupyter does; return what its code cells show, as text."""
    import nbformat
    from nbclient import NotebookClient

    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(folder))
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    assert [cell for cell in notebook.cells if cell.get("outputs")] == []  # committed without outputs
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(folder))
    return [
        "".join(str(out.get("text", "")) + str(out.get("data", "")) for out in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_of_a_record_shows_its_steps_rewards_and_intact_bytes(recorded, tmp_path, monkeypatch):
    shown = executed("look_at_a_record.ipynb", tmp_path, monkeypatch, RECORD=str(recorded))
    assert "<b>Record</b>" in shown[0]
    assert "finish_reason" in shown[1]
    assert "reward" in shown[2]
    assert "share of groups" in shown[3]
    assert "grad_norm" in shown[5]
    assert "True" in shown[6]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_of_two_runs_names_the_option_that_differs(recorded, train, tmp_path, monkeypatch):
    done = train("--dump-rollout", tmp_path / "other", "seed=2")
    assert done.returncode == 0, done.stderr
    names = {"RECORD_A": str(recorded), "RECORD_B": str(tmp_path / "other")}
    shown = executed("compare_two_runs.ipynb", tmp_path, monkeypatch, **names)
    assert "step 0" in shown[3]
    assert "seed" in shown[3]
    assert "seed" in shown[4]
