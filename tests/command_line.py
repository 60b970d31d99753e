"""The command line in this process, all of its commands, git, and scripts that install what tests need."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from areal_debug.cli import main


def invoke(*arguments: object) -> Result:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if not isinstance(done.exception, SystemExit | None):
        raise done.exception
    return done


def run(*arguments: object) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error of `areal-debug` with arguments."""
    done = invoke(*arguments)
    return done.exit_code, done.stdout, done.stderr


def printed(*arguments: object, code: int = 0) -> str:
    """Return what `areal-debug` prints, on both streams, where it ends with this code."""
    done = invoke(*arguments)
    assert done.exit_code == code, done.output
    return done.output


def reported(*arguments: object) -> tuple[int, Any]:
    """Return the exit code of `areal-debug` and its `--json`."""
    done = invoke(*arguments, "--json")
    return done.exit_code, json.loads(done.stdout)


def walk(group: click.Group = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Yield every command below a group by its words, groups included."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield " ".join((*path, name)), command
        if isinstance(command, click.Group):
            yield from walk(command, (*path, name))


def installed(script: object, *arguments: str) -> str:
    """Return what a script prints that installs or starts something; skip the test where it cannot."""
    done = subprocess.run([str(script), *arguments], capture_output=True, text=True, timeout=1200)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def git(folder: object, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
