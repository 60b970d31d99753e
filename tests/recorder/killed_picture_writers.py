"""Record pictures in processes that kill themselves at a call to the disk: FOLDER/n at the n-th.

killed_picture_writers.py FOLDER EVERY: at every EVERY-th call, until a run is not killed.
"""

import sys
from pathlib import Path

import recorder.writer
from recorder import RecordingOptions, RecordWriter, Retention
from recorder.testing import SCRIPTED_HEADER, in_step, scripted_batch, send_step, start_facts
from tests.recorder.killed_writers import kill_at_calls
from tests.recorder.pictured import png, with_pictures

OPTIONS = RecordingOptions(retention=Retention(keep_last=2))
NUM_STEPS = 4


def batch_of(step):
    """Return a batch with a picture of its own, one of every second step, and one of all."""
    rows = [[png(step), png(100 + step % 2)], [png(step)], [], [png(200)]]
    return in_step(with_pictures(scripted_batch([3, 4, 5, 6], seed=step), rows), step)


def record(folder, options, first_step):
    writer = RecordWriter(folder, options=options)
    recorder.writer.describe_run = lambda facts, recording: SCRIPTED_HEADER  # the real one imports torch
    writer("start", **start_facts())
    for step in range(first_step, NUM_STEPS):
        send_step(writer, step, batch_of(step))
    writer("end", steps=NUM_STEPS, error=None)


if __name__ == "__main__":
    kill_at_calls(
        Path(sys.argv[1]),
        lambda folder: record(folder, OPTIONS, 0),
        ("fsync", "mkdir", "rename", "unlink", "rmdir"),
        int(sys.argv[2]),
    )
