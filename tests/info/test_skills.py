"""Skills: their form, what is shipped and copied, and their commands on planted cases."""

import json
import re
import runpy
import shlex
from pathlib import Path

from areal_debug.skills import FOLDER, shipped_skills
from tests.command_line import printed, run

ROOT = Path(__file__).parents[2]
NAMES = [
    "rl-engine-and-trainer-disagree", "rl-loss-is-nan", "rl-reward-is-flat", "rl-run-hangs",
    "rl-run-is-slow", "rl-runs-differ", "rl-spike-does-not-come-back", "rl-works-in-other-framework",
]  # fmt: skip


def commands_of(name: str) -> list[list[str]]:
    """The words of each command in the blocks of a skill, in order, without `areal-debug`."""
    blocks = re.findall(r"^ *```\n(.*?)^ *```", (FOLDER / name / "SKILL.md").read_text(), re.DOTALL | re.M)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


def test_a_skill_names_the_tools_that_answer_its_commands():
    generator = runpy.run_path(str(ROOT / "docs/skills.py"))
    shipped = {skill.name: skill.text for skill in shipped_skills()}
    assert generator["skills"]() == shipped, "run: python docs/skills.py"
    tools = {name: set(re.findall(r"^- `([a-z_]+)`: ", text, re.M)) for name, text in shipped.items()}
    assert tools["rl-run-hangs"] == {"diagnose_hang", "diagnose_live_hang"}
    assert tools["rl-run-is-slow"] == set()


def test_skills_are_listed_printed_and_copied(tmp_path):
    code, out, _ = run("info", "skills")
    assert (code, [line.split()[0] for line in out.splitlines()]) == (0, NAMES)
    assert run("info", "skills", "rl-run-hangs")[1] == (FOLDER / "rl-run-hangs/SKILL.md").read_text()
    target = tmp_path / ".claude/skills"
    assert run("info", "skills", "--to", target)[:2] == (0, f"8 skills copied to {target}\n")
    copied = {file.relative_to(target): file.read_text() for file in target.rglob("*") if file.is_file()}
    assert copied == {Path(n, "SKILL.md"): (FOLDER / n / "SKILL.md").read_text() for n in NAMES}
    (target / "rl-run-hangs/SKILL.md").write_text("mine")
    assert run("info", "skills", "--to", target)[0] == 2
    assert (target / "rl-run-hangs/SKILL.md").read_text() == "mine"
    assert run("info", "skills", "rl-run-hangs", "--to", target, "--force")[0] == 0
    assert (target / "rl-run-hangs/SKILL.md").read_text() != "mine"
    error = "Error: there is no skill 'no': choose from rl-engine-and-trainer"
    assert printed("info", "skills", "no", code=2).startswith(error)


def test_examples_are_copied_whole(tmp_path):
    target = tmp_path / "examples"
    assert run("info", "examples", "--to", target)[:2] == (0, f"examples copied to {target}\n")
    names = {path.relative_to(ROOT / "examples") for path in (ROOT / "examples").rglob("*")}
    copied = {path.relative_to(target) for path in target.rglob("*")}
    assert copied == {name for name in names if not any(part.startswith("__") for part in name.parts)}
    assert run("info", "examples", "--to", target)[0] == 2


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
    code, out, _ = run(*diagnose)
    found = json.loads(out)
    assert (code, found["label"], found["culprit_ranks"]) == (1, "collective_mismatch", [0])
    assert "train.py:12" in found["summary"]
    assert found["would_refute"]
    assert run(*explain[:-1], found["label"])[1].startswith("collective_mismatch\n")
