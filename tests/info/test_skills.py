"""Skills: their form, what is shipped and copied, and their commands on planted cases."""

import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from areal_debug.cli import main
from areal_debug.skills import FOLDER, parse_skill, shipped_skills
from recorder.testing import SCRIPTED_HEADER

from ..replayer.test_diff import record

ROOT = Path(__file__).parents[2]
NAMES = [
    "rl-engine-and-trainer-disagree", "rl-loss-is-nan", "rl-reward-is-flat", "rl-run-hangs",
    "rl-run-is-slow", "rl-runs-differ", "rl-spike-does-not-come-back", "rl-works-in-other-framework",
]  # fmt: skip
CONFIG = {"seed": 1, "actor": {"dtype": "float32", "eps_clip": 0.2, "optimizer": {"lr": 1e-6}}}


def commands_of(name: str) -> list[list[str]]:
    """The words of each command in the blocks of a skill, in order, without `areal-debug`."""
    blocks = re.findall(r"^ *```\n(.*?)^ *```", (FOLDER / name / "SKILL.md").read_text(), re.DOTALL | re.M)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return done.exit_code, done.stdout


def test_there_is_a_skill_for_each_page_of_a_symptom():
    assert [skill.name for skill in shipped_skills()] == NAMES
    assert len(NAMES) == len(list((ROOT / "docs/symptoms").glob("*.md")))


def test_a_skill_is_what_its_page_generates():
    generator = runpy.run_path(str(ROOT / "docs/skills.py"))
    shipped = {skill.name: skill.text for skill in shipped_skills()}
    assert generator["skills"]() == shipped, "run: python docs/skills.py"
    tools = {name: set(re.findall(r"^- `([a-z_]+)`: ", text, re.M)) for name, text in shipped.items()}
    assert tools["rl-run-hangs"] == {"diagnose_hang", "diagnose_live_hang"}
    assert tools["rl-run-is-slow"] == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_skill_has_the_front_matter_and_the_length_that_assistants_expect(name):
    text = (FOLDER / name / "SKILL.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert set(front) == {"name", "description"}
    assert front["name"] == name
    assert re.fullmatch(r"[a-z0-9-]{1,64}", name)
    assert " Use when " in front["description"]
    assert len(front["description"]) <= 1024
    assert len(text.splitlines()) < 100
    assert parse_skill(text).text == text
    assert commands_of(name)


def test_an_option_that_a_skill_names_in_its_text_is_one_of_a_command(tmp_path):
    known = {"--"}
    context = main.make_context("areal-debug", ["info", "skills"], resilient_parsing=True)

    def add(command):
        known.update(name for option in command.params for name in option.opts)
        for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
            add(command.get_command(context, name))

    add(main)
    known |= {"--config", "--dry-run"}
    for name in NAMES:
        text = (FOLDER / name / "SKILL.md").read_text()
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) <= known, name


