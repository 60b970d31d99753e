"""The collector of one host: writes a gzipped tar of its collection to stdout. `remote` runs it on
every host.

Exit 0 with the tar; 3 with one sentence on stderr when there is nothing to collect.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from hangdoctor.collect.discover import Search
from hangdoctor.collect.host import collect_host
from hangdoctor.collect.pyspy import Options
from hangdoctor.collect.write import pack
from hangdoctor.errors import HangInputError

NOTHING_TO_COLLECT = 3
LINGER_S = 1.0
"""Delay before the exit: srun was seen to lose the last output of a task that ends at once."""


def arguments_for(search: Search, options: Options) -> list[str]:
    """Return the command line that makes another host search and collect in the same way."""
    found = [f"--pid={pid}" for pid in search.pids] + [f"--match={search.match}"]
    if search.variable:
        found.append(f"--variable={'='.join(search.variable)}")
    return [
        *found,
        f"--samples={options.num_samples}",
        f"--interval={options.interval_s}",
        f"--timeout={options.timeout_s}",
        f"--log-lines={options.log_lines}",
        *(["--native"] if options.native else []),
    ]


def main(arguments: list[str]) -> int:
    """Collect this host as the arguments define."""
    usual = Options()
    parser = argparse.ArgumentParser(prog="python -m hangdoctor.collect", description=__doc__)
    parser.add_argument("--pid", type=int, action="append", default=[])
    parser.add_argument("--match", default="")
    parser.add_argument("--variable", default="", help="NAME=VALUE")
    parser.add_argument("--samples", type=int, default=usual.num_samples)
    parser.add_argument("--interval", type=float, default=usual.interval_s)
    parser.add_argument("--timeout", type=float, default=usual.timeout_s)
    parser.add_argument("--log-lines", type=int, default=usual.log_lines)
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--host", default=usual.host, help="name of this host in the collection")
    parsed = parser.parse_args(arguments)
    name, _, value = parsed.variable.partition("=")
    search = Search(tuple(parsed.pid), parsed.match, (name, value) if parsed.variable else None)
    options = Options(
        parsed.samples, parsed.interval, parsed.timeout, parsed.native, parsed.log_lines, parsed.host
    )
    with tempfile.TemporaryDirectory(prefix="hangdoctor-") as folder:
        try:
            collect_host(search, Path(folder), options)
        except HangInputError as error:
            print(error, file=sys.stderr)
            return NOTHING_TO_COLLECT
        sys.stdout.buffer.write(pack(Path(folder)))
    sys.stdout.flush()
    time.sleep(LINGER_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
