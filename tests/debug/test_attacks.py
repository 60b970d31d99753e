"""Every verb that reads what others wrote, times every attack: a sentence, and no effect.

A new verb must be added to `verbs`, or to NOT_READING with the reason. `make test` tries a
selection of the product, and `make test-long` all of it, by new interpreters.
"""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_core.config.loading import read_yaml
from areal_core.errors import ConfigError
from recorder.testing import write_scripted_record

from ..command_line import walk
from ..forks import COMMAND, run_forked
from .conftest import HERE

AREAL_DEBUG = [sys.executable, "-P", "-m", "areal_debug"]
MODULES = (
    "areal_debug areal_core recorder replayer hangdoctor numpy torch transformers yaml click rich psutil"
)
TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
NOT_READING, INCONCLUSIVE = TABLES["not_reading"], TABLES["inconclusive"]


def verbs(record: str, run: str) -> dict[str, list[str]]:
    """The arguments of every verb that reads a record, or what else a run left."""
    places = {"record": record, "run": run, "here": HERE}
    return {name: [word.format(**places) for word in words] for name, words in TABLES["reading"].items()}


@pytest.fixture(scope="session")
def trained(train, tmp_path_factory) -> Path:
    """A record, metrics, a trace, stacks, rollouts and a page, of three real steps."""
    folder = tmp_path_factory.mktemp("trained")
    done = train("--dump-rollout", folder / "record", "rollout.enable_rollout_tracing=true")
    assert done.returncode == 0, done.stdout + done.stderr
    logs = Path(re.search(r"statistics in (.*)/stats.jsonl", done.stdout)[1])
    shutil.copytree(logs, folder, dirs_exist_ok=True)
    write_rest(folder)
    return folder


def write_run(folder: Path) -> None:
    """The same, made in no time, for verbs that need no model."""
    folder.mkdir(parents=True)
    write_scripted_record(folder / "record")
    rows = [json.dumps({"step": step, "reward": step / 60, "grad_norm": 1.0}) for step in range(60)]
    (folder / "stats.jsonl").write_text("\n".join(rows))
    (folder / "trace").mkdir()
    (folder / "trace" / "rank-00000.jsonl").write_text("{}\n")
    write_rest(folder)


