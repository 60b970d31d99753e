"""One rank of `areal-debug replay`: `python -m areal_debug.replay_rank RECORD FIRST LAST MODEL`."""

import sys

from areal_debug.script import mistakes_as_sentences
from areal_debug.wiring import make_check
from replayer.run import replay


def main(record: str, first: str, last: str, model: str) -> None:
    """Replay the steps on this rank; `model` is "" when it lies where it lay."""
    with mistakes_as_sentences():
        replay(record, make_check, first_step=int(first), last_step=int(last), model=model or None)


if __name__ == "__main__":
    main(*sys.argv[1:])
