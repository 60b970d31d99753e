"""Bisection finds the commit that changed the numbers, without touching the checkout."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.commits.bisect import bisect, changes, find_commit, first_difference, parse_numbers
from replayer.commits.warm import checkout
from tests.command_line import git


@given(st.integers(1, 200), st.data())
def test_the_first_bad_commit_is_found_by_halving(count, data):
    first_bad = data.draw(st.integers(0, count - 1))
    commits = [str(n) for n in range(count)]
    requested = []

    def is_good(commit):
        requested.append(commit)
        return int(commit) < first_bad

    assert bisect(commits, is_good) == ([str(first_bad)], [])
    assert len(requested) <= math.ceil(math.log2(count)) + 1
    assert len(set(requested)) == len(requested)


@given(st.integers(2, 40), st.data())
def test_commits_that_cannot_be_tested_leave_few_culprits(count, data):
    first_bad = data.draw(st.integers(0, count - 1))
    silent = data.draw(st.sets(st.integers(0, count - 2)))
    commits = [str(n) for n in range(count)]
    culprits, unasked = bisect(commits, lambda c: None if int(c) in silent else int(c) < first_bad)
    assert str(first_bad) in culprits
    assert set(map(int, culprits[:-1])) <= silent
    assert set(map(int, unasked)) <= silent


@pytest.fixture
def repository(tmp_path):
    """Nine commits; from the sixth on, `loss.txt` contains 2."""
    folder = tmp_path / "code"
    folder.mkdir()
    git(folder, "init", "--quiet")
    for number in range(9):
        (folder / "loss.txt").write_text("1" if number < 6 else "2")
        (folder / "notes.txt").write_text(str(number))
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", f"Change {number}")
    git(folder, "tag", "start", "HEAD~8")
    return folder


def replay_in(repository, requested, broken=()):
    """Return a fake replay whose numbers follow from a file of the checkout."""

    def replay(commit, last):
        with checkout(repository) as code:
            place = code.switch(commit)
            number = int((place / "notes.txt").read_text())
            loss = (place / "loss.txt").read_text()
        requested.append((number, last))
        same = {step: {"loss": "1"} for step in range(last + 1)}
        return None if number in broken else same if loss == "1" else same | {last: {"loss": loss}}

    return replay


def test_the_commit_is_named_with_what_it_changed_and_the_checkout_stays(repository):
    (repository / "loss.txt").write_text("work in progress")
    requested = []
    report = find_commit("record", repository, "start", "HEAD", 3, replay_in(repository, requested))
    (culprit,) = report.culprits
    assert (culprit.subject, culprit.author) == ("Change 6", "t")
    assert [(c.where, c.good, c.bad) for c in report.changes] == [("loss", "1", "2")]
    assert "loss.txt" in report.files
    assert (report.num_replays, report.num_commits) == (len(requested), 8)
    assert len(requested) <= 5
    assert (repository / "loss.txt").read_text() == "work in progress"


@pytest.fixture
def holder(repository, tmp_path):
    """Start a process that has a commit checked out; return it and its folder."""
    program = (
        "import sys, time; from pathlib import Path; from replayer.commits.warm import checkout\n"
        "with checkout(Path(sys.argv[1])) as code:\n"
        "    print(code.switch('HEAD~5'), flush=True); time.sleep(600)"
    )
    started = []

    def start():
        # what a shell starts in the background, or with nohup, has some of them ignored
        process = subprocess.Popen(
            [sys.executable, "-c", program, repository],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(tmp_path)},
            preexec_fn=lambda: [signal.signal(n, signal.SIG_DFL) for n in (15, 2, 1)],
        )
        started.append(process)
        return process, Path(process.stdout.readline().strip())

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.long) for n in (signal.SIGINT, signal.SIGHUP))],
)
def test_a_signal_removes_the_checkout_and_leaves_nothing_in_the_repository(repository, holder, number):
    before = files_of(repository / ".git")
    process, place = holder()
    assert (place / "loss.txt").read_text() == "1"
    assert files_of(repository / ".git") == before
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert not place.parent.exists()
    assert files_of(repository / ".git") == before


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_is_in_use_stays(repository, holder):
    before = files_of(repository / ".git")
    killed, left = holder()
    _, used = holder()
    killed.kill()
    killed.wait()
    assert left.exists()
    _, third = holder()
    assert (left.exists(), used.exists(), third.exists()) == (False, True, True)
    assert files_of(repository / ".git") == before


def files_of(folder):
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_compiled_file_of_another_commit_is_not_used(tmp_path):
    git(tmp_path, "init", "--quiet")
    for value in "12":
        (tmp_path / "loss.py").write_text(f"clip = {value}")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "--quiet", "-m", value)
    clips = []
    with checkout(tmp_path) as code:
        for commit in ("HEAD~1", "HEAD", "HEAD~1"):
            place = code.switch(commit)
            os.utime(place / "loss.py", (0, 0))  # the same second, and the same size
            clips.append(
                subprocess.check_output([sys.executable, "-c", "import loss; print(loss.clip)"], cwd=place)
            )
    assert [int(clip) for clip in clips] == [1, 2, 1]


def test_numbers_are_those_of_the_record_not_statistics_that_code_has_added():
    difference = {"rank": 0, "kind": "stat", "where": "x", "recorded": "a", "replayed": "b"}
    added = difference | {"where": "new", "recorded": None}
    report = {"steps": [{"step": 4, "differences": [difference, added]}]}
    numbers = parse_numbers(json.loads(json.dumps(report)))
    assert numbers == {4: {"stat x (rank 0)": "b"}}
    assert first_difference(numbers, {4: {}}) == 4
    assert first_difference(numbers, numbers) is None
    assert changes({"x": 1}, {"y": 2})[1].bad == 2
