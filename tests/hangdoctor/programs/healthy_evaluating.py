"""Rank 0 evaluates slowly on the CPU while the other waits at the barrier after it: it moves.

label: healthy
ranks: 2
"""

import torch
import torch.distributed as dist
from hang_point import here


def score(batch: torch.Tensor) -> float:
    return torch.log_softmax(batch @ batch.T, dim=-1).diagonal().mean().item()


def decode(batch: torch.Tensor) -> str:
    return " ".join(str(row.argmax().item()) for row in batch)


def evaluate(num_batches: int) -> None:
    for index in range(num_batches):
        batch = torch.full((32, 32), 1.0 / (index + 1))
        score(batch)
        decode(batch)


dist.init_process_group("gloo")
while True:
    here()
    if dist.get_rank() == 0:
        evaluate(num_batches=20_000)
    dist.barrier()
