"""Plans of config files in upstream's spelling: translated, reported, and otherwise equal."""

from pathlib import Path

import pytest

from areal_debug.train.script_options import options_of_script
from tests.command_line import reported

UPSTREAM = Path(__file__).parent / "upstream"
SFT = "load_expr_config(sys.argv, SFTConfig)"
GRPO = "config, path = load_expr_config(argv, GRPOConfig)"
OWN = """
from dataclasses import dataclass
from areal_core import config

@dataclass
class Turns(config.GRPOConfig):
    max_turns: int = 1

@dataclass
class Search(Turns):
    search: dict | None = None

config, hooks = wire(sys.argv, Search)
"""


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Return the plan of a config file for a script, given as text."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(file: str, script: str, *overrides: str):
        path = tmp_path / "train.py"
        path.write_text(script)
        return reported("train", path, "--config", UPSTREAM / file, "--dry-run", *overrides)

    return call


def test_supervised_fine_tuning_of_0_3(plan):
    code, run = plan("sft_0_3.yaml", SFT)
    assert (code, run["method"], run["allocation"]) == (0, "supervised fine-tuning", "fsdp:d4")
    assert run["model"] == "not/on-this-machine"
    assert run["update"].startswith("1 optimizer step over 4 sequences per rank, in micro-batches of at most 4,096")  # fmt: skip
    assert [note.partition(" is ")[0] for note in run["notes"][:2]] == ["model", "actor.mb_spec.max_tokens_per_gpu"]  # fmt: skip


def test_dapo_on_ray_with_options_of_the_script(plan):
    code, run = plan("dapo_1_0.yaml", OWN, "search.top_k=9")
    assert code == 0, run
    assert run["allocation"] == "sglang:d2+fsdp:d2"
    assert run["steps"]["total"] == 4  # 512 sequences at 16 x 8 a step, of 20 steps in two epochs
    notes_text = " ".join(run["notes"])
    for part in (
        "rollout.openai is called rollout.agent",
        "action: clamp, upper: 5.0",
        "names are files below",
    ):
        assert part in notes_text


@pytest.mark.parametrize(
    ("script", "name", "own"),
    [
        (GRPO, "PPOConfig", set()),
        (SFT, "SFTConfig", set()),
        (OWN, "PPOConfig", {"max_turns", "search"}),
        ("import mine\nwire(sys.argv, mine.Options)", None, set()),
        ("def broken(:", None, set()),
        ("print(1)", None, set()),
    ],
)
def test_options_of_a_script_are_read_from_its_text(script, name, own):
    found = options_of_script(script)
    assert (found and found.__name__) == name
    assert not own or own < set(found.__dataclass_fields__)


def test_a_script_that_imports_areal_is_refused_with_what_to_write(plan):
    script = "from areal import PPOTrainer\nfrom areal.utils.saver import Saver\n" + GRPO
    code, refused = plan("grpo_vllm_1_0.yaml", script)
    assert code == 2
    assert refused["problems"][1:3] == [
        "  line 1: areal.PPOTrainer: from areal_core.trainer.rl import PPOTrainer",
        "  line 2: areal.utils.saver.Saver: no equivalent (docs/coming_from_areal.md lists what there is)",
    ]
