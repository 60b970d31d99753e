"""CPU time that `areal_debug.trl.record` adds to a step of TRL's GRPOTrainer, in one run.

    python benchmarks/trl_recording.py [--hidden 512] [--layers 8] [--rows 16] [--tokens 64]
                                       [--steps 5] [--no-checksums]

A random Llama on this machine's CPU. The clock of the training thread runs for the adapter while
one of its methods runs, and for TRL while that calls TRL's own; the writer's thread is read from
/proc. So both numbers are of the same steps, whatever else the machine does.
"""

import argparse
import importlib.util
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from areal_core.testing import make_tiny_model
from areal_debug.trl import record
from replayer.trl.observing import Observer

RUNS = Path(__file__).parents[1] / "tests" / "trainers" / "trl_runs.py"
METHODS = [name for name in vars(Observer) if name.startswith("on_")]
METHODS += [
    "compute_loss",
    "get_grad_norm",
    "generate",
    "calculate_rewards",
    "generate_and_score",
    "keep_logps",
]


class Clock:
    """CPU time of the training thread by whose code runs: the adapter's or TRL's."""

    def __init__(self) -> None:
        self.seconds = {"adapter": 0.0, "trl": 0.0}
        self.whose, self.since = "trl", time.thread_time()

    def of(self, whose: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, which runs on that clock."""

        def timed(*args: Any, **options: Any) -> Any:
            before = self.switch(whose)
            try:
                return function(*args, **options)
            finally:
                self.switch(before)

        return timed

    def switch(self, whose: str) -> str:
        """Let another clock run; returns which one ran."""
        now = time.thread_time()
        self.seconds[self.whose] += now - self.since
        before, self.whose, self.since = self.whose, whose, now
        return before


def writer_seconds() -> float:
    """CPU time of the thread that writes."""
    for thread in threading.enumerate():
        if thread.name == "recorder":
            with suppress(FileNotFoundError):
                return int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]) / 1e9
    return 0.0


def load_runs() -> Any:
    """Return the module of the tests that builds trainers."""
    spec = importlib.util.spec_from_file_location("trl_runs", RUNS)
    assert spec
    assert spec.loader
    runs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runs)
    return runs


def measure(options: argparse.Namespace, folder: Path) -> list[tuple[float, float, float]]:
    """Return the seconds of each step after the first: TRL's, the adapter's, and the writer's."""
    runs, clock = load_runs(), Clock()
    marks: list[tuple[float, float, float]] = []

    class Steps(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.switch(clock.whose)
            marks.append((clock.seconds["trl"], clock.seconds["adapter"], writer_seconds()))

    observing = Observer.observing

    @contextmanager
    def timed(self: Observer) -> Iterator[None]:
        with observing(self):
            self.original = {name: clock.of("trl", method) for name, method in self.original.items()}
            yield

    Observer.observing = timed  # type: ignore[method-assign]
    for name in METHODS:
        setattr(Observer, name, clock.of("adapter", getattr(Observer, name)))
    sizes = {"hidden_size": options.hidden, "num_layers": options.layers, "num_heads": 8}
    trainer = runs.grpo(
        make_tiny_model(folder / "model", **sizes),
        folder / "out",
        per_device_train_batch_size=options.rows,
        num_generations=8,
        max_completion_length=options.tokens,
        generation_kwargs={"min_new_tokens": options.tokens},
        max_steps=options.steps + 2,
        callbacks=[Steps()],
    )
    print(f"{sum(parameter.numel() for parameter in trainer.model.parameters()) / 1e6:.1f} M parameters")
    record(trainer, folder / "record", checksums=not options.no_checksums)
    trainer.train()
    return [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in pairwise(marks[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("hidden", 512), ("layers", 8), ("rows", 16), ("tokens", 64), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--no-checksums", action="store_true")
    with tempfile.TemporaryDirectory() as folder:
        steps = measure(parser.parse_args(), Path(folder))
    trl, adapter, writer = (statistics.median(column) for column in zip(*steps, strict=True))
    print(
        f"a step of TRL {1000 * trl:.1f} ms of CPU; added: training thread {1000 * adapter:.2f} ms ({adapter / trl:.2%}),"
    )
    print(
        f"writer's thread {1000 * writer:.2f} ms ({writer / trl:.2%}); together {(adapter + writer) / trl:.2%}"
    )


if __name__ == "__main__":
    main()
