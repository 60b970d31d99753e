"""Run scripts, one after the other, each in a fork of this process, which has imported torch.

A line of standard input is a job in JSON; a line of standard output its exit code. Importing torch
and Transformers is more than half of a short run.
"""

import json
import os
import runpy
import sys
import traceback
from typing import Any

import torch.distributed.fsdp  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            run(job)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(job: dict[str, Any]) -> None:
    """Run the job's script as the main program of this process, and end the process."""
    status = 1
    try:
        os.chdir(job["folder"])
        os.environ.update(job["environment"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.path[:0] = [job["folder"], job["environment"]["PYTHONPATH"]]
        sys.argv = job["arguments"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
