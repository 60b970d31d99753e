"""Rank 1's main thread and its metrics thread take two locks in opposite order.

label: lock_deadlock
culprits: 1
ranks: 2
"""

import threading

import torch
import torch.distributed as dist
from hang_point import meet

weights_lock = threading.Lock()
metrics_lock = threading.Lock()
both_hold_one = threading.Barrier(2)


def report_metrics() -> None:
    with metrics_lock:
        both_hold_one.wait()
        with weights_lock:
            pass


def update_weights() -> None:
    with weights_lock:
        both_hold_one.wait()
        with metrics_lock:
            pass


meet()
if dist.get_rank() == 1:
    threading.Thread(target=report_metrics, name="metrics", daemon=True).start()
    update_weights()
dist.all_reduce(torch.ones(4))
