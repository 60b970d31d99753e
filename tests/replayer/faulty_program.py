"""A run of `benchmarks/faulty_run.py` on the ranks of a job; its options are JSON."""

import json

from benchmarks.faulty_run import run


def main(asked: str) -> object:
    return run(**json.loads(asked))
