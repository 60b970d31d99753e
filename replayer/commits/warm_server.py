"""Replay records with the code of several commits, in processes that share what libraries loaded.

    python warm_server.py     imports torch and Transformers once, and nothing of ours
      <- {"place": ..., "report": ..., "task": ..., "request": {...}, "num_ranks": ...}
      fork ─> rank 0, 1, ...  each imports the code in `place`, and runs the task; rank 0 writes the report
      -> {"code": 0}          or the exit code of the first rank that failed

It is started by its path, and uses only what a commit's own packages offer: `replayer.run` and
`replayer.request`. A commit that lacks them ends with TOO_OLD.
"""

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

TOO_OLD = 3
# what every replay imports: four of the six seconds of CPU time of a short one
LIBRARIES = (
    "accelerate",
    "aiohttp",
    "deepdiff",
    "omegaconf",
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.tokenization_utils_tokenizers",
)
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def main() -> None:
    """Answer the requests on standard input until it is closed."""
    end_with_parent()
    for name in LIBRARIES:
        with suppress(ImportError):  # of another version
            import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps({"code": run_ranks(json.loads(line))}), flush=True)


def end_with_parent() -> None:
    """Let this process get SIGTERM when the one that started it ends, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run_ranks(task: dict[str, Any]) -> int:
    """Run a task on its ranks; return 0, or the exit code of the first rank that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {fork_rank(task, rank, port) for rank in range(task["num_ranks"])}
    code = 0
    while ranks:
        process, status = os.wait()
        ranks.discard(process)
        if status and not code:
            code = abs(os.waitstatus_to_exitcode(status))
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return code


def fork_rank(task: dict[str, Any], rank: int, port: int) -> int:
    """Start a rank of a task and return its process id."""
    sys.stdout.flush()
    if process := os.fork():
        return process
    code = 1
    try:
        end_with_parent()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # a pipe to the parent has the answers
        num_ranks = task["num_ranks"]
        if num_ranks > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ["PYTHONPATH"] = task["place"]  # of processes that this one starts
        os.chdir(task["place"])
        sys.path.insert(0, task["place"])
        code = run_task(task, rank)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run_task(task: dict[str, Any], rank: int) -> int:
    """Run a task with the code of the current folder."""
    try:
        from replayer.request import Request
        from replayer.run import replay, replay_and_compare
    except ImportError as error:
        print(f"replay without a new interpreter: {error}", file=sys.stderr)
        return TOO_OLD
    given = task["request"]
    request = Request(**given | {"settings": tuple(given.get("settings", ()))})
    if task["task"] == "replay":
        report = replay_and_compare(request).to_dict()
    else:
        layers = load_beside("layers")
        found: list[Any] = []
        replay(request, [layers.trace_layers(request.last, found.append, task["place"])])
        report = {"calls": [[vars(call) for call in calls] for calls in found[0]] if found else []}
    if rank == 0:
        Path(task["report"]).write_text(json.dumps(report))
    return 0


def load_beside(name: str) -> Any:
    """Import a file beside this one, which is of another commit than the packages."""
    spec = spec_from_file_location(f"warm_server_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
