"""A reward worker process of rank 0 never returns; the rank waits for it, its peers for the rank.

label: external_wait
culprits: 0
ranks: 2
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.distributed as dist
from hang_point import meet


def verify_answer(answer: str) -> float:
    reader, _writer = os.pipe()
    os.read(reader, 1)
    return 1.0


def compute_rewards(answers: list[str]) -> list[float]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return list(pool.map(verify_answer, answers))


meet()
if dist.get_rank() == 0:
    compute_rewards(["42"])
dist.broadcast(torch.ones(4), src=0)
