"""DDP: rank 1 skips a batch whose loss is not finite; its peers wait in backward for its gradients.

label: collective_mismatch
culprits: 1
ranks: 3
"""

import math

import torch
import torch.distributed as dist
from hang_point import here
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train_step(model: nn.Module, batch: torch.Tensor) -> None:
    loss = model(batch).sum()
    if not math.isfinite(loss.item()):
        return
    loss.backward()


def end_epoch() -> None:
    dist.barrier()


dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 4))
train_step(model, torch.ones(2, 4))
here()
train_step(model, torch.full((2, 4), math.inf if dist.get_rank() == 1 else 1.0))
end_epoch()
