"""Run scripts, one after the other, each in a fork of this process, which has imported torch.

A line of standard input is a job in JSON; a line of standard output its exit code. Importing torch
and Transformers is more than half of a short run.
"""

import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.fsdp  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        print(wait_for(in_a_fork(job["output"], run, job)), flush=True)


def run(job: dict[str, Any]) -> None:
    """Run the job's script as the main program of this process."""
    os.chdir(job["folder"])
    os.environ.update(job["environment"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path[:0] = [job["folder"], job["environment"]["PYTHONPATH"]]
    sys.argv = job["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")


def in_a_fork(output: str | Path | None, work: Callable[..., None], *arguments: Any) -> int:
    """Call a function in a fork of this process, its output in a file if given; return its pid."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        if output is not None:
            log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
        work(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait_for(pid: int) -> int:
    """Wait for a fork and return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main()
