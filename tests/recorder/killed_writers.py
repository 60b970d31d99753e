"""Records with real writer processes and kills them with SIGKILL; run by test_kill.py, which looks at what is left.

killed_writers.py FOLDER stages    one rank, killed at its n-th call to the disk, in FOLDER/n, for n = 1, 2, ...
killed_writers.py FOLDER times     two ranks, both killed after a random time, in FOLDER/0 to FOLDER/9
"""

import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

from recorder import RecordWriter
from recorder.testing import SCRIPTED_HEADER, scripted_batch, send_step
from recorder.writer import write_header

fork = multiprocessing.get_context("fork")
NUM_STEPS = 2


def record_steps(folder, rank, num_ranks, barrier, num_steps):
    writer = RecordWriter(folder, rank, num_ranks, barrier)
    barrier()
    if rank == 0:
        folder.mkdir()
        write_header(folder, SCRIPTED_HEADER)
    barrier()
    for step in range(num_steps):
        send_step(writer, step, scripted_batch([3, 8, 6], seed=100 * step + rank))


def record_until_call(folder, last_call):
    """Dies just before its `last_call`-th fsync, write, rename or unlink."""
    calls = 0

    def counted(function):
        def wrapped(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == last_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapped

    for name in ("fsync", "mkdir", "rename", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    record_steps(folder, 0, 1, lambda: None, NUM_STEPS)


def kill_at_every_stage(root):
    last_call = 0
    while True:
        last_call += 1
        process = fork.Process(target=record_until_call, args=(root / str(last_call), last_call))
        process.start()
        process.join()
        if process.exitcode == 0:
            return


def kill_at_random_times(root):
    rng = random.Random(0)
    for trial in range(10):
        barrier = fork.Barrier(2)
        ranks = [
            fork.Process(target=record_steps, args=(root / str(trial), rank, 2, barrier.wait, 10**6))
            for rank in (0, 1)
        ]
        for process in ranks:
            process.start()
        # a rank that begins step 2 has met rank 0 at the end of step 1, so step 0 is committed
        while not (root / str(trial) / "steps/000002").exists():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1))
        for process in ranks:
            process.kill()
            process.join()


if __name__ == "__main__":
    {"stages": kill_at_every_stage, "times": kill_at_random_times}[sys.argv[2]](Path(sys.argv[1]))
