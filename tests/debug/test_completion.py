"""Completion in real shells: verbs, options, and the folders of records."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from recorder.testing import write_scripted_record

PROMPT = b"ready> "
CODES = re.compile(rb"\x1b(?:\[[\d;?]*[A-Za-z]|[()=>]\w?)")
SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "PS1='ready''> '; bind 'set bell-style none'"),
    "zsh": (["zsh", "-f", "-i"], "PS1='ready''> '; autoload -Uz compinit; compinit -u"),
}
SOURCES = {
    "bash": 'eval "$(_AREAL_DEBUG_COMPLETE=bash_source areal-debug)"',
    "zsh": 'eval "$(_AREAL_DEBUG_COMPLETE=zsh_source areal-debug)"',
}


def environment(folder: Path) -> dict[str, str]:
    """Variables with which the command of this installation is found, and no file of the user's."""
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": programs, "TERM": "xterm", "HOME": str(folder)}


class Shell:
    """An interactive shell on a terminal."""

    def __init__(self, name: str, folder: Path) -> None:
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (40, 200))
        self.process = subprocess.Popen(
            SHELLS[name][0], stdin=theirs, stdout=theirs, stderr=theirs,
            env=environment(folder), cwd=folder, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)

    def start(self, name: str) -> None:
        """Set the prompt, and load the completion."""
        self.type(f"{SHELLS[name][1]}\n", PROMPT)
        self.type(f"{SOURCES[name]}; echo loa''ded\n", b"loaded")

    def type(self, keys: str, until: bytes, timeout_s: float = 60.0) -> None:
        """Type keys, and wait until the terminal has shown a text."""
        os.write(self.ours, keys.encode())
        shown, ends_at = b"", time.monotonic() + timeout_s
        while until not in CODES.sub(b"", shown):
            assert time.monotonic() < ends_at, shown.decode(errors="replace")
            if select.select([self.ours], [], [], 0.2)[0]:
                shown += os.read(self.ours, 65536)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)


CASES = {
    "areal-debug repl": "replay",
    "areal-debug record ver": "verify",
    "areal-debug replay --from": "--from-step",
    "areal-debug record verify my_": "my_record",
    "areal-debug train script_of": "script_of_mine.py",
    "areal-debug hang watch --then ki": "kill",
}


@pytest.fixture
def folder(tmp_path):
    write_scripted_record(tmp_path / "my_record", num_steps=1)
    (tmp_path / "script_of_mine.py").touch()
    return tmp_path


@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_completes_verbs_options_and_records(name, folder):
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name} here")
    shell = Shell(name, folder)
    try:
        shell.start(name)
        for typed, completed in CASES.items():
            before = typed.rpartition(" ")[0]
            shell.type(f"{typed}\t", f"{before} {completed}".encode())
            shell.type("\x15", b"")  # empty the line
    finally:
        shell.end()


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish here")
def test_fish_completes_verbs_options_and_records(folder):
    asked = "; ".join(f"complete -C '{typed}'" for typed in CASES)
    script = f"_AREAL_DEBUG_COMPLETE=fish_source areal-debug | source; {asked}"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script], env=environment(folder), cwd=folder, capture_output=True, text=True
    )  # fmt: skip
    assert [line.split()[0].rstrip("/") for line in done.stdout.splitlines()] == list(CASES.values())
