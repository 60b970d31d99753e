"""A Python process that sleeps."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sleeping(code: str, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process once it has printed a line; kill it afterwards."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()
