"""The engine raises in the middle of an update, logs it and serves on; the trainer sends the rest.

label: weight_sync_deadlock
culprits: 1
ranks: 2
"""

import queue

import torch
import torch.distributed as dist
from hang_point import here

BUCKETS = 3


def receive_bucket(number: int) -> None:
    dist.broadcast(torch.zeros(4), src=0)
    if number == 0:
        raise ValueError("no parameter is called model.layers.0.mlp.gate.weight")


def engine_loop() -> None:
    requests: queue.Queue[str] = queue.Queue()
    try:
        for number in range(BUCKETS):
            receive_bucket(number)
    except ValueError as problem:
        print(f"update_weights: {problem}")
    here()
    requests.get()


def update_weights() -> None:
    for number in range(BUCKETS):
        if number == 1:
            here()
        dist.broadcast(torch.ones(4), src=0)


dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    engine_loop()
update_weights()
dist.barrier()  # gloo's broadcast does not wait for those who receive
