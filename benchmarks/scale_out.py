"""CPU seconds of a step in `record verify`, `record archive`, `query`, `crosscheck` and
`consistency`, and the gain of a second worker of Ray.

    python benchmarks/scale_out.py RECORD [--copies 4] [--steps A:B] [--on-ray] [--verbs verify,...]
    python benchmarks/scale_out.py --tokens 1000000 --verbs verify,archive

RECORD is one of our trainer, such as `areal-debug demo` leaves; with --tokens a record of 4 steps
with so many random tokens each is written. Each verb runs as a user runs it, on copies of the
record (verify, archive, query) or on some of its steps (crosscheck, consistency). Without --on-ray:
CPU seconds of all processes, less those of the same command for one item, a further item. With it:
wall seconds with 1 and with 2 workers on a Ray that each command starts, and their ratio; this
needs a quiet machine.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from recorder import RecordWriter, open_record
from recorder.header import write_header
from recorder.testing import SCRIPTED_HEADER, in_step, scripted_batch, send_step

AREAL_DEBUG = Path(sys.executable).parent / "areal-debug"
OF_RECORDS = ("verify", "archive", "query")
VERBS = (*OF_RECORDS, "crosscheck", "consistency")
SQL = "select count(*), avg(logprob), max(logprob) from tokens where loss_mask = 1"


def commands(verb: str, record: Path, copies: list[Path], steps: list[int], scratch: Path) -> list[list[str]]:
    """Return the command for one item, and for all."""
    if verb == "verify":
        return [["record", "verify", *map(str, items)] for items in (copies[:1], copies)]
    if verb == "archive":
        places = [Path(tempfile.mkdtemp(dir=scratch)) / "archives" for _ in range(2)]
        return [
            ["record", "archive", *map(str, items), "--to", str(place)]
            for items, place in zip((copies[:1], copies), places, strict=True)
        ]
    if verb == "query":
        return [["query", *map(str, items), SQL] for items in (copies[:1], copies)]
    more = ["--replay-weights"] if verb == "consistency" else []
    ends = (steps[0] + 1, steps[-1] + 1)
    return [[verb, str(record), "--steps", f"{steps[0]}:{end}", *more] for end in ends]


def write_record(folder: Path, num_tokens: int) -> Path:
    """Write a record of 4 steps with rows of 1,024 random tokens."""
    writer = RecordWriter(folder)
    folder.mkdir()
    write_header(folder, SCRIPTED_HEADER)
    for step in range(4):
        send_step(writer, step, in_step(scripted_batch([1024] * (num_tokens // 1024), seed=step), step))
    writer("end", steps=4, error=None)
    return folder


def run(arguments: list[str]) -> tuple[float, float]:
    """Run a command; return its CPU seconds, of all its processes, and its wall seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    before, started_at = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [AREAL_DEBUG, *arguments, "--json"],
        stdout=subprocess.PIPE,
        env=environment | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - started_at
    if done.returncode == 2:
        raise SystemExit(f"{' '.join(arguments)}: inconclusive: {done.stdout.decode()[-2000:]}")
    json.loads(done.stdout)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall_s


def main() -> None:
    """Measure each verb and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("record", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--steps", default="0:4")
    parser.add_argument("--verbs", default=",".join(VERBS))
    parser.add_argument("--on-ray", action="store_true")
    options = parser.parse_args()
    low, high = map(int, options.steps.split(":"))
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if options.tokens is not None:
            options.record = write_record(scratch / "record", options.tokens)
        record = open_record(options.record)
        steps = [step for step in record.steps if low <= step < high]
        found = record.step(steps[0])
        tokens = sum(found.batch_entry(rank)[1].num_tokens for rank in range(found.manifest.num_ranks))
        print(
            f"{len(record.steps)} steps, {tokens:,} tokens in step {steps[0]}; load {os.getloadavg()[0]:.1f}"
        )
        copies = [
            Path(shutil.copytree(options.record, scratch / str(number))) for number in range(options.copies)
        ]
        for verb in options.verbs.split(","):
            on_records = verb in OF_RECORDS
            one, every = commands(verb, options.record, copies, steps, scratch)
            num_items = len(copies) if on_records else len(steps)
            if options.on_ray:
                of_one, of_two = (
                    run(
                        [
                            *commands(verb, options.record, copies, steps, scratch)[1],
                            "--on",
                            "ray",
                            "--workers",
                            n,
                        ]
                    )[1]
                    for n in "12"
                )
                print(
                    f"{verb:<12} 1 worker {of_one:.1f} s, 2 workers {of_two:.1f} s, ratio {of_one / of_two:.2f}"
                )
                continue
            (first_s, _), (every_s, _) = run(one), run(every)
            each_s = (every_s - first_s) / (num_items - 1)
            a_step = each_s / len(record.steps) if on_records else each_s
            print(
                f"{verb:<12} first {first_s:.2f} CPU s, each further {each_s:.2f}, a step {a_step:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
