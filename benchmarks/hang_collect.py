"""Collection of one host with 64 ranks: small real Python processes, two samples, all evidence.

    python -m benchmarks.hang_collect [--ranks 64] [--threads 8] [--depth 30]

Prints the seconds of a complete collection (discovery, py-spy of every process, /proc, host facts,
writing) without the pause between the two samples, compared with the same number of bare `py-spy
dump --json` runs one after the other.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import read_options, report
from hangdoctor.collect.discover import Search
from hangdoctor.collect.host import collect_host
from hangdoctor.collect.pyspy import Options, dump, find_pyspy

RANK = """
import sys, threading, time
num_threads, depth, ready = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def wait_at(depth):
    if depth:
        return wait_at(depth - 1)
    time.sleep(3600)
for _ in range(num_threads - 1):
    threading.Thread(target=wait_at, args=(depth,), daemon=True).start()
open(ready, "w").close()
wait_at(depth)
"""
INTERVAL_S = 1.0


def start_ranks(num_ranks: int, num_threads: int, depth: int, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start sleeping ranks of one job, each with `num_threads` stacks of `depth` frames."""
    program = folder / "rank.py"
    program.write_text(RANK)
    ranks = []
    for rank in range(num_ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(os.getpid()),
        }
        command = [sys.executable, str(program), str(num_threads), str(depth), str(folder / f"ready-{rank}")]
        ranks.append(subprocess.Popen(command, env=environment))
    while len(list(folder.glob("ready-*"))) < num_ranks:
        time.sleep(0.05)
    return ranks


def measure(ranks: list[subprocess.Popen[bytes]], folder: Path) -> tuple[float, float, int]:
    """Return the seconds of one collection, those of bare py-spy, and the number of stacks read."""
    started = time.perf_counter()
    search = Search(tuple(rank.pid for rank in ranks))
    manifest = collect_host(search, folder / "out", Options(interval_s=INTERVAL_S))
    collected_s = time.perf_counter() - started - INTERVAL_S
    tool, started = find_pyspy(), time.perf_counter()
    for rank in ranks * 2:
        dump(tool, rank.pid, timeout_s=10)
    bare_s = time.perf_counter() - started
    return collected_s, bare_s, sum(process.status == "dumped" for process in manifest.processes)


def main() -> None:
    options = read_options(__doc__, ranks=64, threads=8, depth=30)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ranks = start_ranks(options.ranks, options.threads, options.depth, folder)
        try:
            collected_s, bare_s, dumped = measure(ranks, folder)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        size = sum(path.stat().st_size for path in (folder / "out").rglob("*") if path.is_file())
    print(
        f"{dumped} of {options.ranks} ranks, two samples: {collected_s:.2f} s on {os.cpu_count()} cores "
        f"(bare py-spy, one after the other: {bare_s:.2f} s), {size / 1e6:.2f} MB"
    )
    what = f"stacks of {options.ranks} ranks, twice, with system facts"
    report(what, "py-spy alone, one after the other", "s", [collected_s], [bare_s])


if __name__ == "__main__":
    main()
