"""Option names, help, verbosity and errors: the same in every verb of the command line."""

import json
import re
import shlex
import sys

import click
import pytest

from areal_core.config import GRPOConfig, load_expr_config
from areal_debug.cli import Verb, main
from areal_debug.replay.sweep import settings_of
from recorder.testing import write_scripted_record
from tests.command_line import run, walk

MAY_HAVE_TO = {
    "record archive",
    "record cut",
    "record redact",
    "record extract",
    "record import",
    "record export",
    "hang collect",
    "info skills",
    "info examples",
}
NEVER_REPLACES = {
    "hang watch": "every hang gets a folder of its own, named by the time",
    "record redact": "a copy that is there may be the only one without credentials",
}


COMMANDS = dict(walk())
RUNNABLE = {
    name: command
    for name, command in COMMANDS.items()
    if not isinstance(command, click.Group) or command.invoke_without_command
}


def spellings(command: click.Command) -> dict[str, click.Option]:
    """Return the options of a command by each of their names, without hidden ones."""
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    return {name: option for option in options for name in option.opts}


@pytest.fixture
def record(tmp_path):
    write_scripted_record(tmp_path / "record", num_steps=2)
    return tmp_path / "record"


def test_options_of_a_job_or_a_server_are_passed_on(tmp_path):
    """Those that follow `--` or the name of the job's program are not ours, however near."""
    job = "import sys; sys.exit(len(sys.argv))"
    assert run("hang", "watch", "-o", tmp_path / "w", sys.executable, "-c", job, "--thn", "a")[0] == 3
    code, _, err = run("serve", "--model", "/absent", "--", "--modle", "m")
    assert (code, "did you mean" in err) == (2, False)


def test_a_path_in_place_of_a_command_is_told_the_command_that_reads_it(record):
    for verb, reads in (("hang", "diagnose"), ("record", "show")):
        code, _, err = run(verb, record)
        assert (code, f"to read that path, areal-debug {verb} {reads} {record}" in err) == (2, True)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_options_of_every_example_exist(name):
    for line in run(*name.split(), "-h")[1].partition("\nExample:\n")[2].splitlines():
        words = shlex.split(line)[1:]
        command: click.Command = main
        context = click.Context(main, info_name="areal-debug")
        while isinstance(command, click.Group) and words and command.get_command(context, words[0]):
            found = command.get_command(context, words.pop(0))
            assert found is not None
            command, context = found, click.Context(found, parent=context)
        command.make_parser(context).parse_args(words)


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_verb_has_json_quiet_and_verbose(name):
    options = spellings(RUNNABLE[name])
    assert options["--json"].name == "as_json"
    assert options["-q"] is options["--quiet"]
    assert options["-v"] is options["--verbose"]


@pytest.mark.parametrize("name", RUNNABLE)
def test_names_of_options_mean_the_same_in_every_verb(name):
    command = RUNNABLE[name]
    options = spellings(command)
    assert ("--to" in options) == (name in MAY_HAVE_TO)
    assert ("--output" in options) == ("-o" in options)
    assert not {"--record", "--record-to", "--save", "--markdown", "--set"} & set(options)
    assert options.get("--html") is (options["--output"] if name == "why" else None)
    assert ("--engine" in options) == (name == "consistency")
    writes = bool({"--output", "--to", "--dump-rollout"} & set(options))
    assert ("--force" in options) == (writes and name not in NEVER_REPLACES)
    if "--step" in options:
        assert options["--step"].type is click.INT
        of_default = "" if options["--step"].required else "; by default "
        assert options["--step"].help.startswith(f"Number of the step{of_default}")
    assert all(option.help for option in options.values())
    if isinstance(command, Verb):
        arguments = {argument.name for argument in command.params if isinstance(argument, click.Argument)}
        assert ("overrides" in arguments) == (name in OVERRIDES)


OVERRIDES = {*("train", "eval", "replay", "record import"), *("agent run", "agent stress")}


def test_a_file_is_replaced_with_force_alone(record, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("mine")
    code, _, err = run("open", record, "-o", page)
    assert code == 2
    assert err == f"Error: {page} exists already: give --force to replace it, or another path\n"
    assert page.read_text() == "mine"
    code, out, _ = run("open", record, "-o", page, "--force", "--json")
    assert code == 0
    assert json.loads(out) == {
        "record": str(record),
        "compare": None,
        "step": 1,
        "num_steps": 1,
        "output": str(page),
        "page": str(page),
        "size_bytes": page.stat().st_size,
    }
    assert page.read_text().startswith("<!doctype html>")


def test_a_folder_that_no_demo_wrote_is_not_replaced(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "exists already" in run("demo", "-o", tmp_path)[2]
    code, _, err = run("demo", "-o", tmp_path, "--force")
    assert code == 2
    assert "notes.txt, which no demo wrote" in err


def test_labels_of_hangs_as_json():
    labels = json.loads(run("hang", "explain", "--json")[1])["labels"]
    assert "straggler_or_not_hung" in labels
    explained = json.loads(run("hang", "explain", labels[0], "--json")[1])
    assert explained["label"] == labels[0]
    assert explained["explanation"].startswith(f"{labels[0]}\n\n")


def test_a_sweep_lists_every_combination_and_checks_its_values_first(recorded):
    assert settings_of("actor.eps_clip=0.1,0.2,0.1") == ["actor.eps_clip=0.1", "actor.eps_clip=0.2"]
    assert settings_of("a.b=[1,2],[3]") == ["a.b=[1,2]", "a.b=[3]"]
    for values, sentence in (("", "give an option and its values"), ("=0.1,high", r"actor\.eps_clip.*high")):
        code, _, err = run("replay", recorded, "--sweep", f"actor.eps_clip{values}")
        assert (code, err.startswith("Error: "), err.count("\n")) == (2, True, 1)
        assert re.search(sentence, err)


def test_an_option_has_type_default_limits_and_help():
    _, out, _ = run("config", "actor.optimizer", "--json")
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
    _, out, _ = run("config", "batch_size")
    assert "rollout.consumer_batch_size: int = as train_dataset.batch_size\n" in out
    _, out, _ = run("config", "learning_rate")  # what others call it
    assert out.startswith("actor.optimizer.lr: float = 0.001 (0 or more)\n    Peak learning rate.\n")
    _, out, _ = run("config", "train_dataset.path")
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
