"""Memory of the training part of chosen steps (`memory_profiler`), in `memory_snapshots/step_N`.

On a GPU: the allocator's history, `rank-00000.pickle`, for https://docs.pytorch.org/memory_viz;
also where the run ends with an error, so that an out-of-memory error is in it. On a CPU: a trace of
torch's allocations, `rank-00000.json`, for https://ui.perfetto.dev.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from areal_core.safety.durable import disk_errors_as_warnings


@dataclass(frozen=True)
class MemoryProfiler:
    """Keeps the history of memory during the training part of some steps.

    Attributes:
        folder: of the snapshots.
        rank: of this process.
        device: of the trainer.
        steps: to record.
        max_entries: the newest allocations that a GPU's history keeps.
    """

    folder: Path
    rank: int
    device: torch.device
    steps: frozenset[int]
    max_entries: int

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Record what the body allocates, if the step is one of `steps`."""
        if step not in self.steps:
            yield
            return
        file = self.folder / f"step_{step}" / f"rank-{self.rank:05d}"
        with self._on_gpu(file) if self.device.type == "cuda" else self._on_cpu(file):
            yield

    @contextmanager
    def _on_gpu(self, file: Path) -> Iterator[None]:
        torch.cuda.memory._record_memory_history(max_entries=self.max_entries)
        try:
            yield
        finally:
            with written(file):
                torch.cuda.memory._dump_snapshot(f"{file}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)

    @contextmanager
    def _on_cpu(self, file: Path) -> Iterator[None]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        profiler.start()
        try:
            yield
        finally:
            profiler.stop()
            with written(file):
                profiler.export_chrome_trace(f"{file}.json")


@contextmanager
def written(file: Path) -> Iterator[None]:
    """Make the folder of a file that the body writes; a full disk is a warning."""
    with disk_errors_as_warnings(f"{file} is not written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        yield
