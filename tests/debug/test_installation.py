"""What `pip install areal-debug` brings runs without the extras; other verbs name theirs."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

from areal_debug.installation import EXTRA_OF, PACKAGES, check_packages

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = {*PACKAGES, "areal_debug"}
RECORD = ROOT / "tests/records/tiny_grpo.zip"


def test_each_data_file_of_a_package_is_in_the_wheel():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    files = subprocess.run(["git", "ls-files", *OURS, "examples"], cwd=ROOT, capture_output=True, text=True)
    left_out = []
    for name in files.stdout.split():
        folder = Path(name).parent
        package = folder if (ROOT / folder / "__init__.py").is_file() else folder.parent
        dotted = "areal_debug.examples" if name.startswith("examples/") else ".".join(package.parts)
        inner = name.removeprefix("examples/" if name.startswith("examples/") else f"{package}/")
        allowed = ["*.py", *patterns.get(dotted, []), *(p for p in patterns["*"] if "/" not in inner)]
        if not any(fnmatch(inner, pattern) and inner.count("/") == pattern.count("/") for pattern in allowed):
            left_out.append(name)
    assert files.stdout.count("\n") > 400
    assert left_out == []


BLOCKED = f"""
import json, os, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {sorted(EXTRA_OF)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
import areal_core.config, areal_debug.view.page, numpy, recorder.trainers.recorder, replayer.diff
from areal_debug.cli import main
for number, arguments in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{{number}}.{{name}}", os.O_WRONLY | os.O_CREAT), stream)
        try:
            main(arguments, prog_name="areal-debug")
        except SystemExit as end:  # without the end of an interpreter, which takes longer than the verb
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def without_extras(folder: Path, *commands: Sequence[object]) -> list[tuple[int, str, str]]:
    """Run commands where no package of an extra can be imported; return code, output and errors."""
    lines = json.dumps([[str(word) for word in command] for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, lines],
        cwd=folder, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    return [
        (int(code), (folder / f"{number}.out").read_text(), (folder / f"{number}.err").read_text())
        for number, code in enumerate(done.stdout.split())
    ]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    from recorder.archive.extract import extract_record

    folder = tmp_path_factory.mktemp("slim") / "record"
    extract_record(RECORD, folder)
    return folder


@pytest.mark.long
def test_what_reads_and_diagnoses_needs_no_extra_and_other_verbs_name_theirs(record, tmp_path):
    (tmp_path / "stats.jsonl").write_text("".join(f'{{"step": {i}, "loss": 1.0}}\n' for i in range(30)))
    (tmp_path / "rank_0.txt").write_text('Thread 1 (active): "MainThread"\n    all_reduce (a.py:1)\n')
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())

    def filled(commands):
        return [[word.format(record=record, archive=RECORD) for word in words] for words in commands]

    wanted, of_extras = filled(table["wanted"]), table["of_extras"].items()
    needing = [(extra, command) for extra, of in of_extras for command in filled(of)]
    every = without_extras(tmp_path, *wanted, *(command for _, command in needing))
    done = every[: len(wanted)]
    assert [code for code, _, _ in done] == [0] * 7 + [1, 2]
    assert "".join(errors for _, _, errors in done[1:-1]) == ""
    assert "Traceback" not in done[-1][2]
    says = {0: "10 steps", 2: "intact", 4: "all bit-identical", 8: "straggler_or_not_hung"}
    assert [words for number, words in says.items() if words not in done[number][1]] == []
    assert "<html" in (tmp_path / "page.html").read_text()
    for (extra, command), (code, _, errors) in zip(needing, every[len(wanted) :], strict=True):
        assert code == 2, command
        assert re.fullmatch(
            rf"Error: this needs the package \w+, which is not installed: pip install 'areal-debug\[{extra}\]'",
            " ".join(errors.split()),
        ), command


@pytest.mark.parametrize("content", ['"""A screen recorder."""\n', None])
def test_another_distributions_package_is_refused(tmp_path, content, monkeypatch):
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_bytes((ROOT / name / "__init__.py").read_bytes())
    if content:
        (tmp_path / "recorder/__init__.py").write_text(content)
    code = f"""
import sys
import tarfile
sys.path.insert(0, {str(tmp_path)!r})
from areal_debug.installation import check_packages
from pathlib import Path
check_packages(Path({str(tmp_path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    refusal = f"ImportError: the package recorder at {tmp_path}/recorder/__init__.py is not the one"
    assert (refusal in done.stderr) == (content is not None), done.stderr
    assert (done.returncode == 0) == (content is None)


def test_a_package_that_shadows_ours_ends_the_command_with_one_sentence(tmp_path):
    check_packages()
    (tmp_path / "replayer").mkdir()
    (tmp_path / "replayer/__init__.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from areal_debug.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "config"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "the package replayer at" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_the_wheel_alone_lists_a_record_and_finds_its_examples(tmp_path, record):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*command: object) -> str:
        done = subprocess.run(
            [*map(str, command)], capture_output=True, text=True, env=environment, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    source = tmp_path / "source"
    run("git", "-C", ROOT, "worktree", "list")
    run("git", "clone", "-q", ROOT, source)
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    pip = [tmp_path / "venv/bin/python", "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "-q", "--no-deps", "-w", tmp_path / "wheel", source)
    (wheel,) = (tmp_path / "wheel").glob("areal_debug-*.whl")
    run(*pip, "install", "-q", wheel)
    command = tmp_path / "venv/bin/areal-debug"
    assert "10 steps" in run(command, "record", "ls", record)
    run(command, "open", record, "--output", tmp_path / "page.html")
    assert run(command, "--version").startswith("areal-debug, version ")
    assert run(tmp_path / "venv/bin/python", "-m", "areal_debug", "--help") == run(command, "--help")
    found = run(
        *(tmp_path / "venv/bin/python", "-c"),
        "from areal_debug.installation import EXAMPLES; print(sorted(p.name for p in EXAMPLES.glob('gsm8k_grpo.*')))",
    )
    assert found.strip() == "['gsm8k_grpo.py', 'gsm8k_grpo.yaml']"
    installed = run(*pip, "list", "--format=freeze").lower()
    assert not any(f"{package}==" in installed for package in ("torch", "transformers", "zarr", "datasets"))


@pytest.mark.long
def test_the_distributions_are_complete(tmp_path):
    """The source distribution has every tracked file, the wheel every file of the packages."""
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "-q", ROOT, source], check=True)
    build = [Path(sys.executable).with_name("uv"), "build", "--quiet", "--out-dir", tmp_path / "dist", source]
    subprocess.run(build, check=True)
    (packed,) = (tmp_path / "dist").glob("*.tar.gz")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert packed.name == f"areal_debug-{PROJECT['project']['version']}.tar.gz"
    tracked = set(subprocess.check_output(["git", "ls-files"], cwd=source, text=True).split("\n")) - {""}
    with tarfile.open(packed) as archive:
        assert tracked - {name.partition("/")[2] for name in archive.getnames()} == set()
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    ours = {name for name in tracked if name.split("/")[0] in OURS}
    examples = {f"areal_debug/{name}" for name in tracked if name.startswith("examples/")}
    assert ours | examples <= in_wheel
    assert {"recorder/FORMAT.md", "areal_debug/py.typed", "areal_debug/examples/gsm8k_grpo.yaml"} <= in_wheel
