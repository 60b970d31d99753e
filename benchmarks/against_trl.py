"""SmolLM2-135M trained by us and by TRL, in turn on the same CPU: complete GRPO steps, and SFT.

    python -m benchmarks.against_trl [--rounds 4] [--threads 2] [--only grpo,sft_equal]
                                     [--without trl_bf16] [--model FOLDER]
                                     [--questions 4] [--samples 4] [--prompt-tokens 0]

grpo: sample 4 questions x 4 completions x exactly 64 tokens at temperature 1; rewards, advantages,
update, weight update of the sampler. `ours` trains on the samples of a question as a tree,
`ours_packed` does not. --prompt-tokens makes prompts that long. --samples and --prompt-tokens take
several numbers, separated by commas; each pair of them is measured by itself. With 8 completions of
512-token prompts in float32 TRL needs 11 GiB or more, and a stopped side keeps its memory: compare
with ours_packed in a run of its own (--without trl,trl_bf16).
sft_long_tailed: 16 rows per step, of 16 to 320 tokens; ours packs them, TRL pads them, as each does
by default.
sft_equal: 16 rows of 100 tokens, which need no padding.

Each side is a separate process, stopped (SIGSTOP) while another has its turn. The first step of
each is left out. Ratios are of the others' seconds to ours in one round, in wall time and in CPU
time, [least, median, largest] of the rounds; those of CPU time also hold on a busy machine. Memory
is the peak of a side's main process in the measured steps. `trl` keeps float32 weights, as it does
by default and as ours does; `trl_bf16` keeps bfloat16 ones, which is faster but loses small
updates. The goal for grpo is a median ratio of CPU time of at least 3 to `trl`.

All compute in bfloat16 if the processor has instructions for it, and otherwise in float32, without
`trl_bf16`: emulated products in bfloat16 are several times slower than those in float32.
"""

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from areal_core.embedded.replica import computes_bfloat16
from benchmarks.harness import SomeOf, read_options, report

GOAL = 3.0
COMPARISONS = {
    "grpo": ("ours", "ours_packed", "trl", "trl_bf16"),
    "sft_long_tailed": ("ours", "trl"),
    "sft_equal": ("ours", "trl"),
}


@dataclass(frozen=True)
class Step:
    """Wall seconds, CPU seconds, and tokens (of GRPO: completion tokens) of one step."""

    wall_s: float
    cpu_s: float
    tokens: int


