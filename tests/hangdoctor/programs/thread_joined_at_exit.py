"""Rank 1 returned from main, and the interpreter joins a metrics thread that nothing stops.

label: cleanup_deadlock
culprits: 1
ranks: 2
"""

import queue
import threading

import torch
import torch.distributed as dist
from hang_point import here


def write_metrics(pending: queue.Queue) -> None:
    while True:
        pending.get()


dist.init_process_group("gloo")
pending: queue.Queue = queue.Queue()
threading.Thread(target=write_metrics, args=(pending,), name="metrics").start()
dist.all_reduce(torch.ones(4))
here()
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(4))
