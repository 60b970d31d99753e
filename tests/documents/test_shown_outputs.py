"""Commands and options that documents show are accepted, and those of two pages print what is shown.

The pages are README and the tour, run from the built wheel in an empty folder.

Times, rates, sizes and addresses are compared as numbers of any value, and so are sampled tokens and
numbers with a decimal point, which depend on the processor; all others by value. The wheel stands before
the checkout on the path of the interpreter, whose packages it uses: `pip install --target` puts it
there.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from areal_debug.cli import main
from areal_debug.info.options import KINDS, options_of

ROOT = Path(__file__).parents[2]
# What differs between machines and runs: times, rates, rounding, addresses, folders of the user.
VARIES = [
    (r"-?\b\d+(\.\d+(e[-+]\d+)?|e[-+]\d+)\b", "N"),
    (r"-?(N|\d[\d,]*) (tokens/s|tokens of|s\b|MB|kB)", "N"),
    (r"runs/logs/\w+/", "runs/logs/USER/"),
    (r"\d{4}-\d\d-\d\dT[\d:+]+", "TIME"),
    (r"\(\S*?(\w+\.py):\d+\)", r"(\1)"),
    (r" +", " "),
]


def first_block(page: str, after: str) -> str:
    """Return the first code block after a text of a page in docs/."""
    text = (ROOT / "docs" / page).read_text()
    found = re.search(r"```\w*\n(.*?)```", text[text.index(after) :], re.DOTALL)
    assert found is not None
    return found[1]


def sessions(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of the code blocks, with the lines shown below it if it has a prompt."""
    for block in re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if block.startswith("$ "):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                yield command, shown.splitlines()
        elif re.match(r"areal-debug|python -c", block):
            yield from ((line.partition("  #")[0], []) for line in block.splitlines())


def comparable(line: str) -> str:
    for pattern, instead in VARIES:
        line = re.sub(pattern, instead, line)
    return line.strip()


def not_printed(shown: list[str], printed: str) -> list[str]:
    """Return shown lines that were not printed in their order; `...` leaves out lines or an end."""
    words = comparable(" ".join(printed.split()))
    lines, missing = [comparable(line) for line in printed.splitlines()], []
    for line in map(comparable, shown):
        begin = line.removesuffix("...").strip()
        is_wrapped = begin in words
        if begin and not is_wrapped and not any(one.startswith(begin) for one in lines):
            missing.append(line)
    return missing


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "build", "--quiet", "--wheel", "--out-dir", folder / "dist", ROOT], check=True)
    (built,) = (folder / "dist").glob("*.whl")
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--no-deps", "--target", folder / "lib", built], check=True
    )
    return folder / "lib"


