"""Record with real writer processes and kill them with SIGKILL; test_kill.py checks the result.

killed_writers.py FOLDER stages
    one rank, killed at its n-th call to the disk, in FOLDER/n, for n = 1, 2, ...
killed_writers.py FOLDER pictures EVERY
    one rank with pictures, killed at every EVERY-th call
killed_writers.py FOLDER times RANKS QUEUE KEEP TRIALS
    all ranks killed after a random time, in FOLDER/0, FOLDER/1, ...; the steps that rank 0 had
    committed by then are in FOLDER/0.committed
"""

import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import recorder.writer
from recorder import Recording, RecordingOptions, RecordWriter, Retention
from recorder.testing import SCRIPTED_HEADER, in_step, scripted_batch, send_step, start_facts
from recorder.writer import alone
from tests.recorder.pictured import png, with_pictures

fork = multiprocessing.get_context("fork")
BATCHES = [scripted_batch([3, 8, 6], seed=seed) for seed in range(200)]
PICTURE_OPTIONS = RecordingOptions(retention=Retention(keep_last=2))
NUM_PICTURE_STEPS = 4


def record_steps(folder, rank, num_ranks, gather, options, num_steps):
    writer = RecordWriter(folder, rank, num_ranks, gather, options)
    header = replace(SCRIPTED_HEADER, num_ranks=num_ranks)
    recorder.writer.describe_run = lambda facts, recording: header
    writer("start", config={}, data_parallel_size=num_ranks, data_parallel_rank=rank, tokenizer=None)
    for step in range(num_steps):
        send_step(writer, step, in_step(BATCHES[(2 * step + rank) % 200], step, rank))
    writer("end", steps=num_steps, error=None)


def until_call(last_call, names, record, folder):
    """Call `record(folder)`, and die just before the `last_call`-th of these functions of `os`."""
    calls = 0

    def counted(function):
        def wrapped(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == last_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapped

    for name in names:
        setattr(os, name, counted(getattr(os, name)))
    record(folder)


def picture_batch(step):
    """Return a batch with a picture of its own, one of every second step, and one of all."""
    rows = [[png(step), png(100 + step % 2)], [png(step)], [], [png(200)]]
    return in_step(with_pictures(scripted_batch([3, 4, 5, 6], seed=step), rows), step)


def record_pictures(folder, options=PICTURE_OPTIONS, first_step=0):
    writer = RecordWriter(folder, options=options)
    recorder.writer.describe_run = lambda facts, recording: SCRIPTED_HEADER  # the real one imports torch
    writer("start", **start_facts())
    for step in range(first_step, NUM_PICTURE_STEPS):
        send_step(writer, step, picture_batch(step))
    writer("end", steps=NUM_PICTURE_STEPS, error=None)


def kill_at_calls(root, record, names, every=1):
    """Record in `root/1`, `root/{1 + every}`, ... until a process is not killed at that call."""
    for last_call in itertools.count(1, every):
        process = fork.Process(target=until_call, args=(last_call, names, record, root / str(last_call)))
        process.start()
        process.join()
        if process.exitcode == 0:
            return


def gatherers(num_ranks):
    """Return a collective of one or two processes, over a pipe."""
    if num_ranks == 1:
        return [alone]
    ends = fork.Pipe()

    def gatherer(rank):
        def gather(state):
            ends[rank].send(state)
            other = ends[rank].recv()
            return [state, other] if rank == 0 else [other, state]

        return gather

    return [gatherer(rank) for rank in (0, 1)]


def record_and_print(committed, rank, *arguments):
    """Record indefinitely, and print each commit when it is done."""
    commit = recorder.writer.commit_step

    def commit_and_print(folder, step, *arguments):
        committed_step = commit(folder, step, *arguments)
        os.write(committed, f"{step} ".encode())
        return committed_step

    recorder.writer.commit_step = commit_and_print
    record_steps(*arguments[:1], rank, *arguments[1:], num_steps=10**6)


def kill_at_random_times(root, num_ranks, queue_steps, keep_last, trials):
    rng = random.Random(num_ranks + 10 * queue_steps)
    options = RecordingOptions(
        Recording(scope="full"), queue_steps=queue_steps, retention=Retention(keep_last=keep_last)
    )
    for trial in range(trials):
        committed = os.open(root / f"{trial}.committed", os.O_CREAT | os.O_WRONLY)
        ranks = [
            fork.Process(
                target=record_and_print, args=(committed, rank, root / str(trial), num_ranks, gather, options)
            )
            for rank, gather in enumerate(gatherers(num_ranks))
        ]
        for process in ranks:
            process.start()
        while not (root / str(trial) / "record.json").exists():  # "stages" kills during the start
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.08))
        for process in rng.sample(ranks, num_ranks):
            process.kill()
        for process in ranks:
            process.join()
        os.close(committed)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if sys.argv[2] == "stages":
        kill_at_calls(
            folder,
            lambda f: record_steps(f, 0, 1, alone, RecordingOptions(), num_steps=2),
            ("fsync", "mkdir", "rename", "unlink"),
        )
    elif sys.argv[2] == "pictures":
        calls = ("fsync", "mkdir", "rename", "unlink", "rmdir")
        kill_at_calls(folder, record_pictures, calls, int(sys.argv[3]))
    else:
        num_ranks, queue_steps, keep_last, trials = map(int, sys.argv[3:])
        kill_at_random_times(folder, num_ranks, queue_steps, keep_last or None, trials)
