"""Standard output that is closed, full, cut off or of few characters: one sentence at most."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from recorder.testing import write_scripted_record
from tests.command_line import walk

COMMAND = [sys.executable, "-m", "areal_debug"]
# Run each command in a process of its own, which has imported what all need.
DRIVER = """
import json, os, sys
import areal_debug.verbs.record, areal_debug.record.report, recorder
from areal_debug.cli import main
output, encoding, commands = sys.argv[1], sys.argv[2], json.load(open(sys.argv[3]))
for number, arguments in enumerate(commands):
    if os.fork() == 0:
        os.dup2(os.open(f"{number}.err", os.O_WRONLY | os.O_CREAT), 2)
        os.close(1)
        sys.stdout = None if output == "closed" else open(output.format(number), "w", encoding=encoding)
        main(arguments)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    print(json.dumps([code, open(f"{number}.err").read()]), flush=True)
"""
CLOSED = "Error: standard output is closed: redirect it to a file, or to /dev/null\n"
FULL = "Error: standard output cannot be written: No space left on device\n"


def run_each(folder: Path, commands: list[list[str]], output: str, encoding: str = "utf-8", **variables: str):
    """Return exit code and messages of each command, run with the same standard output."""
    folder.mkdir(exist_ok=True)
    (folder / "commands.json").write_text(json.dumps(commands))
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, output, encoding, "commands.json"],
        cwd=folder, capture_output=True, text=True, env=os.environ | variables, check=True,
    )  # fmt: skip
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[list[str]]:
    """Commands that print a report, with characters that not every encoding has."""
    folder = tmp_path_factory.mktemp("terminal")
    write_scripted_record(folder / "récord", num_steps=30)
    record, stats = str(folder / "récord"), folder / "stats.jsonl"
    stats.write_text(
        "\n".join(json.dumps({"step": i, "grad_norm": 2.0**i, "reward": 0.1}) for i in range(60))
    )
    return [
        ["record", "ls", record],
        ["record", "ls", record, "--json"],
        ["record", "show", record],
        ["record", "show", record, "--tokens"],
        ["record", "verify", record],
        ["record", "archive", record, "--to", "a.zip", "--force"],
        ["record", "export", record, "--format", "jsonl", "--to", "e.jsonl", "--force"],
        ["why", record, record, "--all"],
        ["why", record, record, "--no-replay"],
        ["open", record, "-o", "v.html", "--force"],
        ["doctor", str(stats)],
        ["info", "options", "actor.optimizer"],
        ["hang", "explain"],
        ["--help"],
        ["record", "ls", "é [/absent]"],
    ]  # fmt: skip


SHARE = pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.long)])


@SHARE
def test_every_verb_refuses_a_closed_standard_output_in_one_sentence(tmp_path, every):
    verbs = [name.split() for name, _ in walk()][::every]
    assert run_each(tmp_path, verbs, "closed") == [(2, CLOSED)] * len(verbs)


@SHARE
def test_every_report_on_a_full_disk_ends_with_one_sentence(reports, tmp_path, every):
    chosen = reports[:-1][::every]
    assert run_each(tmp_path, chosen, "/dev/full") == [(2, FULL)] * len(chosen)


@pytest.mark.long
@pytest.mark.parametrize("with_torch", [False, True])
def test_a_path_that_is_not_utf8_is_read_or_refused_in_one_sentence(reports, tmp_path, with_torch):
    record, stats = (str(tmp_path / f"r\udcff{name}") for name in ("", ".jsonl"))
    shutil.copytree(reports[0][-1], record)
    shutil.copy(reports[10][-1], stats)
    names = {reports[0][-1]: record, reports[10][-1]: stats}
    commands = [[names.get(word, word) for word in command] for command in reports]
    commands += [["record", "extract", "a.zip", "--to", "x\udcff"], ["hang", "diagnose", stats]]
    commands += [
        ["record", "import", stats, "--to", "y\udcff"],
        ["trace", stats],
        ["info", "options", "\udcff"],
    ]
    if with_torch:
        commands += [["consistency", record], ["replay", record]]
    ended = run_each(tmp_path, commands, "{}.out")
    assert [text for _, text in ended if "Traceback" in text or len(text.splitlines()) > 1] == []
    assert [code for code, _ in ended[:11]] == [0] * 10 + [1]


def test_a_reader_that_ends_ends_the_verb_silently(reports):
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([*COMMAND, *reports[0]], stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_interrupt_ends_with_130_and_no_traceback(tmp_path):
    # a shell starts what runs in the background with SIGINT ignored
    process = subprocess.Popen(
        [*COMMAND, "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # no threads of numpy's
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while psutil.Process(process.pid).num_threads() == 1:  # it imports; the ranks' watcher is a thread
            time.sleep(0.05)
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, messages = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert re.search(b"Traceback|Abort", messages) is None
