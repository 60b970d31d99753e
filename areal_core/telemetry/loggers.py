"""Where a step's statistics go: a JSON line, TensorBoard, or any callable `(step, stats)`; on rank 0 only."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TextIO

Stats = dict[str, float]


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
    """One scalar a name."""

    def __init__(self, folder: str | Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def __call__(self, step: int, stats: Stats) -> None:
        for name, value in stats.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class StatsLogger:
    """Hands the statistics of every `every_steps`-th step to all loggers; does nothing on ranks other than 0."""

    def __init__(
        self,
        loggers: Sequence[JsonlLogger | TensorBoardLogger] = (),
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
