"""Ranks of a run as threads of this process, and the writers of a record of theirs."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from recorder import RecordingOptions, RecordWriter
from recorder.header import write_header
from recorder.testing import SCRIPTED_HEADER, gatherers


def begin(
    folder: Path,
    num_ranks: int = 1,
    options: RecordingOptions = RecordingOptions(),
    header: Any = SCRIPTED_HEADER,
    **of_writers: Any,
) -> list[RecordWriter]:
    writers = [
        RecordWriter(folder, rank, num_ranks, gather, options, **of_writers)
        for rank, gather in enumerate(gatherers(num_ranks))
    ]
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"num_ranks": num_ranks, "world_size": num_ranks, "recording": options.recording}
    write_header(folder, replace(header, **sizes))
    return writers


def on_ranks(num_ranks, work):
    """Call `work(rank)` in a thread per rank; return the exception of each, or None."""
    errors = [None] * num_ranks

    def run(rank):
        try:
            work(rank)
        except Exception as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return errors
