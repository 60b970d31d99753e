"""The engine waits for its requests to end before it joins the update; the trainer sends already.

label: weight_sync_deadlock
culprits: 1
ranks: 2
"""

import threading

import torch
import torch.distributed as dist
from hang_point import here


class Engine:
    """An engine with one request that never ends."""

    def __init__(self) -> None:
        self.drained = threading.Event()

    def serve(self) -> None:
        self.wait_for_outstanding_requests()
        self.receive_weights()

    def wait_for_outstanding_requests(self) -> None:
        here()
        while not self.drained.wait(timeout=30):
            pass

    def receive_weights(self) -> None:
        dist.broadcast(torch.zeros(4), src=0)


def update_weights() -> None:
    here()
    dist.broadcast(torch.ones(4), src=0)


dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    Engine().serve()
update_weights()
