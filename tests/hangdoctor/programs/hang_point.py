"""Markers: a fault program reports, rank by rank, that its next operation is the fault."""

import os
from pathlib import Path


def here() -> None:
    """Touch this rank's marker; without a marker folder (a manual run) do nothing."""
    if folder := os.environ.get("HANG_POINT_DIR"):
        Path(folder, f"rank_{os.environ['RANK']}").touch()


def meet() -> None:
    """Join the group of all ranks, wait until each has joined, and touch the marker."""
    import torch.distributed as dist  # some programs hang before they have it

    dist.init_process_group("gloo")
    dist.barrier()
    here()
