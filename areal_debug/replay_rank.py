"""One rank of `areal-debug replay`: `python -m areal_debug.replay_rank REQUEST`, a `replayer.request.Request` as JSON.

Rank 0 prints what it finds and leaves its report behind for the command, which judges it.
"""

import sys
from functools import partial
from pathlib import Path

from areal_core.trainer.rl import Observer, PPOTrainer
from areal_debug.replay_observer import replay_reporter
from areal_debug.script import mistakes_as_sentences
from areal_debug.wiring import recorder_of
from recorder import Record, Recording, RecordingOptions
from replayer.check import StoppedAtDifference
from replayer.request import Request, parse_request
from replayer.run import MakeObserver, replay


def main(text: str) -> None:
    """Replay the steps on this rank."""
    request = parse_request(text)
    observers: list[MakeObserver] = [partial(replay_reporter, with_verdict=False)]
    if request.record_to is not None:
        observers.append(record_again)
    with mistakes_as_sentences():
        try:
            replay(request, observers)
        except StoppedAtDifference:
            return  # the report says so


def record_again(record: Record, trainer: PPOTrainer, request: Request) -> Observer:
    """An observer that records what this replay does, into another folder."""
    assert request.record_to is not None
    scope = "full" if record.header.recording.scope == "full" else "plan"
    return recorder_of(trainer, Path(request.record_to), RecordingOptions(Recording(scope), text=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
