"""Option names, help, verbosity and errors: the same in every verb of the command line."""

import json
import re
import shlex
import subprocess
import sys

import click
import pytest

from areal_debug.cli import SECTIONS, VERBS, Verb, main
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


def test_help_lists_every_verb_in_one_complete_line():
    code, out, _ = run("--help")
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "..." not in out.partition("Options:")[2]
    listed = {
        line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1]
        for line in lines
        if line[2:].split("  ")[0] in VERBS
    }
    assert listed == VERBS
    for title, verbs in SECTIONS.items():
        start = lines.index(f"{title}:")
        assert [line.split()[0] for line in lines[start + 1 : start + 1 + len(verbs)]] == list(verbs)


@pytest.mark.parametrize("group", ["record", "hang", "agent", "reward", "info"])
def test_help_of_a_group_lists_its_commands_in_one_complete_line(group):
    out = run(group, "-h")[1]
    command = COMMANDS[group]
    assert isinstance(command, click.Group)
    for name in command.list_commands(click.Context(command)):
        short = COMMANDS[f"{group} {name}"].short_help
        assert short
        assert any(line.split(maxsplit=1) == [name, short] and len(line) <= 80 for line in out.splitlines())


def test_help_and_completion_import_no_verb():
    code = (
        "import sys; from areal_debug.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in sys.modules if m.endswith('.command') or m in ('torch', 'rich')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version():
    code, out, _ = run("--version")
    assert (code, out.split()[:2]) == (0, ["areal-debug,", "version"])


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["repaly"], "did you mean replay"),
        (["crosschek"], "did you mean crosscheck"),
        (["record", "verfy", "x"], "did you mean verify?"),
        (["hang", "colect"], "did you mean collect?"),
        (["agent", "xyz"], "choose from run, stress"),
    ],
)
def test_a_misspelled_verb_gets_a_suggestion(arguments, hint):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert f"there is no command {arguments[-2] if arguments[-1] == 'x' else arguments[-1]!r}: {hint}" in err


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("replay r --modle x", "--model"),
        ("record ls r --jsno", "--json"),
        ("train x.py --dump-rolout", "--dump-rollout"),
        ("eval x.py --smaples=3", "--samples"),
        ("serve --modle m", "--model"),
        ("hang watch --thn kill -- true", "--then"),
        ("preflight --config x --thorogh", "--thorough"),
    ],
)
def test_a_misspelled_option_gets_a_suggestion(line, meant):
    code, out, err = run(*line.split())
    assert (code, out) == (2, "")
    assert re.search(rf"[Dd]id you mean (one of: .*)?'?{meant}'?\?", err)


def test_options_of_a_job_or_a_server_are_passed_on(tmp_path):
    """Those that follow `--` or the name of the job's program are not ours, however near."""
    job = "import sys; sys.exit(len(sys.argv))"
    assert run("hang", "watch", "-o", tmp_path / "w", sys.executable, "-c", job, "--thn", "a")[0] == 3
    code, _, err = run("serve", "--model", "/absent", "--", "--modle", "m")
    assert (code, "did you mean" in err) == (2, False)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_has_a_short_form_and_an_example(name):
    code, out, _ = run(*name.split(), "-h")
    assert code == 0
    assert out == run(*name.split(), "--help")[1]
    example = out.partition("\nExample:\n")[2]
    assert example.startswith(f"  areal-debug {name}")


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


OVERRIDES = {
    *("train", "eval", "replay", "record import"),
    *("agent run", "agent stress"),
}


def test_quiet_prints_the_verdict_alone(record):
    loud, quiet = run("record", "verify", record), run("record", "verify", record, "-q")
    assert (loud[0], quiet[0]) == (0, 0)
    assert quiet[1] == loud[1].splitlines(keepends=True)[0]
    assert run("record", "ls", record)[1].count("\n") > 2
    assert run("record", "ls", "-q", record)[1].count("\n") == 1
    assert json.loads(run("record", "verify", record, "-q", "--json")[1])["intact"] is True


def test_quiet_keeps_errors_and_verbose_adds_their_traceback(tmp_path):
    plain = run("record", "ls", tmp_path / "no")
    assert plain == run("record", "ls", tmp_path / "no", "-q")
    assert plain[2].startswith("Error: ")
    code, out, err = run("record", "ls", tmp_path / "no", "-v")
    assert (code, out) == (plain[0], plain[1])
    assert "\nTraceback" in err
    assert err.endswith(plain[2])


def test_verbose_prints_progress_that_a_pipe_does_not_show(record):
    assert "verifying" not in run("record", "verify", record)[2]
    assert "verifying: 2 in " in run("record", "verify", record, "--verbose")[2]


def test_quiet_and_verbose_exclude_each_other(record):
    code, _, err = run("record", "ls", record, "-q", "-v")
    assert code == 2
    assert "--quiet and --verbose exclude each other" in err


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


def test_forced_extraction_replaces_a_record_and_nothing_else(record, tmp_path):
    assert run("record", "archive", record, "--to", tmp_path / "a.zip")[0] == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    code, _, err = run("record", "extract", tmp_path / "a.zip", "--to", tmp_path / "mine", "--force")
    assert code == 2
    assert "notes.txt" in err
    (record / "record.json").write_text("{}")
    assert run("record", "extract", tmp_path / "a.zip", "--to", record)[0] == 2
    code, out, _ = run("record", "extract", tmp_path / "a.zip", "--to", record, "--force", "--json")
    assert (code, json.loads(out)["num_steps"]) == (0, 2)
    assert run("record", "verify", record)[0] == 0


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


def test_a_record_and_overrides_of_check_run_are_distinguished_by_their_form(tmp_path):
    code, _, err = run("check", "run", "--config", tmp_path / "c.yaml", "runs/A", "runs/B", "seed=1")
    assert code == 2
    assert "expected one RECORD and overrides OPTION=VALUE, got runs/A runs/B" in err
