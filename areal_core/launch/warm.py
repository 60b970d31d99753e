"""Run a program on ranks again and again without a new interpreter, by forks of a warm process.

this process                                 warm_server.py, starts at once and imports the libraries
  whatever can be checked meanwhile
  run(argv) ── request, standard streams ──> fork ─> ranks ─> output -> pipe ─> log, our output
            <── exit code ─────────────────┘
any exit (end, error, signal): the server and every descendant are ended

The environment that libraries read once is that of the server: it is set before Python starts, as
for a new interpreter. All forks share one layout of addresses, which hides what depends on it.
"""

import json
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.launch.processes import Child, end_tree, marked_environment, start, thread_limits
from areal_core.launch.torchrun import copy_output, ended_on_signals, shell_code, terminal_environment
from areal_core.safety.interpreter import python_command

SERVER = Path(__file__).with_name("warm_server.py")
OURS = Path(__file__).parents[2]
STDERR = 2
LIBRARIES = (  # what a replay imports of others
    "accelerate",
    "aiohttp",
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


@dataclass
class WarmRanks:
    """A process, `server`, that has imported modules, and forks to run programs.

    `env` has the variables that libraries read once.
    """

    channel: socket.socket
    env: Mapping[str, str]
    server: Child
    is_ready: bool = False

    def run(
        self,
        argv: Sequence[str],
        num_ranks: int,
        env: Mapping[str, str],
        log: Path,
        echo: bool = True,
        place: Path | None = None,
    ) -> int:
        """Run `-m MODULE ARGUMENT...` or `FILE ARGUMENT...` on ranks that read no input.

        Args:
            env: changes of the current environment; those of the server cannot change any more.
            log: file for the output, which also goes to standard output if `echo`.
            place: folder to run in and to import from; by default the current one, from which
                nothing is imported.

        Returns:
            The exit code of the first rank that failed, 0 when none did.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        with ended_on_signals(), open(reading, "rb") as source, log.open("wb", buffering=0) as file:
            with open(writing, "wb") as written, open(os.devnull, "rb") as nothing:
                streams = [nothing.fileno(), written.fileno(), written.fileno()]
                self._ask(argv, num_ranks, env, place, streams)
            copy_output(source, file, echo)
            return self._answer()

    def run_attached(self, argv: Sequence[str], num_ranks: int, env: Mapping[str, str]) -> int:
        """Run on ranks that have this process's terminal; return as `run` does.

        Ctrl-C is theirs meanwhile.
        """
        self._await_ready()  # until then Ctrl-C is of this process
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._ask(argv, num_ranks, env, None, [0, 1, 2])
            return self._answer()
        finally:
            signal.signal(signal.SIGINT, before)

    def _await_ready(self) -> None:
        if not self.is_ready:  # it has imported the modules
            self._receive()
            self.is_ready = True

    def _ask(
        self,
        argv: Sequence[str],
        num_ranks: int,
        env: Mapping[str, str],
        place: Path | None,
        streams: Sequence[int],
    ) -> None:
        self._await_ready()
        environment = marked_environment({**self.env, **env}, self.server.mark)
        request = {"argv": list(argv), "num_ranks": num_ranks, "environment": environment}
        request |= {"place": str(place or Path.cwd()), "path": [str(place)] if place else []}
        data = json.dumps(request).encode() + b"\n"
        with suppress(ConnectionError):  # the server has ended: `_answer` has its exit code
            sent = socket.send_fds(self.channel, [data], streams)
            self.channel.sendall(data[sent:])

    def _answer(self) -> int:
        if (answer := self._receive()) is not None:
            return shell_code(answer["code"])
        return shell_code(self.server.wait()) or 1

    def _receive(self) -> dict[str, Any] | None:
        """Return the next message; None if the process has ended."""
        message = b""
        with suppress(ConnectionError):
            while received := self.channel.recv(1024):
                message += received
                if message.endswith(b"\n"):
                    found: dict[str, Any] = json.loads(message)
                    return found
        return None


@contextmanager
def warm_ranks(
    env: Mapping[str, str],
    modules: Sequence[str],
    attached: bool = False,
    path: Sequence[Path] | None = None,
) -> Iterator[WarmRanks]:
    """Start a process that imports modules while this one continues; end it afterwards.

    Args:
        env: variables that libraries read once, such as `DETERMINISTIC`.
        attached: stay in the session of this process, whose terminal ranks may read.
        path: folders to import the modules from, before the installed packages; by default that of
            our packages.
    """
    folders = [str(folder) for folder in ((OURS,) if path is None else path)]
    # a test whether there is a GPU must not initialise it before the fork
    fixed = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    environment = {**thread_limits(1), **terminal_environment(), **fixed, **env}
    os.umask(umask := os.umask(0o077))
    hello = {"modules": list(modules), "path": folders, "umask": umask}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        passed = [theirs.fileno()]
        server = start(
            python_command(str(SERVER), str(theirs.fileno()), file_is_ours=True),
            environment,
            STDERR,
            pass_fds=passed,
            new_session=not attached,
        )
        theirs.close()
        with suppress(ConnectionError):  # it has ended: a run says so
            ours.sendall(json.dumps(hello).encode() + b"\n")
        try:
            yield WarmRanks(ours, environment, server)
        finally:
            end_tree(server)
