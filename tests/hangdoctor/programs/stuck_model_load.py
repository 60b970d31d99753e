"""Rank 1 reads its model from storage that does not respond (a FIFO) before the rendezvous.

label: init_deadlock
culprits: 1
ranks: 2
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from hang_point import here


def load_model(path: Path) -> dict[str, torch.Tensor]:
    with path.open("rb") as file:
        return torch.load(file, weights_only=True)


weights = Path(tempfile.mkdtemp(), "model.pt")
os.mkfifo(weights)
here()
if os.environ["RANK"] == "1":
    load_model(weights)
dist.init_process_group("gloo")
