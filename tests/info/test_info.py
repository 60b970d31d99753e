"""What `info` reports of packages, machine, engines and permissions, and which verbs work."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from areal_debug.cli import VERBS, main
from areal_debug.info import machine, packages, verbs
from areal_debug.info.machine import read_gpus, read_permissions
from areal_debug.info.reachable import find_reachable
from hangdoctor.collect.pyspy import Access
from tests.command_line import run as areal_debug

run = partial(areal_debug, "info")

EXTRAS = (
    "train",
    "query",
    "archive",
    "s3",
    "sglang",
    "ray",
    "lora",
    "trl",
    "verl",
    "wandb",
    "trackio",
    "mcp",
)
NOTHING_LACKS: dict[str, list[str]] = {extra: [] for extra in EXTRAS}
SCHEDULERS = {"SLURM": "srun", "Kubernetes": None, "ssh": None, "Ray": None}


def fake_distribution(site: Path, name: str, version: str, *requires: str) -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    needed = "".join(f"Requires-Dist: {text}\n" for text in requires)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}")


def test_the_report_and_its_json_have_the_same_facts_and_import_no_library():
    code = (
        "import sys; from areal_debug.cli import main\n"
        "try: main(['info', *sys.argv[1:]])\n"
        "finally: print([m for m in ('torch', 'transformers', 'psutil') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    text = subprocess.run(command, capture_output=True, text=True)
    assert (text.returncode, text.stderr) == (0, "")
    assert text.stdout.splitlines()[-1] == "[]"
    facts = json.loads(run("--json")[1])
    assert text.stdout.splitlines()[0] == facts["verdict"]
    assert facts["packages"]["versions"]["torch"] == metadata.version("torch")
    assert f"torch {metadata.version('torch')}" in text.stdout
    assert [verb["name"] for verb in facts["verbs"]] == list(VERBS)
    assert facts["machine"]["num_cores"] == os.cpu_count()
    assert {disk["place"] for disk in facts["machine"]["disks"]} == {"current folder", "/dev/shm"}
    assert facts["verdict"].startswith("Consistent: areal-debug ")
    assert run("-q")[1] == f"{facts['verdict']}\n"


def test_a_package_that_another_one_refuses_is_a_problem(tmp_path, monkeypatch):
    fake_distribution(tmp_path, "vllm", "0.30.0", "torch==1.0", 'zarr<1; extra == "more"', "unlisted>9")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, out, _ = run("--json")
    facts = json.loads(out)
    torch = metadata.version("torch")
    assert code == 1
    assert facts["problems"] == [f"vllm 0.30.0 needs torch==1.0, and {torch} is installed"]
    assert facts["verdict"].startswith("Broken: 1 problem of what is installed: areal-debug ")


def test_requirements_of_an_extra_include_those_of_the_extras_that_it_names():
    texts = [
        "numpy>=2",
        'torch>=2.11; extra == "train"',
        'areal-debug[train]; extra == "sglang"',
        'sglang==0.5.23; extra == "sglang"',
        'never; python_version < "3" and extra == "train"',
        'ruff; extra == "dev"',
    ]
    extras = packages.requirements_by_extra(texts)
    assert {extra: [one.name for one in listed] for extra, listed in extras.items()} == {
        "": ["numpy"],
        "train": ["torch"],
        "sglang": ["areal-debug", "sglang"],
    }
    assert [one.name for one in packages.every("sglang", extras)] == ["torch", "sglang"]


@pytest.mark.parametrize(
    ("version", "lack"),
    [
        (None, "torch>=2.11, which is not installed"),
        ("2.10.0", "torch>=2.11, and 2.10.0 is installed"),
        ("2.13.0+cpu", None),
        ("2.14.0.dev1", None),
    ],
)
def test_a_requirement_is_met_by_a_version_of_its_range(version, lack):
    assert packages.unmet(Requirement("torch>=2.11"), {"torch": version}) == lack


def verbs_of(lacks=NOTHING_LACKS, refuses=None, schedulers=SCHEDULERS, has_git=True):
    return {verb.name: verb for verb in verbs.verbs_here(lacks, refuses, schedulers, has_git)}


def test_each_verb_works_where_nothing_lacks():
    assert list(verbs_of()) == list(VERBS)
    assert [v for v in verbs_of().values() if not v.works or v.limits] == []


def test_a_verb_without_its_extra_names_it_and_others_work_with_limits():
    found = verbs_of(
        NOTHING_LACKS | {"train": ["torch"], "archive": ["zarr"], "query": ["duckdb"], "mcp": ["mcp"]}
    )
    lacking = {name for name, verb in found.items() if not verb.works}
    assert lacking == set(verbs.NEEDS)
    assert (found["replay"].extra, found["query"].extra) == ("train", "query")
    assert found["record"].limits == (
        "archive, cut, and records in archives: pip install 'areal-debug[archive]'",
    )


def test_what_the_machine_refuses_is_a_limit_of_the_verb():
    found = verbs_of(refuses="no.", schedulers=SCHEDULERS | {"SLURM": None}, has_git=False)
    assert found["hang"].works
    assert found["hang"].limits == ("stacks of running jobs, but saved ones: no.",)
    assert found["why"].limits == ("--commits: there is no git program on PATH",)
    assert found["train"].limits == ("scheduler.type=slurm: there is no srun on PATH",)


def test_stacks_are_refused_for_the_reason_that_the_collector_gives(monkeypatch):
    monkeypatch.setattr("hangdoctor.collect.pyspy.current_access", lambda uid: access)
    access = Access(1, False, 1000, 1000, False)
    assert "ptrace_scope is 1" in machine.why_no_stacks()
    access = replace(access, may_ptrace=True)
    assert machine.why_no_stacks() is None
    access = Access(None, False, 1000, 1000, False)
    monkeypatch.setattr(machine, "reads_a_child", lambda: False)
    assert "CAP_SYS_PTRACE" in machine.why_no_stacks()


def test_permissions_are_those_of_this_kernel(tmp_path):
    permissions = read_permissions()
    level = Path("/proc/sys/kernel/perf_event_paranoid")
    assert permissions.perf_level == (int(level.read_text()) if level.exists() else None)
    (tmp_path / "stacks.txt").write_text("nothing")
    done = CliRunner().invoke(main, ["hang", "diagnose", str(tmp_path / "stacks.txt"), "-v"])
    assert permissions.confinement in done.stderr


def program(folder: Path, name: str, text: str, monkeypatch) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("text", "gpus", "problem"),
    [
        ("echo 'NVIDIA H100, 81559 MiB, 570.1'", ("NVIDIA H100, 81559 MiB, 570.1",), None),
        ("echo 'no driver'; exit 9", (), "nvidia-smi fails with code 9: no driver"),
        ("sleep 30", (), "nvidia-smi did not return within 0.3 s: the driver may hang"),
    ],
)
def test_gpus_are_those_of_nvidia_smi(tmp_path, monkeypatch, text, gpus, problem):
    program(tmp_path, "nvidia-smi", f"exec {text}" if "sleep" in text else text, monkeypatch)
    monkeypatch.setattr(machine, "GPU_TIMEOUT_S", 0.3)
    assert read_gpus() == (gpus, problem)


def test_engines_are_those_that_are_installed():
    assert find_reachable({"sglang": "1"}).engines == {"sglang": "1", "vllm": None}


def test_variables_are_shown_without_credentials(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz012345")
    monkeypatch.setenv("RAY_ADDRESS", "ray://user:secret-word@head:10001")
    out = run()[1]
    assert "OMP_NUM_THREADS=3" in out
    assert "HF_TOKEN" not in out
    assert "secret-word" not in out


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_the_memory_limit_is_the_smallest_of_the_control_groups(tmp_path, monkeypatch):
    (tmp_path / "a/b").mkdir(parents=True)
    for folder, text in {"a": "5000000000", "a/b": "max"}.items():
        (tmp_path / folder / "memory.max").write_text(f"{text}\n")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("9:cpu:/x\n0::/a/b\n")
    assert machine.memory_limit() == 5_000_000_000
    (tmp_path / "a/memory.max").write_text("max\n")
    assert machine.memory_limit() is None
