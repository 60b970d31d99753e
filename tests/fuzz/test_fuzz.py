"""Hostile input: the corpus, and some fresh inputs of every target with a fixed seed.

No input may end in a traceback, take more than 10 s or need more than 1 GiB. `make fuzz` runs more.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .__main__ import parse_arguments
from .guard import Outcome, Tally, Worker, minimised, run_fresh, run_inputs
from .inputs import Input, apply
from .targets import MODULES

CORPUS = Path(__file__).parent / "corpus"
SEED = 14


def failures(tally: Tally) -> list[str]:
    return [f"{place}: {one.given.to_json()}\n{one.error}" for place, one in tally.failures.items()]


@pytest.fixture(scope="module")
def worker_of():
    """Return the worker of the targets of a module: its start takes seconds, most of it imports."""
    workers: dict[str, Worker] = {}
    yield lambda target: workers.setdefault(MODULES[target][0], Worker(target))
    for worker in workers.values():
        worker.stop()


# the corpus of two targets every day; all of them with fresh inputs in the long tests
@pytest.mark.parametrize(
    ("target", "share"),
    [("record", 10), ("pickles", 10), *(pytest.param(name, 1, marks=pytest.mark.long) for name in MODULES)],
)
def test_no_input_of_the_corpus_and_no_fresh_one_breaks_its_reader(worker_of, target, share):
    corpus = [Input.from_json(file.read_text()) for file in sorted((CORPUS / target).glob("*.json"))]
    fresh = MODULES[target][1] // share
    tally = run_inputs(target, corpus, fresh, SEED, shared=worker_of(target))
    assert failures(tally) == []
    assert tally.num_inputs == len(corpus) + fresh


def test_the_corpus_is_small_and_each_input_of_it_has_an_effect():
    files = sorted(CORPUS.rglob("*.json"))
    assert {file.parent.name for file in files} <= set(MODULES)
    assert sum(file.stat().st_size for file in files) < 500_000
    assert all(Input.from_json(file.read_text()).edits for file in files)


def test_edits_change_what_they_name_and_seal_it_again():
    from recorder.documents import checksummed_bytes, parse_checksummed

    base = {"a.json": checksummed_bytes({"n": 1, "m": [2]}), "b.jsonl": b'{"x": 1}\n{"x": 2}\n'}
    edits = [["set", "a.json", ["m", 0], 5], ["drop", "b.jsonl", [1, "x"]], ["bytes", "c", 0, 0, "gone"]]
    files = apply(base, edits).files
    assert parse_checksummed(files["a.json"], "a") == {"n": 1, "m": [5]}
    assert [json.loads(line) for line in files["b.jsonl"].splitlines()] == [{"x": 1}, {}]
    assert base["b.jsonl"].endswith(b"2}\n")


@pytest.mark.parametrize(
    ("edits", "kind", "where"),
    [
        ([["text", "name", "raise"]], "traceback", "KeyError: 'broken'"),
        pytest.param([["text", "name", "sleep"]], "hang", "no frame", marks=pytest.mark.long),
        pytest.param([["text", "name", "allocate"]], "memory", "no error", marks=pytest.mark.long),
        pytest.param([["text", "name", "exit"]], "died", "exit code 3", marks=pytest.mark.long),
        ([["text", "name", "refuse"]], "refused", ""),
    ],
)
def test_the_guard_names_what_an_input_does(edits, kind, where, monkeypatch):
    if kind == "hang":  # only: 2 GiB take longer to allocate on a busy machine
        monkeypatch.setattr("tests.fuzz.guard.LIMIT_S", 5.0)
    seen: list[Outcome] = []
    worker = Worker("broken")
    try:
        worker.run({"input": {"base": "valid", "edits": edits}}, seen.append)
        worker.run({"input": {"base": "valid", "edits": []}}, seen.append)
    finally:
        worker.stop()
    assert [(one.kind, one.where) for one in seen] == [(kind, where), ("passed", "")]


@pytest.mark.long
def test_a_failure_is_minimised_to_the_edit_and_the_text_that_cause_it():
    edits = [["text", "other", "x"], ["text", "name", "well, raise and more"], ["remove", "other"]]
    found = Outcome(Input("valid", edits), "traceback", "KeyError: 'broken'")
    assert minimised("broken", found).given.edits == [["text", "name", "raise"]]


@pytest.mark.long
def test_a_seed_gives_the_same_inputs_again():
    first, second = (run_fresh("names", 50, SEED) for _ in range(2))
    assert (first.num_inputs, first.kinds) == (second.num_inputs, second.kinds)
    assert 0 < first.kinds["refused"] < 50


@pytest.mark.parametrize(
    ("seconds", "target", "problem"),
    [
        ("1", "record", "SECONDS is '1'; expected a whole number of at least 10, 10 for each target"),
        ("100", "", f"SECONDS is '100'; expected a whole number of at least {10 * len(MODULES)}"),
        ("x", "record", "SECONDS is 'x'"),
        ("²0", "record", "SECONDS is '²0'"),
        ("60", "recrod", "TARGET is 'recrod'; expected one of record, archive"),
    ],
)
def test_arguments_are_checked(seconds, target, problem):
    with pytest.raises(ValueError, match="expected") as refused:
        parse_arguments(seconds, target)
    assert str(refused.value).startswith(problem)


@pytest.mark.long
def test_make_fuzz_prints_a_table_and_writes_failing_inputs(tmp_path):
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-m", "tests.fuzz", "10", "names"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].split()[:2] == ["target", "inputs"]
    name, inputs, tracebacks, hangs, large = done.stdout.splitlines()[2].split()[:5]
    assert (name, tracebacks, hangs, large) == ("names", "0", "0", "0")
    assert int(inputs.replace(",", "")) > 100
