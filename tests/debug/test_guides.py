"""The debugging guides, followed to the letter from an empty folder."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_core.launch.server_process import free_port
from areal_core.testing import make_tiny_model
from tests.command_line import invoke

PAGE = (Path(__file__).parents[2] / "docs" / "guides.md").read_text()
FILES = {
    "digits.py",
    "my_agent.py",
    "claude_agent.py",
    "rows.csv",
    "rollout.yaml",
    "rollout.py",
    "train.py",
    "train.yaml",
}
QUICK = [
    "cleanup_deadlock",
    "collective_mismatch",
    "nccl_timeout",
    "AREAL_COLLECTIVE_TIMEOUT_S",
    "options agree with each other",
]
PRINTED: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def blocks(page: str = PAGE) -> Iterator[tuple[str, str, str]]:
    """Yield the paragraph before each code block, the block's kind and its text."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        yield page[: found.start()].rstrip().rpartition("\n\n")[2], found.group(1), found.group(2)


# the commands that need no server and no run, each with what it prints in a comment
COMMANDS = [line for _, kind, text in blocks() if kind == "sh" for line in text.splitlines()]


def commands() -> list[str]:
    texts = [text for _, kind, text in blocks() if not kind and not text.startswith("prompt,")]
    return [line for text in texts for line in text.splitlines()]


@pytest.fixture
def folder(tmp_path):
    """The files of the page: each is the block below the paragraph that ends with its name."""
    for before, kind, text in blocks():
        if kind in ("python", "yaml"):
            name = re.findall(r"`(\w+\.(?:py|yaml))`", before)[-1]
            (tmp_path / name).write_text(text)
        elif kind == "text":
            (stacks,) = re.findall(r"`(\w\.txt)`", before)
            (tmp_path / stacks).write_text(text)
        elif text.startswith("prompt,"):
            header, *lines = text.splitlines(keepends=True)
            (tmp_path / "rows.csv").write_text(header + "".join(lines) * 8)
    assert {file.name for file in tmp_path.iterdir()} == FILES | {"a.txt", "b.txt", "c.txt"}
    return tmp_path


def follow(folder: Path, serve_options: str = "") -> None:
    """Run every command of the page in one shell's environment, from top to bottom."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "XDG_STATE_HOME": str(folder / "state"),
    }
    environment.pop("PYTHONHASHSEED", None)
    seen = set()
    port = str(free_port("127.0.0.1"))
    try:
        for line in commands():
            command = line.replace("30000", port)
            if command.startswith("export "):
                name, _, value = command.removeprefix("export ").partition("=")
                environment[name] = value
                continue
            if command.startswith("areal-debug serve --model"):
                command += serve_options
            done = subprocess.run(
                command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, (command, done.stdout, done.stderr)
            begin = next((words for words in PRINTED if command.startswith(words)), None)
            if begin is not None:
                assert PRINTED[begin] in done.stdout, (command, done.stdout)
                seen.add(begin)
            if command == "areal-debug train train.py":
                assert f"inference servers, which keep running: 127.0.0.1:{port}" in done.stdout
    finally:
        subprocess.run(["areal-debug", "serve", "--stop", "--all"], env=environment, check=False)
    assert seen == set(PRINTED)


@pytest.mark.long  # a minute and a half
def test_the_guides_work_as_written(folder):
    follow(folder, " --backend embedded")


@pytest.mark.parametrize(("command", "printed"), list(zip(COMMANDS, QUICK, strict=True)))
def test_a_quick_recipe_prints_what_its_comment_says(folder, monkeypatch, command, printed):
    command, _, comment = command.partition("    # ")
    assert comment == printed
    make_tiny_model(folder / "model")  # as the page does before
    monkeypatch.chdir(folder)
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "127.0.0.1:30000")  # the page has exported it
    done = invoke(*shlex.split(command)[1:])
    assert done.exit_code == (1 if "hang" in command.split() else 0), done.output
    assert re.search(comment.replace(" ", r"\s+"), done.output), done.output
    assert ".py:0" not in done.output  # an excerpt has no line numbers
