"""A Python shell at a step, on one rank or on all ranks in lockstep.

    rank 0   terminal ─> line ──┬─> runs it ─> its output ───────────────> terminal
    rank r   waits for a line <─┘   runs it ─> output, if it differs ────> terminal, with its rank

Every line runs on every rank, so that collectives complete: `trainer.actor.checksums()` works, and
so does `model.state_dict()`.
"""

import code
import io
import pdb
import signal
import sys
import tomllib
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, cast

from replayer.goto import Scene

STAGE_DESCRIPTIONS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def open_shell(scene: Scene) -> None:
    """Open a shell on all ranks, until end of file or `exit()`."""
    ranks = scene.trainer.ranks
    names, stack = scene.names(), ExitStack()
    if ranks.world_size > 1:
        console: code.InteractiveConsole = LockstepConsole(names, ranks.rank, ranks.gather_objects)
    else:
        console = code.InteractiveConsole(names)
        enable_completion(names)
        stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C ends a line, not the run
    with stack, suppress(SystemExit):  # exit() leaves the shell, and is no exit code of the command
        console.interact(banner=describe(scene) if ranks.rank == 0 else "", exitmsg="")


def describe(scene: Scene) -> str:
    """Describe the current step and stage, and the available names."""
    rows, width = scene.batch["attention_mask"].shape
    names = ", ".join(scene.names())
    everywhere = "\nEvery line runs on every rank." if scene.trainer.ranks.world_size > 1 else ""
    return (
        f"Step {scene.step}, {STAGE_DESCRIPTIONS[scene.stage]}: {rows} rows, {width} tokens wide.\n{names}\n"
        f"`plan` and `outcome` are what the run recorded of this step. End of file (Ctrl-D) leaves.{everywhere}"
    )


def enable_completion(names: dict[str, Any]) -> None:
    try:
        import readline
        import rlcompleter
    except ImportError:
        return
    readline.set_completer(rlcompleter.Completer(names).complete)
    readline.parse_and_bind("tab: complete")


class LockstepConsole(code.InteractiveConsole):
    """A console whose lines are typed on rank 0 and run on every rank."""

    def __init__(self, names: dict[str, Any], rank: int, gather: Callable[[object], list[Any]]) -> None:
        super().__init__(names)
        self.rank, self.gather = rank, gather

    def raw_input(self, prompt: str = "") -> str:
        """Return rank 0's line; a collective. Raises EOFError on all ranks at its end of file."""
        line: str | None = None
        if self.rank == 0:
            try:
                line = input(prompt)
            except EOFError:
                line = None
        line = self.gather(line)[0]
        if line is None:
            raise EOFError
        return line

    def push(self, line: str, *arguments: Any, **options: Any) -> bool:
        """Run the line on every rank and print its output on rank 0; a collective."""
        output = io.StringIO()
        try:
            with redirect_stdout(output), redirect_stderr(output):
                return super().push(line, *arguments, **options)
        finally:
            texts = self.gather(output.getvalue())
            if self.rank == 0:
                print(texts[0], end="", flush=True)
                for rank, text in enumerate(texts):
                    if text != texts[0]:
                        print(
                            "".join(f"[rank {rank}] {part}" for part in text.splitlines(keepends=True)),
                            end="",
                        )

    def write(self, data: str) -> None:
        """Print banners and exit messages on rank 0 only; `push` captures what a line prints."""
        if self.rank == 0 or data.strip():
            super().write(data)


def open_debugger(scene: Scene, rank: int) -> None:
    """Open the debugger on one rank.

    The other ranks continue to the next collective and wait there, so that one can step into it.
    """
    if scene.trainer.ranks.rank != rank:
        return
    print(f"{describe(scene)}\n`n` steps in the trainer, `c` runs to the step's end.", flush=True)
    StepDebugger(scene.names()).stop_in(trainer_frame(sys._getframe()))


def trainer_frame(frame: FrameType | None) -> FrameType:
    while frame is not None:
        module, name = str(frame.f_globals["__name__"]), frame.f_code.co_name
        if module.startswith("areal_core.") and name != "_observe":
            return frame
        frame = frame.f_back
    raise AssertionError("nothing of areal_core is on the stack")


class StepDebugger(pdb.Pdb):
    """A debugger that adds names to every frame that does not define them itself."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__()
        self.names = names

    def stop_in(self, frame: FrameType) -> None:
        self.reset()
        outer: FrameType | None = frame
        while outer is not None:
            outer.f_trace = self.trace_dispatch
            self.botframe = outer
            outer = outer.f_back
        self.set_next(frame)
        sys.settrace(self.trace_dispatch)  # last: every later call in here would be traced

    def setup(self, f: FrameType | None, tb: TracebackType | None) -> None:
        """Add the names when the debugger stops in a frame."""
        super().setup(f, tb)
        frame_locals = cast("dict[str, Any]", self.curframe_locals)
        for name, value in self.names.items():
            frame_locals.setdefault(name, value)
