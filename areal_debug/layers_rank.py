"""One rank of `areal-debug bisect-step --layers`: `python -m areal_debug.layers_rank REQUEST` replays up to a step and traces it."""

import sys
from dataclasses import asdict

from areal_debug.report_file import write_report
from areal_debug.script import mistakes_as_sentences
from replayer.layers import Call, trace_layers
from replayer.request import parse_request
from replayer.run import replay


def main(text: str) -> None:
    """Replay on this rank; the last step is traced."""
    request = parse_request(text)
    traces: list[list[Call]] = []
    with mistakes_as_sentences():
        replay(request, [trace_layers(request.last, traces.extend)])
    if traces:
        write_report({"calls": [[asdict(call) for call in calls] for calls in traces]})


if __name__ == "__main__":
    main(*sys.argv[1:])
