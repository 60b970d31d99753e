"""The engine on rank 1 failed, caught it, and idles; the trainer waits to update its weights.

label: partial_exception
culprits: 1
ranks: 2
"""

import threading

import torch
import torch.distributed as dist
from hang_point import here


def generate() -> None:
    raise RuntimeError("KV cache pool is full")


def serve_engine(stopped: threading.Event) -> None:
    try:
        generate()
    except RuntimeError as error:
        print(f"engine died: {error}")
        idle_after_failure(stopped)
    dist.broadcast(torch.ones(4), src=0)


def idle_after_failure(stopped: threading.Event) -> None:
    here()
    while not stopped.wait(timeout=30):
        pass


def push_weights() -> None:
    dist.broadcast(torch.ones(4), src=0)
    dist.barrier()


dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    serve_engine(threading.Event())
here()
push_weights()
