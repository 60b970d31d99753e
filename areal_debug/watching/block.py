"""The block that a rank trains in while it is watched.

    rank   beats at each optimizer step and each `step()`; checks values; prints what is not finite
      └─ registers in a folder of its node; the first rank there starts
    watcher.py, a process of its own: reads the beats, collects stacks, prints a hang's diagnosis

It needs no port and no thread in the rank. Where it cannot work it prints one sentence, and
training continues.
"""

import ctypes
import os
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ContextDecorator, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from areal_core.safety.durable import sentence_of
from areal_core.safety.interpreter import python_command
from areal_core.safety.private import ForeignOwner, default_root, make_private
from areal_debug.installation import ROOT
from areal_debug.watching.finite import FiniteCheck, number_of
from hangdoctor import heartbeat
from hangdoctor.collect.discover import RANK_AND_WORLD, identify, job_key
from hangdoctor.collect.evidence import KEPT_VARIABLE
from hangdoctor.collect.process import read_process
from hangdoctor.collect.registered import register, take_lock, unregister

if TYPE_CHECKING:
    from torch import nn

    from areal_core.telemetry.loggers import JsonlLogger

# Forks first: the watcher is nobody's child, so that nobody waits for it or dumps it with a rank.
START = "import os, sys; os.fork() and os._exit(0); sys.path.insert(0, sys.argv[1]); "
START += "from areal_debug.watching.watcher import main; main(sys.argv[2:])"
PR_SET_PTRACER, ANY = 0x59616D61, -1


