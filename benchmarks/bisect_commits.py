"""CPU time of `areal-debug bisect` on a history of commits, of this checkout and of another one.

    python benchmarks/bisect_commits.py [--before CHECKOUT] [--commits 10] [--steps 2]

Records a tiny run, plants a changed clip among commits that change no number, in a clone of this
repository, and searches for it. With `--before`, the command of that checkout searches, too, and
the ratio of their CPU times is printed. Exits with 1 if a search names another commit.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from areal_core.testing import make_tiny_model

ROOT = Path(__file__).parents[1]
LOSSES = "areal_core/algorithm/losses.py"
PLANT = ("clamp(1.0 - eps_clip, 1.0 + higher)", "clamp(1.0 - eps_clip, 1.0 + higher / 99)")


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=benchmark", "-c", "user.email=benchmark@example.org")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def plant(clone: Path, num_commits: int, at: int) -> str:
    """Make commits, the one at `at` with the changed clip; return its hash."""
    planted = ""
    for number in range(num_commits):
        text = (clone / LOSSES).read_text() + f"\n# note {number}\n"
        (clone / LOSSES).write_text(text.replace(*PLANT) if number == at else text)
        git(clone, "commit", "--quiet", "--all", "-m", f"Change {number}")
        planted = git(clone, "rev-parse", "HEAD") if number == at else planted
    return planted


def run(checkout: Path, *arguments: object) -> tuple[str, float, float]:
    """Run a checkout's command; return its output, CPU seconds and wall seconds."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "areal_debug", *map(str, arguments)]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout, cpu, time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--commits", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clone, record = Path(folder, "clone"), Path(folder, "record")
        model = make_tiny_model(Path(folder, "model"))
        git(ROOT, "clone", "--quiet", "--shared", str(ROOT), str(clone))
        good = git(clone, "rev-parse", "HEAD")
        planted = plant(clone, options.commits, at=options.commits * 2 // 3)
        script, config = ROOT / "tests/debug/train_tiny.py", ROOT / "tests/debug/tiny.yaml"
        paths = (
            f"cluster.fileroot={folder}/files",
            f"actor.path={model}",
            f"total_train_steps={options.steps}",
        )
        run(ROOT, "train", script, "--config", config, *paths, "--dump-rollout", record)
        seconds = []
        for checkout in filter(None, (options.before, ROOT)):
            found, cpu, wall = run(
                checkout, "bisect", record, "--good", good, "--bad", "HEAD", "--repository", clone, "--json"
            )
            report = json.loads(found)
            seconds.append(cpu)
            print(
                f"{checkout}: {report['num_replays']} replays of {options.commits} commits, "
                f"{cpu:.1f} CPU-s ({cpu / report['num_replays']:.1f} a replay), {wall:.0f} s"
            )
            if report["culprits"][-1]["hash"] != planted:
                raise SystemExit(1)
        if len(seconds) == 2:
            print(f"before / now: {seconds[0] / seconds[1]:.2f}")


if __name__ == "__main__":
    main()