class Side:
    """A training process that runs only during its turn."""

    def __init__(
        self,
        comparison: str,
        name: str,
        model: Path,
        steps: int,
        folder: Path,
        threads: int,
        shape: Sequence[int],
    ) -> None:
        self.log = folder / f"{comparison}-{name}.log"
        command = [
            sys.executable,
            "-m",
            "benchmarks.against_trl_sides",
            comparison,
            name,
            str(model),
            str(steps),
            str(folder),
        ]
        command += [*map(str, shape), dtype_of_compute()]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,
            )
        os.killpg(self.process.pid, signal.SIGSTOP)

    def turn(self) -> Step:
        """Run and measure one step; exit with the log when the process fails."""
        assert self.process.stdout is not None
        began, busy = time.perf_counter(), self.cpu_s()
        os.killpg(self.process.pid, signal.SIGCONT)
        line = next((text for text in self.process.stdout if text.startswith("@step")), None)
        if line is None:
            code = self.process.wait()
            reason = (
                "was killed (signal 9: was there too little memory?)" if code == -9 else f"ended with {code}"
            )
            sys.exit(f"{self.log.stem} {reason}:\n{self.log.read_text()[-3000:]}")
        step = Step(time.perf_counter() - began, self.cpu_s() - busy, int(line.split()[1]))
        os.killpg(self.process.pid, signal.SIGSTOP)
        return step

    def reset_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def peak_mib(self) -> float:
        """Return the peak of the resident memory of the main process since `reset_peak`."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))

    def cpu_s(self) -> float:
        """CPU seconds so far, of all its processes."""
        process = psutil.Process(self.process.pid)
        return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def measure(
    comparison: str,
    names: Sequence[str],
    model: Path,
    rounds: int,
    threads: int,
    folder: Path,
    shape: Sequence[int],
) -> tuple[dict[str, list[Step]], dict[str, float]]:
    """Return the steps of every side, run in turn, and the peak of its memory in MiB."""
    sides: dict[str, Side] = {}
    try:
        for name in names:
            sides[name] = Side(comparison, name, model, rounds + 2, folder, threads, shape)
            sides[name].turn()  # starts, loads, warms up
            sides[name].reset_peak()
        steps = turns(comparison, sides, rounds)
        return steps, {name: side.peak_mib() for name, side in sides.items()}
    finally:
        for side in sides.values():
            side.end()


def turns(comparison: str, sides: dict[str, Side], rounds: int) -> dict[str, list[Step]]:
    steps: dict[str, list[Step]] = {name: [] for name in sides}
    for number in range(1, rounds + 1):
        for name, side in sides.items():
            steps[name].append(side.turn())
        shown = ", ".join(
            f"{name} {s[-1].wall_s:.1f} s ({s[-1].cpu_s:.1f} s of CPU)" for name, s in steps.items()
        )
        print(f"{comparison}, round {number}: {shown}", flush=True)
    return steps


def verdict(
    comparison: str, steps: dict[str, list[Step]], peaks: dict[str, float], shape: Sequence[int]
) -> dict[str, object]:
    """Return medians, peaks, and [least, median, largest] ratios of the steps of a round."""
    result: dict[str, object] = {"comparison": comparison, "dtype": dtype_of_compute()}
    if comparison == "grpo":
        result |= dict(zip(("questions", "samples", "prompt_tokens"), shape, strict=True))
    for name, taken in steps.items():
        result[f"{name}_s"] = round(statistics.median(step.wall_s for step in taken), 2)
        result[f"{name}_cpu_s"] = round(statistics.median(step.cpu_s for step in taken), 2)
        result[f"{name}_tokens_per_s"] = round(statistics.median(s.tokens / s.wall_s for s in taken), 1)
        result[f"{name}_peak_mib"] = round(peaks[name])
    for name, unit in itertools.product(list(steps)[1:], ("wall_s", "cpu_s")):
        pairs = zip(steps[name], steps["ours"], strict=True)
        found = [getattr(theirs, unit) / getattr(ours, unit) for theirs, ours in pairs]
        ratios = [round(number, 2) for number in (min(found), statistics.median(found), max(found))]
        result[f"{name}/ours_{unit}"] = ratios
        if (comparison, name, unit) == ("grpo", "trl", "cpu_s"):
            result |= {"goal": GOAL, "reached": ratios[1] >= GOAL}
    return result


def report_sides(
    comparison: str, steps: dict[str, list[Step]], peaks: dict[str, float], shape: Sequence[int]
) -> None:
    """Report time and memory of every other side beside ours."""
    what = f"{comparison}, {dtype_of_compute()}"
    if comparison == "grpo":
        what = f"GRPO, {shape[0]} x {shape[1]} samples, prompts of {shape[2] or 'some'} tokens"
    cpu_s = {name: [step.cpu_s for step in taken] for name, taken in steps.items()}
    titles = {"trl": "TRL", "trl_bf16": "TRL, bfloat16 weights", "ours_packed": "ours, packed"}
    for name in list(steps)[1:]:
        report(what, titles[name], "CPU s", cpu_s["ours"], cpu_s[name])
        report(f"{what}, peak memory", titles[name], "MiB", [peaks["ours"]], [peaks[name]])


def dtype_of_compute() -> str:
    """Return the dtype of every side's compute on this machine."""
    return "bfloat16" if computes_bfloat16() else "float32"


def prepare_model(folder: Path) -> Path:
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from smollm2 import prepare_smollm2

    return prepare_smollm2(folder)


def main() -> None:
    options = read_options(
        __doc__,
        rounds=4,
        threads=os.cpu_count(),
        only=SomeOf(COMPARISONS),
        without=[""],
        model="",
        questions=4,
        samples=[4],
        prompt_tokens=[0],
    )
    shapes = list(itertools.product([options.questions], options.samples, options.prompt_tokens))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that no side stays stopped
    with tempfile.TemporaryDirectory() as name:
        model = Path(options.model) if options.model else prepare_model(Path(name) / "smollm2")
        for comparison in options.only:
            left_out = options.without + ([] if computes_bfloat16() else ["trl_bf16"])
            names = [side for side in COMPARISONS[comparison] if side not in left_out]
            for shape in shapes if comparison == "grpo" else shapes[:1]:
                found = measure(comparison, names, model, options.rounds, options.threads, Path(name), shape)
                print(json.dumps(verdict(comparison, *found, shape)), flush=True)
                report_sides(comparison, *found, shape)


if __name__ == "__main__":
    main()