def write_rest(folder: Path) -> None:
    (folder / "stacks").mkdir()
    (folder / "stacks" / "rank_0.txt").write_text("Process 0: python\nThread 1 (idle)\n    f (a.py:7)\n")
    row = {"input": "a", "output": "b", "score": 1.0, "step": 1, "question": "a"}
    (folder / "1.jsonl").write_text(json.dumps(row))
    (folder / "a.html").write_text("<html></html>")


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Replace one file of each kind."""

    def attack(run: Path) -> None:
        names = "record/record.json stats.jsonl trace/rank-00000.jsonl stacks/rank_0.txt 1.jsonl a.html"
        for name in names.split():
            (run / name).unlink()
            make(run / name)

    return attack


def make_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 41)


def plant(run: Path) -> None:
    for name in MODULES.split():
        (run / name).mkdir(exist_ok=True)
        (run / name / "__init__.py").write_text("open('MARK', 'w').close()\nraise SystemExit(99)\n")


KINDS: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "sparse": make_sparse,
    "link loop": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir,
    "one line": lambda path: path.write_bytes(b"[" * (70 << 20)),
}
FILES: dict[str, Callable[[Path], None]] = {
    **{kind: instead(make) for kind, make in KINDS.items()},
    "planted module": plant,
    "folder that loops": lambda run: (run / "record" / "steps" / "000009").symlink_to("..", True),
}
LIMITS = {
    "memory": (resource.RLIMIT_AS, 6 << 30),
    "less memory": (resource.RLIMIT_AS, 2 << 30),
    "little memory": (resource.RLIMIT_AS, 400 << 20),
    "CPU": (resource.RLIMIT_CPU, 40),
    "little CPU": (resource.RLIMIT_CPU, 3),
    "files": (resource.RLIMIT_NOFILE, 64),
    "size of a file": (resource.RLIMIT_FSIZE, 4096),
}
STREAMS = ("closed pipe", "full disk")
NAMES = ("a:", "s3:", "x\x1b[2J", "-o", "$(id)", "{}", "..%2f")


def run_verb(name: str, arguments: list[str], place: Path, **options) -> tuple[int, str]:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*AREAL_DEBUG, *name.split(), *arguments]
    done = subprocess.run(
        command, cwd=place, stdin=subprocess.DEVNULL, env=environment, timeout=240, **options
    )
    return done.returncode, ((done.stdout or b"") + (done.stderr or b"")).decode(errors="replace")


def check(name: str, code: int, text: str, place: Path, honest: bool = False) -> None:
    assert "Traceback" not in text, (name, text[-2000:])
    assert code in ((0, 1) if honest else (0, 1, 2, 141)), (name, code, text[-2000:])
    assert not list(place.rglob("MARK")), name


@contextmanager
def fresh(tmp_path: Path, name: str = "run", like: Path | None = None) -> Iterator[Path]:
    place = tmp_path / "place"
    write_run(place / name) if like is None else shutil.copytree(like, place / name)
    yield place
    shutil.rmtree(place)


def test_every_verb_is_attacked_or_reads_nothing_of_others():
    runnable = {words for words, command in walk() if getattr(command, "invoke_without_command", True)}
    assert set(verbs("", "")) | set(NOT_READING) == runnable


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_is_a_regular_file_of_some_size(tmp_path, kind):
    KINDS[kind](tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match=r"a\.yaml"):
        read_yaml(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize("attack", ["FIFO", "planted module"])
def test_a_verb_ends_whatever_the_files_of_a_run_are(tmp_path, attack):
    with fresh(tmp_path) as place:
        FILES[attack](place / "run")
        inside = place / "run" if attack == "planted module" else place
        names = ("doctor", "record ls", "record import", "hang diagnose")
        for name in names if attack == "FIFO" else names[::3]:
            record, run = ("record", ".") if inside != place else ("run/record", "run")
            words = [*name.split(), *verbs(record, run)[name]]
            if attack == "FIFO":
                done = run_forked([COMMAND, *words], place=inside)
                check(name, done.returncode, done.stdout + done.stderr, place)
            else:  # by a new interpreter, which imports
                check(name, *run_verb(name, words[len(name.split()) :], inside), place)


@pytest.mark.long
@pytest.mark.parametrize("name", verbs("", ""))
def test_every_verb_reads_a_run_that_nobody_attacked(tmp_path, trained, name):
    with fresh(tmp_path, like=trained) as place:
        code, text = run_verb(name, verbs("run/record", "run")[name], place)
        check(name, code, text, place, honest=name not in INCONCLUSIVE)
        assert INCONCLUSIVE.get(name, "") in text


@pytest.mark.long
@pytest.mark.parametrize("name", verbs("", ""))
def test_no_attack_has_an_effect_on_any_verb(tmp_path, trained, name):
    for attack, change in FILES.items():
        with fresh(tmp_path, like=trained) as place:
            change(place / "run")
            inside = attack == "planted module"
            arguments = verbs("record", ".")[name] if inside else verbs("run/record", "run")[name]
            check(f"{name}, {attack}", *run_verb(name, arguments, place / "run" if inside else place), place)
    for hostile in NAMES:
        with fresh(tmp_path, hostile, trained) as place:
            arguments = verbs(f"./{hostile}/record", f"./{hostile}")[name]
            code, text = run_verb(name, arguments, place)
            check(f"{name}, {hostile!r}", code, text, place)
            assert "\x1b" not in text
    for kind, (limit, value) in LIMITS.items():
        with fresh(tmp_path, like=trained) as place:
            lower = lambda: resource.setrlimit(limit, (value, value))  # noqa: B023, E731
            code, text = run_verb(name, verbs("run/record", "run")[name], place, preexec_fn=lower)
            check(f"{name}, {kind}", code, text, place)
    for stream in STREAMS:
        with fresh(tmp_path, like=trained) as place, open("/dev/full", "wb") as full:
            reading, writing = os.pipe()
            os.close(reading)
            output = full.fileno() if stream == "full disk" else writing
            code, text = run_verb(name, verbs("run/record", "run")[name], place, stdout=output)
            os.close(writing)
            check(f"{name}, {stream}", code, text, place)