def test_skills_are_listed_printed_and_copied(tmp_path):
    code, out = run("info", "skills")
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, NAMES)
    assert run("info", "skills", "rl-run-hangs")[1] == (FOLDER / "rl-run-hangs/SKILL.md").read_text()
    target = tmp_path / ".claude/skills"
    assert run("info", "skills", "--to", target) == (0, f"8 skills copied to {target}\n")
    copied = {file.relative_to(target): file.read_text() for file in target.rglob("*") if file.is_file()}
    assert copied == {Path(n, "SKILL.md"): (FOLDER / n / "SKILL.md").read_text() for n in NAMES}
    (target / "rl-run-hangs/SKILL.md").write_text("mine")
    assert run("info", "skills", "--to", target)[0] == 2
    assert (target / "rl-run-hangs/SKILL.md").read_text() == "mine"
    assert run("info", "skills", "rl-run-hangs", "--to", target, "--force")[0] == 0
    assert (target / "rl-run-hangs/SKILL.md").read_text() != "mine"
    done = CliRunner().invoke(main, ["info", "skills", "no"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: there is no skill 'no': choose from rl-engine-and-trainer")


def test_the_skill_of_differing_runs_leads_to_the_option_that_differs(tmp_path, monkeypatch):
    """Two records of one run, in one of which eps_clip and the loss after it were changed."""

    def clipped(step, script):
        script.losses[1] = 0.75 if step == 1 else script.losses[1]

    ours = replace(SCRIPTED_HEADER, config=CONFIG)
    theirs = replace(ours, config=CONFIG | {"actor": CONFIG["actor"] | {"eps_clip": 0.1}})
    record(tmp_path / "runs/A", header=ours)
    record(tmp_path / "runs/B", header=theirs, change=clipped)
    monkeypatch.chdir(tmp_path)
    # `record verify` recomputes what the numbers of a scripted step only pretend to be
    steps = [words for words in commands_of("rl-runs-differ") if words[:2] != ["record", "verify"]]
    results = {" ".join(words): run(*words) for words in steps}
    assert {name: code for name, (code, _) in results.items()} == {
        "record ls runs/A": 0,
        "why runs/A runs/B --json": 1,
        "why runs/A runs/B --all": 1,
    }
    answer = json.loads(results["why runs/A runs/B --json"][1])
    assert (answer["step"], answer["stage"], answer["confidence"]) == (1, "loss", "high")
    assert answer["cause"]["kind"] == "config"
    assert answer["cause"]["what"] == "actor.eps_clip is 0.2 in A and 0.1 in B"
    assert "eps_clip" in answer["next"]
    assert answer["refuted_by"]
    assert "diverge first in step 1, stage loss" in results["why runs/A runs/B --all"][1]


STACK = """Process {pid}: python train.py
Thread {pid} (active): "MainThread"
    {wait} (torch/distributed/distributed_c10d.py:{line})
    {caller} (train.py:{number})
    main (train.py:21)
"""


def test_the_skill_of_hangs_leads_from_saved_stacks_to_the_line_of_the_culprit(tmp_path, monkeypatch):
    (tmp_path / "stacks").mkdir()
    barrier = {"wait": "barrier", "line": 6371, "caller": "log_step", "number": 12}
    reduction = {"wait": "all_reduce", "line": 3913, "caller": "main", "number": 19}
    for rank in range(3):
        text = STACK.format(pid=100 + rank, **(reduction if rank else barrier))
        (tmp_path / f"stacks/rank_{rank}.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    commands = commands_of("rl-run-hangs")
    (diagnose,) = (words for words in commands if words[:2] == ["hang", "diagnose"])
    (explain,) = (words for words in commands if words[:2] == ["hang", "explain"])
    code, out = run(*diagnose)
    found = json.loads(out)
    assert (code, found["label"], found["culprit_ranks"]) == (1, "collective_mismatch", [0])
    assert "train.py:12" in found["summary"]
    assert found["would_refute"]
    assert run(*explain[:-1], found["label"])[1].startswith("collective_mismatch\n")


@pytest.mark.long  # half a minute
def test_the_skill_of_hangs_leads_from_a_job_that_hangs_to_the_line_of_the_culprit(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    job = subprocess.Popen(
        [*launch, ROOT / "examples/hang.py"], stderr=subprocess.DEVNULL, start_new_session=True
    )

    def follow(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "areal_debug", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout

    def label_of(out: str) -> str:
        return json.loads(out)["label"] if out.startswith("{") else "no ranks"

    names, results = {"LAUNCHER": str(job.pid)}, {}
    try:
        for words in commands_of("rl-run-hangs"):
            if words == ["hang", "--json"]:
                continue  # other jobs may run on the machine of a test
            given = [names.get(word, word) for word in words]
            results[" ".join(words)] = code, out = follow(*given)
            while words[:2] == ["hang", "--pid"] and label_of(out) in ("no ranks", "straggler_or_not_hung"):
                assert job.poll() is None  # it starts
                results[" ".join(words)] = code, out = follow(*given)
            if words[:2] == ["hang", "--pid"]:
                assert code == 1
                names["LABEL"] = label_of(out)
        live = json.loads(results["hang --pid LAUNCHER --json"][1])
        saved = json.loads(results["hang diagnose stacks --json"][1])
        for found in (live, saved):
            assert (found["label"], found["culprit_ranks"]) == ("collective_mismatch", [0])
            assert found["victim_ranks"] == [1, 2]
            assert "hang.py:12" in found["summary"]
            assert found["would_refute"]
        assert results["hang collect --to stacks --pid LAUNCHER"][0] == 0
        assert results["hang explain LABEL"][1].startswith("collective_mismatch\n")
    finally:
        os.killpg(job.pid, signal.SIGTERM)
        job.wait(30)
