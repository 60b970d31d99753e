"""Commands of README and the tour print what is shown, from the built wheel in an empty folder.

Times, rates, sizes and addresses are compared as numbers of any value, and so are sampled tokens and
numbers with a decimal point, which depend on the processor; all others by value. The wheel stands before
the checkout on the path of the interpreter, whose packages it uses: `pip install --target` puts it
there.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    """Build the wheel, and install it into a folder."""
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
