"""Hostile input: the corpus, and some fresh inputs of every target with a fixed seed.

No input may end in a traceback, take more than 10 s or need more than 1 GiB. `make fuzz` runs more.
"""

from pathlib import Path

import pytest

from .guard import Outcome, Tally, Worker, run_inputs
from .inputs import Input
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


# the corpus of one target every day; all of them with fresh inputs in the long tests
@pytest.mark.parametrize(
    ("target", "share"),
    [("record", 10), *(pytest.param(name, 1, marks=pytest.mark.long) for name in MODULES)],
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


@pytest.mark.parametrize(
    ("edits", "kind", "where"),
    [
        pytest.param([["text", "name", "raise"]], "traceback", "KeyError: 'broken'", marks=pytest.mark.long),
        pytest.param([["text", "name", "sleep"]], "hang", "no frame", marks=pytest.mark.long),
        pytest.param([["text", "name", "allocate"]], "memory", "no error", marks=pytest.mark.long),
        pytest.param([["text", "name", "exit"]], "died", "exit code 3", marks=pytest.mark.long),
        pytest.param([["text", "name", "refuse"]], "refused", "", marks=pytest.mark.long),
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
