"""`areal-debug info options`: the options of a run, and the help of a script."""

import json
from functools import partial

import pytest

from areal_core.config import GRPOConfig, load_expr_config
from tests.command_line import run as areal_debug

run = partial(areal_debug, "config")


def test_an_option_has_type_default_limits_and_help():
    _, out, _ = run("actor.optimizer", "--json")
    options = {option["name"]: option for option in json.loads(out)["options"]}
    assert options["actor.optimizer.beta1"] == {
        "name": "actor.optimizer.beta1",
        "type": "float",
        "default": "0.9",
        "allowed": "0 or more, and below 1",
        "help": "Decay of the first moment.",
        "is_section": False,
    }
    assert options["actor.optimizer.type"]["allowed"] == "adam, sgd, adam_bf16"
    _, out, _ = run("batch_size")
    assert "rollout.consumer_batch_size: int = as train_dataset.batch_size\n" in out
    _, out, _ = run("learning_rate")  # what others call it
    assert out.startswith("actor.optimizer.lr: float = 0.001 (0 or more)\n    Peak learning rate.\n")
    _, out, _ = run("train_dataset.path")
    assert "train_dataset.path: str = required\n    File (JSONL, CSV, Parquet)" in out


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_the_help_of_a_script_names_its_arguments_and_options(flag, capsys):
    with pytest.raises(SystemExit) as end:
        load_expr_config(["train.py", flag], GRPOConfig)
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert out.startswith("usage: python SCRIPT.py --config FILE.yaml [OPTION=VALUE]...")
    assert "\n  gconfig         Sampling in training.\n" in out
    assert "areal-debug info options [SECTION|SEARCH]" in out
