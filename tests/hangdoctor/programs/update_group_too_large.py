"""Trainer and engine join the group of the update; its world size counts one engine too many.

label: weight_sync_deadlock
culprits: none
ranks: 2
"""

import os
from datetime import timedelta

import torch.distributed as dist
from hang_point import here

ENGINES = 2  # one was started


def init_weights_update_group(rank: int) -> None:
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0,
        timeout=timedelta(hours=1),
        wait_for_workers=False,
    )
    here()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=1 + ENGINES)


def trainer() -> None:
    init_weights_update_group(0)


def engine() -> None:
    init_weights_update_group(1)


if os.environ["RANK"] == "0":
    trainer()
else:
    engine()
