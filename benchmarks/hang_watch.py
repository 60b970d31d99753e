"""Cost of watching a job: CPU time of the watcher per rank and poll, and of one heartbeat.

    python benchmarks/hang_watch.py [--ranks 64] [--json]

The job pays for the heartbeats; the host pays for the polls, one every two seconds by default.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hangdoctor.collect.discover import Search, find_job
from hangdoctor.collect.process import process_table
from hangdoctor.heartbeat import VARIABLE, beat, read_beats
from hangdoctor.watch.liveness import Limits, Track, follow, judge_liveness
from hangdoctor.watch.loop import RESCAN_S, Plan
from hangdoctor.watch.signs import read_signs

NUM_LOOKS = 200
NUM_BEATS = 20_000


def measure(num_ranks: int) -> dict[str, float]:
    """Return CPU seconds, and their share of one core at the default interval."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ[VARIABLE] = str(folder)
        ranks = [
            subprocess.Popen(
                [sys.executable, "-S", "-c", "import time; time.sleep(600)"],
                env=os.environ
                | {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_PORT": str(os.getpid())},
            )
            for rank in range(num_ranks)
        ]
        try:
            started = time.process_time()
            for step in range(NUM_BEATS):
                beat(step, "rank_0")
            beat_s = (time.process_time() - started) / NUM_BEATS
            for rank in range(num_ranks):
                beat(1, f"rank_{rank}")
            search = Search(tuple(rank.pid for rank in ranks))
            started = time.process_time()
            job = find_job(search, process_table())
            scan_s = time.process_time() - started
            tracks: dict[str, Track] = {}
            started = time.process_time()
            for look in range(NUM_LOOKS):
                tracks = follow(tracks, read_signs(job, read_beats(folder), None), float(look))
                judge_liveness(tracks, float(look), Limits())
            look_s = (time.process_time() - started) / NUM_LOOKS
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    share = look_s / Plan(folder).poll_s + scan_s / RESCAN_S
    return {
        "ranks": num_ranks,
        "beat_us": round(beat_s * 1e6, 2),
        "look_ms": round(look_s * 1e3, 2),
        "scan_ms": round(scan_s * 1e3, 2),
        "watcher_percent_of_a_core": round(100 * share, 2),
    }


def main() -> None:
    """Measure once and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    measured = measure(options.ranks)
    if options.json:
        print(json.dumps(measured))
        return
    print(
        f"a heartbeat costs its rank {measured['beat_us']} us; a poll of {measured['ranks']} ranks {measured['look_ms']} ms, a search for "
        f"them {measured['scan_ms']} ms: {measured['watcher_percent_of_a_core']} % of one core in total"
    )


if __name__ == "__main__":
    main()