def run(command: str, folder: Path, wheel: Path) -> str:
    """Run one command as a reader of the page would; exit codes 0 to 2 are verdicts."""
    environment = os.environ | {
        "PATH": f"{wheel / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(wheel),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "400",
    }
    environment.pop("PYTHONHASHSEED", None)
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode in (0, 1, 2), (command, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr, (command, done.stderr)
    return done.stdout + done.stderr


def follow(text: str, folder: Path, wheel: Path) -> int:
    """Run the commands of a page in order; returns how many had an output to compare."""
    compared = 0
    for command, shown in sessions(text):
        printed = run(command, folder, wheel)
        assert not_printed(shown, printed) == [], (command, printed)
        compared += bool(shown)
    return compared


@pytest.mark.long
def test_the_tour_prints_what_it_shows(tmp_path: Path, wheel: Path) -> None:
    for name in ("train.py", "train.yaml"):
        (tmp_path / name).write_text(first_block("first_run.md", f"`{name}`:"))
    run(first_block("first_run.md", "`rows.csv`,"), tmp_path, wheel)
    where = run("python -c 'import areal_debug; print(areal_debug.__file__)'", tmp_path, wheel)
    assert where.startswith(str(wheel))
    assert follow((ROOT / "docs/tour.md").read_text(), tmp_path, wheel) == 7


@pytest.mark.long
def test_the_readme_prints_what_it_shows(tmp_path: Path, wheel: Path) -> None:
    """The blocks on a record; tests/debug/test_training_examples.py runs the one on a hang."""
    run("areal-debug demo", tmp_path, wheel)
    text = (ROOT / "README.md").read_text()
    on_records = "".join(re.findall(r"^```\n\$ areal-debug .*?^```\n", text, re.DOTALL | re.MULTILINE))
    assert follow(on_records, tmp_path, wheel) == 2


PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "examples/**/*.md",
        "*/FORMAT.md",
        "*/COLLECTION.md",
        "areal_debug/skills/*/*.md",
    )
    for path in ROOT.glob(pattern)
)
BLOCK = re.compile(r"^ *```\w*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
LINE = re.compile(r"^ *(?:\$ )?(?:\w+=\S+ )*areal-debug (.+)$", re.MULTILINE)
END = re.compile(r"\|{1,2}|&&?|;|\d?[<>].*")
OPTIONS = {option.name for cls in KINDS.values() for option in options_of(cls)}
SECTIONS = "|".join({name.partition(".")[0] for name in OPTIONS if "." in name})
DOTTED = re.compile(rf"(?<![\w./-])(?:{SECTIONS})(?:\.[a-z_0-9]+)+(?![\w.*(/{{])")
# A document that names options of earlier versions.
OTHER_OPTIONS = {Path("CHANGELOG.md")}


def commands_in_sentences(text: str) -> Iterator[str]:
    """Commands in `code`; two commands that differ in a word are written `a|b`."""
    for code in re.findall(r"`([^`]+)`", BLOCK.sub("", text)):
        words = " ".join(code.split())
        if words.startswith("areal-debug ") and not re.search(r"\w\|\w|VERB", words):
            yield words.removeprefix("areal-debug ")


def mistake(command: str, is_complete: bool = True) -> str:
    """Return what the command line would refuse before a file is read, or nothing.

    A command in a sentence may leave out values and arguments.
    """
    words = shlex.split(command, comments=True)
    words = words[: next((n for n, word in enumerate(words) if END.fullmatch(word)), len(words))]
    verb: click.Command = main
    context = click.Context(main, info_name="areal-debug")
    try:
        while isinstance(verb, click.Group) and words and not words[0].startswith("-"):
            name, verb, _ = verb.resolve_command(context, words)
            context = verb.context_class(verb, context, info_name=name, **verb.context_settings)
            words = words[1:]
        values, left, _ = verb.make_parser(context).parse_args(words)
        for parameter in verb.params:
            value = values.get(parameter.name)
            if isinstance(parameter.type, click.Choice):
                for one in value if isinstance(value, list) else [value]:
                    if isinstance(one, str) and not one.isupper():
                        parameter.type.convert(one, parameter, context)
            is_missing = isinstance(parameter, click.Argument) and not isinstance(value, str | tuple)
            if is_complete and is_missing and parameter.required:
                return f"missing {parameter.human_readable_name}"
        return f"too many arguments: {left}" if left else ""
    except click.UsageError as error:
        is_cut = not is_complete and "requires an argument" in error.format_message()
        return "" if is_cut else error.format_message()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_shown_commands_are_accepted(page: Path) -> None:
    text = (ROOT / page).read_text()
    blocks = "\n".join(BLOCK.findall(text)).replace("\\\n", " ")
    found = {command: mistake(command) for command in LINE.findall(blocks)}
    found |= {command: mistake(command, is_complete=False) for command in commands_in_sentences(text)}
    assert {command: why for command, why in found.items() if why} == {}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in OTHER_OPTIONS], ids=str)
def test_shown_options_exist(page: Path) -> None:
    codes = re.findall(r"`([^`]+)`", (ROOT / page).read_text())
    named = {name for code in codes for name in DOTTED.findall(code)}
    named = {name for name in named if name.rpartition(".")[2] not in ("py", "yaml", "md", "launch_server")}
    assert named - OPTIONS == set()
