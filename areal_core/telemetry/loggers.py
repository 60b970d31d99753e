"""Where a step's statistics go: a JSON line, TensorBoard, Weights & Biases, Trackio, or any callable `(step, stats)`; on rank 0 only."""

import importlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Protocol, TextIO

from areal_core.errors import ConfigError

Stats = dict[str, float]


class Logger(Protocol):
    """What takes the statistics of a step, which counts from 0, and is told when there are no more."""

    def __call__(self, step: int, stats: Stats) -> None: ...

    def close(self) -> None: ...


class JsonlLogger:
    """One JSON object a line, the step first. Floats read back to the same bits; nan and inf are the strings 'nan',
    'inf' and '-inf', which JSON has no numbers for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    def __call__(self, step: int, stats: Stats) -> None:
        numbers = {name: value if math.isfinite(value) else str(value) for name, value in stats.items()}
        self._file.write(json.dumps({"step": step, **numbers}, allow_nan=False) + "\n")
        self._file.flush()  # a run that dies keeps its last line

    def close(self) -> None:
        self._file.close()


class TensorBoardLogger:
    """One scalar a name.

    Args:
        first_step: of a run that continues: readers forget what was written of it and of later ones before.
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
    """One Weights & Biases run, which a run that continues under the same id goes on with.

    Args:
        options: arguments of `wandb.init`; those that are None are left to the package.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, **options: Any) -> None:
        wandb = import_service("wandb", options["mode"])
        self._run = wandb.init(resume="allow", **without_none(options))

    def __call__(self, step: int, stats: Stats) -> None:
        self._run.log(stats, step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioLogger:
    """One Trackio run: in a Hugging Face space, or in files of this machine.

    Args:
        mode: "online" wants a `space_id`; "local" never uses one.
        options: arguments of `trackio.init`; those that are None are left to the package.

    Raises:
        ConfigError: the package is not installed, or there is no space to send to.
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
    """The package of a logger that is asked for. Raises ConfigError when it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # the package is there, and something that it needs is not
            raise
        raise ConfigError(
            f"stats_logger.{name}.mode is {mode!r} and the package {name} is not installed: "
            f"pip install {name}, or set the mode to 'disabled'"
        ) from None


def without_none(options: dict[str, Any]) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


class StatsLogger:
    """Hands the statistics of every `every_steps`-th step to all loggers; does nothing on ranks other than 0."""

    def __init__(
        self,
        loggers: Sequence[Logger] = (),
        printers: Sequence[Callable[[int, Stats], None]] = (),
        rank: int = 0,
        every_steps: int = 1,
    ) -> None:
        self.loggers, self.printers, self.rank, self.every_steps = loggers, printers, rank, every_steps

    def commit(self, step: int, stats: Stats) -> None:
        """`step` counts from 0."""
        if self.rank != 0 or (step + 1) % self.every_steps:
            return
        for log in (*self.loggers, *self.printers):
            log(step, stats)

    def close(self) -> None:
        for log in self.loggers:
            log.close()

    def __enter__(self) -> "StatsLogger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_stats(path: str | Path) -> list[Stats]:
    """The lines that a `JsonlLogger` wrote, numbers restored; `step` is one of the names."""
    with Path(path).open(encoding="utf-8") as lines:
        return [{name: float(value) for name, value in json.loads(line).items()} for line in lines]
