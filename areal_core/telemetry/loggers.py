"""Loggers of a step's statistics: JSON lines, TensorBoard, Weights & Biases, Trackio, callables.

They run on rank 0 only. A callable is called as `(step, stats)`.
"""

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from areal_core.errors import ConfigError
from areal_core.safety.durable import append_lines, remove_partial_line
from areal_core.safety.secrets import masker

Stats = dict[str, float]


class Logger(Protocol):
    """A destination for the statistics of each step."""

    def __call__(self, step: int, stats: Stats) -> None: ...

    def close(self) -> None:
        """Finish; called once, after the last step."""


class JsonlLogger:
    """One JSON object per line, with the step first.

    Floats are read back bit-exactly; nan and inf are the strings 'nan', 'inf' and '-inf', since
    JSON has no numbers for them.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        remove_partial_line(self.path)

    def __call__(self, step: int, stats: Stats) -> None:
        numbers = {name: value if math.isfinite(value) else str(value) for name, value in stats.items()}
        append_lines(self.path, json.dumps({"step": step, **numbers}, allow_nan=False) + "\n")

    def close(self) -> None:
        """Nothing is buffered."""


class TensorBoardLogger:
    """One TensorBoard scalar per name.

    Args:
        folder: destination of the event files.
        first_step: first step of a resumed run; readers discard earlier entries from this step on.
    """

    def __init__(self, folder: str | Path, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def __call__(self, step: int, stats: Stats) -> None:
        for name, value in stats.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a run that is killed keeps its last step

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """One Weights & Biases run; a resumed run with the same id continues it.

    Args:
        options: arguments of `wandb.init`; None selects the package's default.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, **options: Any) -> None:
        wandb = import_service("wandb", options["mode"])
        with masked_arguments():
            self._run = wandb.init(resume="allow", **without_none(options))

    def __call__(self, step: int, stats: Stats) -> None:
        self._run.log(stats, step=step)

    def close(self) -> None:
        self._run.finish()


@contextmanager
def masked_arguments() -> Iterator[None]:
    """Mask the arguments of this process, which Weights & Biases sends with a run."""
    arguments = sys.argv
    sys.argv = masker().command(arguments)
    try:
        yield
    finally:
        sys.argv = arguments


class TrackioLogger:
    """One Trackio run: in a Hugging Face space, or in local files.

    Args:
        mode: "online" requires a `space_id`; "local" ignores it.
        space_id: the Hugging Face space, as "user/name".
        options: arguments of `trackio.init`; None selects the package's default.

    Raises:
        ConfigError: the package is not installed, or the mode is "online" without a space.
    """

    def __init__(self, mode: str, space_id: str | None, **options: Any) -> None:
        if mode == "online" and not space_id:
            raise ConfigError(
                "stats_logger.trackio.mode is 'online' and stats_logger.trackio.space_id is empty: "
                "give the space, as 'user/name', or set the mode to 'local'"
            )
        trackio = import_service("trackio", mode)
        space = space_id if mode == "online" else None
        self._run = trackio.init(resume="allow", **without_none(options | {"space_id": space}))

    def __call__(self, step: int, stats: Stats) -> None:
        self._run.log(stats, step=step)

    def close(self) -> None:
        self._run.finish()


def import_service(name: str, mode: str) -> ModuleType:
    """Import the package of a logger. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # the package is installed, but one of its dependencies is not
            raise
        raise ConfigError(
            f"stats_logger.{name}.mode is {mode!r} and the package {name} is not installed: "
            f"pip install {name}, or set the mode to 'disabled'"
        ) from None


def without_none(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


@dataclass(eq=False)
class StatsLogger:
    """Pass the statistics of a step to all loggers, and to the printers; rank 0 alone has some."""

    loggers: Sequence[Logger] = ()
    printers: Sequence[Callable[[int, Stats], None]] = ()

    def commit(self, step: int, stats: Stats) -> None:
        """Log a step, counted from 0."""
        destinations: list[Callable[[int, Stats], None]] = [*self.loggers, *self.printers]
        for log in destinations:
            log(step, stats)

    def close(self) -> None:
        for log in self.loggers:
            log.close()

    def __enter__(self) -> "StatsLogger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_stats(path: str | Path) -> list[Stats]:
    """Read the lines of a `JsonlLogger`, with numbers restored; `step` is one of the names.

    A last line that a killed run did not complete is left out.
    """
    with Path(path).open(encoding="utf-8") as lines:
        complete = (line for line in lines if line.endswith("\n"))
        return [{name: float(value) for name, value in json.loads(line).items()} for line in complete]


LOSS = ("ppo_actor/update/loss", "sft/loss/avg", "sft/loss", "dpo/loss/avg", "rw/loss/avg")
GRAD_NORM = ("ppo_actor/update/grad_norm", "sft/grad_norm", "dpo/grad_norm", "rw/grad_norm")
NUM_MICRO_BATCHES = (
    *("ppo_actor/update/num_micro_batches", "sft/num_micro_batches", "dpo/num_micro_batches"),
    "rw/num_micro_batches",
)
# Column, names under which the trainers record it (the first that exists is shown), format. The
# loss is the number whose gradient the optimizer gets: the mean over minibatches.
COLUMNS = (
    ("reward", ("ppo_actor/task_reward/avg", "rollout/reward"), "{:.3f}"),
    ("loss", LOSS, "{:.4g}"),
    ("accuracy", ("dpo/reward_accuracy/avg", "rw/correct_ratio/avg"), "{:.3f}"),
    (
        "held-out",
        ("eval-sft/loss/avg", "eval-dpo/reward_accuracy/avg", "eval-rw/correct_ratio/avg"),
        "{:.3f}",
    ),
    ("grad_norm", GRAD_NORM, "{:.4g}"),
    ("lr", ("ppo_actor/update/lr", "sft/lr", "dpo/lr", "rw/lr"), "{:.2e}"),
    ("seq_len", ("ppo_actor/seq_len/avg", "sft/seq_len/avg"), "{:.0f}"),
)
NUM_TOKENS = ("ppo_actor/n_tokens", "sft/n_tokens", "dpo/n_tokens", "rw/n_tokens")


def step_summary(
    step: int, stats: Stats, total_steps: int | None = None, seconds: float | None = None
) -> str:
    """Return `step 2 (3 of 10)  reward 0.250  loss -0.01235 ...`.

    Steps have the numbers of their record, from 0. Columns without a value are left out. `seconds`
    is the duration of the step, for the tokens per second.
    """
    parts = [f"step {step}" + (f" ({step + 1} of {total_steps})" if total_steps else "")]
    parts += [f"{column} {number}" for column, number in summary_columns(stats).items()]
    num_tokens = first_of(stats, NUM_TOKENS)
    if num_tokens is not None and seconds:
        parts.append(f"{num_tokens / seconds:.0f} tokens/s")
    return "  ".join(parts)


def summary_columns(stats: Stats) -> dict[str, str]:
    """Return the numbers of a step by their names, as training and replay print them."""
    values = [(column, first_of(stats, names), shape) for column, names, shape in COLUMNS]
    return {column: shape.format(value) for column, value, shape in values if value is not None}


def first_of(stats: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    return next((stats[name] for name in names if name in stats), None)
