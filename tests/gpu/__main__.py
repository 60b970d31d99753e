"""Prove the suite on a GPU: `make gpu-check`, or `python -m tests.gpu [--device cpu]`.

Needs no installation beyond what `tests/gpu/wheels.py` collects, and no network. Each group of
checks is a process of its own with a time limit, so that neither a crash nor a kernel that never
ends stops the others. Every row passes, fails with its reason, or says why it was not measurable;
the table is printed and, with --json, written. Exit code 0: no row failed. 1: one did. 2: there is
no GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from areal_core.environment import DETERMINISTIC
from tests.gpu.row import MARK, Row

ROOT = Path(__file__).parents[2]
# Seconds that a group may take on a GPU, eight minutes in all; ten times as many on a CPU.
GROUPS = {
    "environment": 20,
    "parity": 80,
    "learning": 90,
    "replay": 100,
    "engine": 60,
    "cost": 60,
    "ranks": 40,
    "hang": 30,
}
WORDS = {"pass": "pass", "fail": "FAIL", "not measurable": "-"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=tuple(GROUPS), default=list(GROUPS))
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    parser.add_argument("--group", choices=tuple(GROUPS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.group:
        from tests.gpu.checks import CHECKS

        with tempfile.TemporaryDirectory() as folder:
            CHECKS[options.group](options.device, Path(folder))
        return
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("Error: torch sees no GPU: --device cpu tries the script on this machine", file=sys.stderr)
            sys.exit(2)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    rows = [row for group in options.only for row in rows_of(group, options.device)]
    if options.json:
        options.json.write_text(json.dumps({"device": options.device, "rows": rows}, indent=1) + "\n")
    count = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in WORDS}
    print(", ".join(f"{number} {verdict}" for verdict, number in count.items()))
    sys.exit(1 if count["fail"] else 0)


def rows_of(group: str, device: str) -> list[Row]:
    """Run a group in a process; print and return its rows, and one more if it ends badly."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "tests.gpu", "--group", group, "--device", device]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=environment()
        )
        limit = GROUPS[group] * (1 if device == "cuda" else 10)
        try:
            output, _ = process.communicate(timeout=limit)
            ended = "" if process.returncode == 0 else f"ended with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            ended = f"took longer than {limit} s"
        errors.seek(0)
        said = (errors.read().strip().splitlines() or [""])[-1]
    rows: list[Row] = [
        json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)
    ]
    if ended:
        rows.append({"name": group, "verdict": "fail", "what": f"the group {ended}: {said[:200]}"})
    for row in rows:
        print(f"{WORDS[row['verdict']]:4}  {row['name']:44}  {row['what']}")
    print(f"      ({group}: {time.monotonic() - begin:.0f} s)", flush=True)
    return rows


def environment() -> dict[str, str]:
    """Return the variables of a group: those that `train` sets, so that bits are reproducible."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        **DETERMINISTIC,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


if __name__ == "__main__":
    main()
