"""What `info` reports of packages, machine, engines and permissions, and which verbs work."""

import json
import os
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

from areal_debug.cli import VERBS
from areal_debug.info import verbs
from areal_debug.info.reachable import find_reachable
from tests.command_line import run as areal_debug

run = partial(areal_debug, "info")

EXTRAS = (
    "train", "query", "archive", "s3", "sglang", "ray", "lora", "trl", "verl", "wandb", "trackio", "mcp",
)  # fmt: skip
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


def verbs_of(lacks=NOTHING_LACKS, has_tensorboard=True):
    here = verbs.verbs_here(lacks, None, SCHEDULERS, has_git=True, has_tensorboard=has_tensorboard)
    return {verb.name: verb for verb in here}


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


def test_files_that_need_a_package_are_named():
    assert verbs_of()["doctor"].limits == ()
    assert verbs_of(has_tensorboard=False)["doctor"].limits == ("TensorBoard files: pip install tensorboard",)


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
