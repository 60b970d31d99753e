"""One rank of `areal-debug replay --explain`: `python -m areal_debug.explain_rank RECORD STEP MODEL`; rank 0 leaves its report."""

import os
import sys

from areal_debug.report_file import write_report
from areal_debug.script import mistakes_as_sentences
from replayer.explain import explain


def main(record: str, step: str, model: str) -> None:
    """Take the step apart on this rank; `model` is "" when it lies where it lay."""
    with mistakes_as_sentences():
        found = explain(record, int(step), model or None)
    if os.environ.get("RANK", "0") == "0":
        write_report(found.to_dict())


if __name__ == "__main__":
    main(*sys.argv[1:])
