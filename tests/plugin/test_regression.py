"""Recorded steps as a test: a changed formula fails it; and the CI job that users copy."""

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from areal_core.launch import warm
from areal_debug import regression
from areal_debug.regression import RegressionError, Spec, check_spec
from areal_debug.replay.ranks import replay_ranks
from recorder import open_record

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests/records/tiny_grpo.zip"
RUN = [str(ROOT / "tests/debug/train_tiny.py"), "--config", str(ROOT / "tests/records/tiny_grpo.yaml")]


@pytest.fixture(scope="session")
def recorded_model(tmp_path_factory) -> Path:
    from areal_core.testing import make_tiny_model

    return make_tiny_model(
        tmp_path_factory.mktemp("model") / "m", hidden_size=32, num_heads=2, num_kv_heads=1
    )


@pytest.fixture
def ranks():
    """Start what replays; each call starts another, in the current folder and environment."""
    with ExitStack() as cleanup:
        yield lambda: cleanup.enter_context(replay_ranks())


@pytest.mark.long
@pytest.mark.replay("tests/records/tiny_grpo.zip", run=RUN)
def test_ten_steps_of_grpo_give_the_recorded_numbers(replay_record, recorded_model):
    report = replay_record(model=recorded_model)
    assert [result.step for result in report.steps] == list(range(10))
    assert all(result.num_parameters == 20 and result.num_compared > 100 for result in report.steps)