class watch(ContextDecorator):
    """Watch this rank, and with the first rank of a node all ranks of the node, for one block.

    Where it cannot watch, it prints one sentence, and training continues.

    Args:
        folder: of `stats.jsonl` and of a folder per hang; by default no statistics are written, and
            a hang's folder is made in `areal-watch`.
        timeout_s: seconds of silence that are suspicious; by default five times the longest pause
            between steps, from 120 to 300 s, and 300 s before the first step.
        modules: whose outputs are checked, too, in the order in which they are computed; needs
            torch imported before the block.
        nonfinite: False checks no value.
        then: "end" raises NonFiniteError for a loss, output, gradient or weight that is not finite,
            and ends the ranks of this node when a hang was diagnosed and the silence lasts half of
            its limit longer.
        rank: of this process; by default of torch.distributed or of the environment.
        world_size: the same; not read without `rank`.

    Raises:
        ValueError: `then` is another word, or `timeout_s` is not above 0.
        NonFiniteError: `then` is "end", and a value is not finite: from `step`, an optimizer's
            step, or the end of the block.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float | None = None,
        modules: "nn.Module | None" = None,
        nonfinite: bool = True,
        then: Literal["notify", "end"] = "notify",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if then not in ("notify", "end"):
            raise ValueError(f"then is {then!r}: expected 'notify' or 'end'")
        if timeout_s is not None and timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s!r}: expected a number of seconds above 0")
        self.folder = None if folder is None else Path(folder).absolute()
        self.timeout_s, self.then, self.modules = timeout_s, then, modules
        self.environment = declared_environment(rank, world_size)
        self.rank = int(self.environment["RANK"])
        role = identify(dict(self.environment), command_line()).role
        self.name = f"{'' if role == 'trainer' else role + '_'}rank_{self.rank}"
        self.check = FiniteCheck(self.report, then == "end") if nonfinite else None
        self.num_steps = 0
        self.is_numbered = False  # by the user, with `step`
        self.logger: JsonlLogger | None = None
        self.state: Path | None = None
        self.closing: list[Callable[[], object]] = []

    def __enter__(self) -> Self:
        if not os.environ.get(heartbeat.VARIABLE):  # else another watch reads the beats
            try:
                self._register()
            except (OSError, ForeignOwner) as error:
                self.report(
                    f"hangs are not watched: {sentence_of(error) if isinstance(error, OSError) else error}"
                )
        if "torch" in sys.modules:
            self._hook()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for close in reversed(self.closing):
            close()
        if self.state is not None and os.getpid() == self.pid:  # not in a forked child
            heartbeat.withdraw(self.name)
            unregister(self.state, self.name, self.stacks)
            del os.environ[heartbeat.VARIABLE]
            self.state = None
        if self.check is not None:
            self.check.finish(may_raise=kind is None)

    def step(
        self,
        step: int,
        *,
        loss: Any = None,
        stats: Mapping[str, Any] | None = None,
        model: "nn.Module | None" = None,
    ) -> None:
        """Report that a step is finished.

        Args:
            step: its number, from 0.
            loss: a number or a tensor with one, checked, and one of the statistics.
            stats: numbers by name, checked; with a folder, rank 0 writes them to `stats.jsonl`, for
                `areal-debug doctor`.
            model: its weights are checked, and its gradients where they were not yet.

        Raises:
            NonFiniteError: `then` is "end", and a value is not finite that is no statistic; of a
                GPU's values perhaps a step later.
        """
        self.is_numbered = True
        self.num_steps = step + 1
        self._beat()
        numbers = {**({} if loss is None else {"loss": loss}), **(stats or {})}
        if self.folder is not None and self.rank == 0 and numbers:
            self._write_stats(step, numbers)
        if self.check is not None:
            self.check.step(step, numbers, model)

    def report(self, text: str) -> None:
        """Print one line on standard error, if it is open."""
        with suppress(OSError, ValueError):
            sys.stderr.write(f"areal-debug watch: rank {self.rank}: {text}\n")  # at once: ranks share it

    def _register(self) -> None:
        """Register this rank, and start the watcher of this node if there is none."""
        folder = self.folder or Path("areal-watch").absolute()
        arguments = [str(folder), self.then, *([str(self.timeout_s)] if self.timeout_s else [])]
        state = state_folder(self.environment, arguments)
        for private in (state.parent.parent, state.parent):
            make_private(private)
        self.stacks = register(state, self.name, self.environment)
        self.state, self.pid = state, os.getpid()
        os.environ[heartbeat.VARIABLE] = str(state)
        # Yama lets only a parent read a process, unless that process allows it.
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(ANY), 0, 0, 0)
        lock = take_lock(state)
        if lock is None:
            return
        # As a process that claims no rank.
        environment = {k: v for k, v in os.environ.items() if not KEPT_VARIABLE.match(k)}
        del environment[heartbeat.VARIABLE]
        for name in (name for names in RANK_AND_WORLD for name in names):
            environment.pop(name, None)
        try:
            subprocess.run(
                python_command("-c", START, str(ROOT), str(state), *arguments),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # launchers signal the group of a rank
                pass_fds=[lock],
                check=True,
            )
        except subprocess.CalledProcessError as error:
            self.report(f"hangs are not watched: the watcher did not start, status {error.returncode}")
        finally:
            os.close(lock)

    def _hook(self) -> None:
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self.closing.append(register_optimizer_step_post_hook(self._optimizer_stepped).remove)
        if self.check is not None:
            self.closing.append(register_optimizer_step_pre_hook(self._gradients_ready).remove)
            if self.modules is not None:
                self.closing += self.check.watch_modules(self.modules, lambda: self.num_steps)

    def _optimizer_stepped(self, *_: Any) -> None:
        if not self.is_numbered:
            self.num_steps += 1
        self._beat()

    def _gradients_ready(self, optimizer: Any, *_: Any) -> None:
        assert self.check is not None
        self.check.gradients(self.num_steps, optimizer)

    def _beat(self) -> None:
        try:
            heartbeat.beat(self.num_steps, self.name)
        except OSError:  # without beats the watcher reads CPU time
            return

    def _write_stats(self, step: int, stats: Mapping[str, Any]) -> None:
        from areal_core.telemetry.loggers import JsonlLogger

        assert self.folder is not None
        numbers = {name: number_of(value) for name, value in stats.items()}
        try:
            self.logger = self.logger or JsonlLogger(self.folder / "stats.jsonl")
            self.logger(step, {name: number for name, number in numbers.items() if number is not None})
        except OSError as error:
            self.report(f"step {step} has no statistics: {sentence_of(error)}")


def declared_environment(rank: int | None, world_size: int | None) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and the job of this process, as arguments, torch.distributed or the
    environment give them; a process without a rank is a job of its own.
    """
    found = identify(dict(os.environ), command_line())
    if rank is None:
        rank, world_size = _distributed_rank() or (found.rank, found.world_size)
    names = ("MASTER_ADDR", "MASTER_PORT", "ROLE_NAME", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    declared = {name: os.environ[name] for name in names if name in os.environ}
    if rank is None or not job_key(dict(os.environ)):
        declared["TORCHELASTIC_RUN_ID"] = f"pid-{os.getpid() if rank is None else os.getppid()}"
    declared["RANK"] = str(rank or 0)
    world_size = 1 if rank is None else world_size
    return declared | ({} if world_size is None else {"WORLD_SIZE": str(world_size)})


def _distributed_rank() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def command_line() -> tuple[str, ...]:
    process = read_process(os.getpid())
    assert process is not None
    return process.command


def state_folder(environment: Mapping[str, str], arguments: Sequence[str]) -> Path:
    """Return the folder, local to this node, that the ranks of one attempt of a job agree on.

    Another block, with other arguments, has another watcher.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    job = environment.get("TORCHELASTIC_RUN_ID") or job_key(dict(os.environ)).replace("/", "_")
    digest = zlib.crc32("\0".join(arguments).encode())
    return Path(default_root(), "watch", f"{socket.gethostname()}-{job}-{attempt}-{digest:08x}")
