"""Size and time of `pip install areal-debug` without extras, and what runs there.

    python benchmarks/slim_install.py [--folder DIR]

It builds the wheel of the committed tree, downloads it with its dependencies, installs both into a
new virtual environment, and runs the verbs and the recording API that need no extra.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MB = 1e6
HELP_RUNS = 7
LARGEST_SHOWN = 6
NOT_OURS = ("pip", "setuptools")
HEAVY = ("torch", "transformers", "zarr", "datasets")
RECORD = """
from areal_debug import Recorder, Sample
with Recorder("record", config={"lr": 1e-6}) as recorder:
    for step in range(3):
        sample = {"prompt_tokens": [5, 6], "completion_tokens": [7, 8, 9], "logprobs": [-0.5, -1.0, -0.25]}
        samples = [{**sample, "reward": float(i % 2), "group": 0, "prompt": "2+2=", "completion": "4"} for i in range(4)]
        recorder.step(step, samples, stats={"loss": 1.0 / (step + 1)})
"""
WATCH = """
import areal_debug
with areal_debug.watch("watched") as w:
    for step in range(30):
        w.step(step, loss=1.0 / (step + 1), stats={"grad_norm": 1.0})
"""
VERBS = (
    "record ls record",
    "record show record --step 1",
    "record verify record",
    "record export record --format jsonl --to exported",
    "record import train_data_step1.jsonl --to imported",
    "diff record record",
    "view record --output page.html",
    "doctor watched",
    "hang diagnose rank_0.txt rank_1.txt",
)
NEMO_RL = {  # a sample, as NeMo-RL writes it
    "input_lengths": [4],
    "token_ids": [5, 6, 7, 8],
    "token_loss_mask": [0, 0, 1, 1],
    "generation_logprobs": [0.0, 0.0, -0.5, -1.0],
    "sample_loss_mask": [1],
    "rewards": [1.0],
}
STACK = """Process {pid}: python train.py
Thread {pid} (idle): "MainThread"
    {call} (torch/distributed/distributed_c10d.py:100)
    <module> (train.py:{pid})
"""


def size_of(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.is_file())


def run(*command: object, cwd: Path, expected: Iterable[int] = (0,)) -> str:
    """Run a command outside of this checkout; raise with its output if it fails."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=environment)
    if done.returncode not in expected:
        raise RuntimeError(
            f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def measure(folder: Path) -> dict[str, Any]:
    """Install into `folder` and measure; sizes in bytes, times in seconds."""
    run("git", "clone", "-q", ROOT, "source", cwd=folder)
    run(sys.executable, "-m", "venv", "venv", cwd=folder)
    python = folder / "venv/bin/python"
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-cache-dir")
    run(*pip, "wheel", "--no-deps", "-w", "wheel", "./source", cwd=folder)
    (wheel,) = (folder / "wheel").glob("*.whl")
    run(*pip, "download", "-d", "downloaded", wheel, cwd=folder)
    site = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    )
    before = size_of(site.rglob("*"))
    started = time.perf_counter()
    run(*pip, "install", wheel, cwd=folder)
    installed_s = time.perf_counter() - started
    installed = size_of(site.rglob("*")) - before + size_of([folder / "venv/bin/py-spy"])
    packages = {path.name: size_of(path.rglob("*")) for path in site.iterdir() if path.name not in NOT_OURS}
    wheels = {path.name: path.stat().st_size for path in (folder / "downloaded").iterdir()}
    return {
        "download_bytes": sum(wheels.values()),
        "downloads": dict(sorted(wheels.items(), key=lambda item: -item[1])[:LARGEST_SHOWN]),
        "installed_bytes": installed,
        "packages": dict(sorted(packages.items(), key=lambda item: -item[1])[:LARGEST_SHOWN]),
        "install_s": installed_s,
        "heavy": [name for name in HEAVY if (site / name).exists()],
        "seconds": seconds(folder),
    }


def seconds(folder: Path) -> dict[str, float | str]:
    """Time the command and the API in the new environment; a verb that fails has its message."""
    python, command = folder / "venv/bin/python", folder / "venv/bin/areal-debug"
    for rank, call in enumerate(("all_reduce", "broadcast")):
        (folder / f"rank_{rank}.txt").write_text(STACK.format(pid=rank + 1, call=call))
    (folder / "train_data_step1.jsonl").write_text(json.dumps(NEMO_RL) + "\n")
    found: dict[str, float | str] = {}
    for name, code in (("Recorder", RECORD), ("watch", WATCH)):
        found[name] = timed(python, "-c", code, cwd=folder)
    for arguments in ("--help", "--version"):
        found[arguments] = statistics.median(timed(command, arguments, cwd=folder) for _ in range(HELP_RUNS))
    for verb in VERBS:
        expected = (1,) if verb.startswith("hang") else (0,)
        try:
            found[verb] = timed(command, *verb.split(), cwd=folder, expected=expected)
        except RuntimeError as error:
            found[verb] = str(error)
    return found


def timed(*command: object, cwd: Path, expected: Iterable[int] = (0,)) -> float:
    started = time.perf_counter()
    run(*command, cwd=cwd, expected=expected)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="new folder for everything; by default temporary")
    folder = parser.parse_args().folder
    if folder is not None:
        folder.mkdir(parents=True)
        print(json.dumps(measure(folder.absolute()), indent=1))
        return
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(measure(Path(temporary)), indent=1))


if __name__ == "__main__":
    main()
