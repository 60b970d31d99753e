"""Import paths of AReaL, in strings and in scripts, and the names of the transition table."""

import importlib
import re
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import click
import pytest

from areal_core.agent.errors import NotAnAgent
from areal_core.config import DPOConfig, GRPOConfig, SFTConfig
from areal_core.config.import_paths import OURS, import_object, ours
from areal_core.config.names import all_options
from areal_core.errors import ConfigError, RewardError
from areal_core.reward.functions import load_reward_fn
from areal_core.trainer.build_rollouts import find_workflow
from areal_debug.cli import main

import_agent = partial(import_object, what="agent", raised=NotAnAgent)


@pytest.mark.parametrize("path", OURS.values())
def test_what_a_name_is_called_here_exists(path):
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("areal.workflow.rlvr.RLVRWorkflow", "areal_core.rollout.workflow.RLVRWorkflow"),
        ("areal.workflow.RLVRWorkflow", "areal_core.rollout.workflow.RLVRWorkflow"),
        ("areal.workflow.rlvr:RLVRWorkflow", "areal_core.rollout.workflow:RLVRWorkflow"),
        ("areal.workflow.multi_turn.MultiTurnWorkflow", "areal_core.agent.multi_turn.MultiTurnWorkflow"),
        ("areal.reward.gsm8k_reward_fn", "areal_core.reward.functions.gsm8k_reward_fn"),
        ("areal.PPOTrainer", "areal_core.trainer.rl.PPOTrainer"),
        ("areal.trainer.PPOTrainer", "areal_core.trainer.rl.PPOTrainer"),
        ("areal.api.RolloutWorkflow", "areal_core.rollout.workflow.RolloutWorkflow"),
        ("areal.workflow.rlvr.MyRLVRWorkflow", "areal.workflow.rlvr.MyRLVRWorkflow"),
        ("my.workflow.RLVRWorkflow", "my.workflow.RLVRWorkflow"),
        ("file.py:RLVRWorkflow", "file.py:RLVRWorkflow"),
    ],
)
def test_a_path_of_areal_is_translated_and_no_other(path, expected):
    assert ours(path) == expected


@pytest.mark.parametrize(
    ("load", "path", "error"),
    [
        (find_workflow, "areal.workflow.langchain.math_agent.MathAgent", ConfigError),
        (import_agent, "areal.workflow.openai_agent.math_agent:MathAgent", NotAnAgent),
        (load_reward_fn, "areal.reward.math_parser.process_results", RewardError),
        (find_workflow, "realhf.impl.environment.Env", ConfigError),
    ],
)
def test_an_unknown_path_of_areal_is_refused_with_the_page_of_its_names(load, path, error):
    dotted = path.replace(":", ".")
    with pytest.raises(error, match=rf"AReaL's {dotted} has no equivalent here \(docs/coming_from_areal.md"):
        load(path)


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming_from_areal.md").read_text().partition("## AReaL's guides")[0]
# What a column's header names -> commits that are searched.
COMMITS = {
    "0.1 to 0.3": ("v0.3.0",),
    "0.3 to 0.5": ("v0.3.0-lite", "v0.3.1", "v0.3.4", "v0.4.0", "v0.5.1"),
    "1.0 to 2.0": ("v1.0.2", "v1.0.4", "cbff54d64"),
}
ALL = [commit for commits in COMMITS.values() for commit in commits]
KNOWN = {
    name: commits.split()
    for line in (Path(__file__).parent / "upstream_names.txt").read_text().splitlines()
    for name, _, commits in [line.partition(" ")]
}
OPTIONS = {option for cls in (GRPOConfig, SFTConfig, DPOConfig) for option in all_options(cls)}


def cells(page: str) -> Iterator[tuple[str, str]]:
    """Yield the header and the text of each cell of the page's tables."""
    headers: list[str] = []
    for line in page.splitlines():
        if not line.startswith("|"):
            headers = []
            continue
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if not headers:
            headers = row
        elif set(line) - set("|- "):
            yield from zip(headers, row, strict=True)


def names_in(cell: str) -> Iterator[str]:
    """Yield the names in a cell's code: without arguments, values and the words of a command."""
    for code in re.findall(r"`([^`]+)`", cell):
        words = code.split()
        for word in words:
            name = re.split(r"[(=:]", word)[0]
            is_name = re.fullmatch(r"[A-Za-z_]\w*([./-]\w+)*", name) is not None
            if is_name and (len(words) == 1 or "/" in name or "." in name or "=" in word):
                yield name


UPSTREAM = [(header, cell) for header, cell in cells(PAGE) if header.startswith("AReaL")]
HERE = [cell for header, cell in cells(PAGE) if header == "here"]


@cache
def code() -> str:
    return "\n".join(file.read_text() for file in ROOT.glob("areal_*/**/*.py"))


def exists(name: str) -> bool:
    """Whether a name of ours exists: an import path, a file, an option or a metric."""
    if name.startswith(("areal_core.", "areal_debug.")):
        return imported(name) is not None
    if name in OPTIONS or (ROOT / name).exists():
        return True
    words = [name] if name.isupper() else name.split("/")
    return len(words) > 1 - name.isupper() and all(re.search(rf"\b{word}\b", code()) for word in words)


def imported(path: str) -> object:
    """The module, or the attribute of a module or class, at a path; None without one."""
    names = path.split(".")
    for length in range(len(names), 0, -1):
        try:
            found = importlib.import_module(".".join(names[:length]))
        except ModuleNotFoundError:
            continue
        for name in names[length:]:
            found = getattr(found, name, None)
        return found
    return None


def has_verb(words: list[str]) -> bool:
    found: click.Command | None = main
    for word in words:
        found = found.get_command(None, word) if isinstance(found, click.Group) else None
    return found is not None


def test_every_name_of_areal_exists_in_a_version_of_its_column():
    wrong = [
        (header, name)
        for header, cell in UPSTREAM
        for name in names_in(cell)
        if not set(KNOWN.get(name, ())) & set(COMMITS.get(header.removeprefix("AReaL").strip(), ALL))
    ]
    assert wrong == []
    assert len(UPSTREAM) > 150


def test_what_is_named_here_exists():
    quoted = [text for cell in HERE for text in re.findall(r"`([^`]+)`", cell) if text != "PPOTrainer"]
    verbs = [text for text in quoted if text.startswith("areal-debug ")]
    names = [name for text in quoted if text not in verbs for name in names_in(f"`{text}`")]
    assert [verb for verb in verbs if not has_verb(verb.split()[1:])] == []
    assert [name for name in names if not exists(name)] == []
    assert len(names) == len(quoted) - len(verbs) > 90
