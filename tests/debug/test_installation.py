"""What `pip install areal-debug` brings runs without the extras; other verbs name theirs."""

import ast
import functools
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from fnmatch import fnmatch
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from areal_debug.installation import EXTRA_OF, PACKAGES, check_packages

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OURS = {*PACKAGES, "areal_debug"}
RECORD = ROOT / "tests/records/tiny_grpo.zip"
# Imported by a name in a string, or by another package when it is given a URL.
INDIRECT = {"wandb", "trackio", "s3fs", "trl", "bm25s", "openai"}  # the last two: examples
# Hosts of our code with what they bring, and tools of which we start the command.
HOSTS = {"pytest", "vllm", "areal", "prime_rl", "skyrl"} | {"accelerate", "transfer_queue"}
COMMANDS = {"py-spy"}


def distribution(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-")


def declared() -> dict[str, set[str]]:
    """Extra to the distributions that it brings itself; "" is the plain install."""
    extras = PROJECT["project"]["optional-dependencies"]
    requirements = {"": PROJECT["project"]["dependencies"], **extras}
    return {
        extra: {distribution(r) for r in listed} - {"areal-debug"}
        for extra, listed in requirements.items()
        if extra not in ("bench", "dev", "docs", "all")
    }


def imported() -> set[str]:
    """Third-party packages that our code imports anywhere."""
    found = set()
    for package in OURS:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                    found.add(node.module.split(".")[0])
    return found - OURS - sys.stdlib_module_names - HOSTS


@functools.cache
def installed() -> Mapping[str, list[str]]:
    """Return the distributions of each package: seconds, for the metadata of all of them."""
    return packages_distributions()


def distributions_of(package: str) -> set[str]:
    names = installed().get(package, [package])
    return {name.lower().replace("_", "-") for name in names}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    everything = set().union(*declared().values())
    assert {p for p in imported() if not distributions_of(p) & everything} == set()
    used = set().union(*(distributions_of(p) for p in imported() | INDIRECT))
    assert everything - used - COMMANDS == set()


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
import sys
import tarfile
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {sorted(EXTRA_OF)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from areal_debug.cli import main
main(prog_name="areal-debug")
"""


def without_extras(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command where no package of an extra can be imported."""
    command = [sys.executable, "-c", BLOCKED, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    from recorder.archive.extract import extract_record

    folder = tmp_path_factory.mktemp("slim") / "record"
    extract_record(RECORD, folder)
    return folder


def test_what_reads_records_needs_no_extra(record, tmp_path):
    done = without_extras("record", "ls", record)
    assert (done.returncode, done.stderr) == (0, "")
    assert "10 steps" in done.stdout
    done = without_extras("record", "show", record, "--step", 2)
    assert done.returncode == 0, done.stderr
    done = without_extras("record", "verify", record)
    assert done.returncode == 0
    assert "intact" in done.stdout
    done = without_extras("record", "export", record, "--format", "jsonl", "--to", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    done = without_extras("why", record, record, "--all")
    assert done.returncode == 0
    assert "all bit-identical" in done.stdout
    done = without_extras("open", record, "--output", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert "<html" in (tmp_path / "page.html").read_text()


def test_what_diagnoses_needs_no_extra(tmp_path):
    (tmp_path / "stats.jsonl").write_text("".join(f'{{"step": {i}, "loss": 1.0}}\n' for i in range(30)))
    done = without_extras("doctor", tmp_path / "stats.jsonl")
    assert done.returncode in (0, 1)
    assert done.stderr == ""
    (tmp_path / "rank_0.txt").write_text('Thread 1 (active): "MainThread"\n    all_reduce (a.py:1)\n')
    done = without_extras("hang", "diagnose", tmp_path / "rank_0.txt")
    assert "Traceback" not in done.stderr
    assert done.stdout != ""
    assert without_extras("info", "options").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["crosscheck", "RECORD"], "train"),
        (["demo", "-q", "-o", "not-made"], "train"),
        (["replay", "RECORD"], "train"),
        (["eval", "gsm8k_grpo", "--baseline", "-q"], "train"),
        (["serve", "--model", "m", "--backend", "embedded"], "train"),
        (["consistency", "RECORD"], "train"),
        (["record", "archive", "RECORD", "--to", "a.zip"], "archive"),
        (["record", "export", "RECORD", "--format", "hf", "--to", "a"], "archive"),
        (["query", "RECORD", "select 1"], "query"),
        (["record", "ls", RECORD], "archive"),
    ],
)
def test_a_verb_names_the_extra_that_it_needs(arguments, extra, record):
    done = without_extras(*(record if a == "RECORD" else a for a in arguments))
    assert done.returncode == 2
    assert re.fullmatch(
        rf"Error: this needs the package \w+, which is not installed: pip install 'areal-debug\[{extra}\]'",
        " ".join(done.stderr.split()),
    )


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
    if content is None:
        assert done.returncode == 0, done.stderr
    else:
        assert (
            f"ImportError: the package recorder at {tmp_path}/recorder/__init__.py is not the one"
            in done.stderr
        )


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
    """Build and install the wheel as a user does."""
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