OTHER_KERNELS = [
    pytest.param("ATEN_CPU_CAPABILITY", "avx2", marks=pytest.mark.long),
    pytest.param("MKL_ENABLE_INSTRUCTIONS", "AVX2", marks=pytest.mark.long),
    pytest.param("ATEN_CPU_CAPABILITY", "default", marks=pytest.mark.long),
    pytest.param("MKL_ENABLE_INSTRUCTIONS", "SSE4_2", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("variable", "value"), OTHER_KERNELS)
def test_kernels_of_another_processor_stay_within_the_noise_floor(
    variable, value, recorded_model, monkeypatch, ranks
):
    monkeypatch.setenv(variable, value)  # the ranks select their kernels by it
    checked = check_spec(Spec(RECORD, "a_test", model=recorded_model), "none", ranks)
    assert not checked.report.identical
    assert checked.report.verdict.k < 5  # beyond 10 the comparison is inconclusive


# File of areal_core/algorithm, its code, and a plausible wrong edit. Behaviour weights are not
# among them: but for rounding they are 1 in this record, so only the recording machine could show a
# change.
BREAKS = {
    "clip": ("losses.py", "ratio.clamp(1.0 - eps_clip, 1.0 + higher)", "ratio"),
    "GAE": ("advantages.py", "own = discount * gae_lambda * ahead", "own = discount * ahead"),
    "deviation": ("normalization.py", "self.count - int(unbiased)", "self.count"),
    "alignment": ("alignment.py", "[values[:, 1:], end]", "[end, values[:, 1:]]"),
    "bound": ("losses.py", "loss = torch.maximum(unclipped,", "loss = torch.minimum(unclipped,"),
}


def break_formula(folder: Path, name: str) -> None:
    """Copy areal_core with one formula changed."""
    file, formula, changed = BREAKS[name]
    ignored = shutil.ignore_patterns("__pycache__")
    path = shutil.copytree(ROOT / "areal_core", folder / "areal_core", ignore=ignored) / "algorithm" / file
    assert path.read_text().count(formula) == 1, f"{file} has no {formula}"
    path.write_text(path.read_text().replace(formula, changed))


@pytest.mark.long
@pytest.mark.parametrize("name", BREAKS)
def test_a_changed_formula_fails_and_prints_how_to_reproduce_it(
    name, recorded_model, tmp_path, monkeypatch, ranks
):
    break_formula(tmp_path, name)
    monkeypatch.setattr(warm, "OURS", tmp_path)  # from which the ranks import first
    spec = Spec(RECORD, "tests/plugin/test_regression.py::a_test", steps=(0, 1), model=recorded_model)
    with pytest.raises(RegressionError) as caught:
        check_spec(spec, "none", ranks)
    message = str(caught.value)
    assert "tiny_grpo.zip does not match the numbers of the code. " in message
    assert re.search(r"(loss|stat|parameter) .*: recorded .*, replayed ", message)
    assert f"areal-debug replay {RECORD} --to-step" in message
    assert f"--model {recorded_model}" in message
    assert "pytest tests/plugin/test_regression.py::a_test --areal-record=rewrite" in message


@pytest.mark.long
def test_rewriting_takes_the_new_numbers_and_shows_what_changed(recorded_model, tmp_path, monkeypatch, ranks):
    record = shutil.copy(RECORD, tmp_path / "record.zip")
    break_formula(tmp_path / "core", "clip")
    spec = Spec(Path(record), "a_test", model=recorded_model)
    with monkeypatch.context() as changed:
        changed.setattr(warm, "OURS", tmp_path / "core")
        checked = check_spec(spec, "rewrite", ranks)
        steps = [line for line in checked.changes if not line.startswith("environment: ")]
        assert len(steps) == 10
        assert re.match(r"step 0: \d+ values, such as ppo_actor/", steps[0])
        assert check_spec(spec, "rewrite", ranks).changes == []
    with pytest.raises(RegressionError, match="does not match the numbers of the code"):
        check_spec(spec, "none", ranks)  # the formula is restored, and the record contains the broken one


@pytest.mark.long
def test_a_missing_record_is_made_once_and_contains_no_path_of_this_machine(recorded_model, tmp_path, ranks):
    run = [*RUN, "total_train_steps=2"]
    spec = Spec(tmp_path / "new.zip", "a_test", model=recorded_model, run=run)
    assert check_spec(spec, "once", ranks).changes == ["2 steps recorded for the first time"]
    assert check_spec(spec, "once", ranks).changes is None
    config = json.dumps(open_record(spec.path).header.config)
    assert str(tmp_path.parent.parent) not in config
    assert str(ROOT) not in config


def test_a_missing_record_is_never_generated_unless_requested(tmp_path, ranks):
    with pytest.raises(RegressionError, match=r"mode 'none' never generates one.*--areal-record=once"):
        check_spec(Spec(tmp_path / "missing", "a_test"), "none", ranks)
    with pytest.raises(RegressionError, match="does not define how to generate"):
        check_spec(Spec(tmp_path / "missing", "a_test"), "once", ranks)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_replayed_is_refused_before_anything_runs(tmp_path, ranks):
    with pytest.raises(RegressionError, match="0 to 9"):
        check_spec(Spec(RECORD, "a_test", steps=(0, 10)), "none", ranks)
    with pytest.raises(RegressionError, match="model, which is not a folder on this machine"):
        check_spec(Spec(RECORD, "a_test"), "none", ranks)


def test_relative_paths_of_a_run_start_at_the_root_of_the_project(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "runs").mkdir()
    seen = {}

    def run(command, cwd, **_):
        seen.update({path.name: path.resolve() for path in Path(cwd).iterdir()})
        return subprocess.CompletedProcess(command, 1, "", "stopped")

    monkeypatch.setattr(regression.subprocess, "run", run)
    spec = Spec(tmp_path / "r.zip", "test_x", run=["train.py"], root=tmp_path)
    with pytest.raises(RegressionError, match="stopped"):
        regression.generate(spec)
    assert seen == {"train.py": tmp_path / "train.py"}  # its own folder of runs stays its own


EXAMPLE = ROOT / "examples/ci"


@pytest.fixture
def project(tmp_path):
    (tmp_path / ".github/workflows").mkdir(parents=True)
    shutil.copy(EXAMPLE / "training.yml", tmp_path / ".github/workflows")
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def run_job(project: Path, code: Path) -> tuple[list[str], int, str]:
    """Run the job's commands, but for its installation, up to the first that fails."""
    workflow = yaml.safe_load((project / ".github/workflows/training.yml").read_text())
    job = workflow["jobs"]["replay"]
    commands = [step["run"] for step in job["steps"] if "run" in step and step["name"] != "Install"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment |= job["env"] | {"PATH": path, "PYTHONPATH": str(code)}
    output = ""
    for command in commands:
        done = subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        output += done.stdout + done.stderr
        if done.returncode:
            break
    return commands, done.returncode, output


@pytest.mark.long
def test_the_job_passes_and_leaves_nothing_in_the_repository(project):
    commands, code, output = run_job(project, ROOT)
    assert len(commands) == 2
    assert code == 0, output
    assert "4 steps of 1 record replayed" in output
    left = subprocess.run(
        ["git", "status", "--short", "--untracked-files=all"],
        cwd=project,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    new = [line[3:] for line in left.splitlines() if not line[3:].startswith(("tests/", ".github/"))]
    assert [name for name in new if not name.startswith(".pytest_cache/")] == ["replay.xml"]
