"""How the cost of each verb grows with its input: CPU seconds, peak memory, exponent, bound.

    python -m benchmarks.growth [--sizes 0.01 0.1 1] [--only NAME ...] [--write]

Each case has an input of a number of items (`CASES`), which `--sizes` multiplies. A measurement is
one process and all children that it waited for: CPU seconds, because other work on the machine does
not change them much, and the largest resident memory of any of them. The exponent is the slope
between the two largest sizes of what a run costs beyond one with next to no input: 1 is linear. The
bound is the cheapest honest work on the same bytes, in this process: reading and checking them.
`--write` writes docs/measurements/growth.md.
"""

import json
import math
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from crc32c import crc32c

from areal_core.testing import make_tiny_model
from areal_debug.doctor.sources.events import masked_checksum
from areal_debug.doctor.sources.wandb_run import BLOCK_BYTES, FIRST, FRAGMENT, FULL, LAST, MIDDLE
from benchmarks.hang_scale import flight_recorder_dump, threads_of
from benchmarks.harness import ROOT, cpu_seconds, read_options
from recorder.testing import write_scripted_record
from recorder.trainers.recorder import Recorder

PAGE = ROOT / "docs/measurements/growth.md"
VERB = ("-m", "areal_debug")
LARGEST_EXPONENT = 1.25
SMALLEST_S = 0.3  # CPU seconds that an exponent needs: less is the noise of a start
STEPS, ROWS = 10_000, 100_000
ROWS_OF_STEP = 1_000
FEWEST = 4  # items of next to no input


@dataclass(frozen=True)
class Cost:
    """CPU seconds of a process and its children, and the largest memory of one of them."""

    cpu_s: float
    peak_mib: float


@dataclass(frozen=True)
class Case:
    """A command whose cost is measured.

    `items` are the largest number and what they are; `make` writes an input of a number of items at
    a path; `command` are arguments of Python, from the input and a folder that may be written.
    """

    name: str
    items: tuple[int, str]
    make: Callable[[Path, int], None]
    command: "Command"


@dataclass(frozen=True)
class Row:
    """What was measured of a case: a cost by number of items, without input, and of the bound."""

    case: Case
    start: Cost
    costs: dict[int, Cost]
    bound_s: float

    @property
    def exponent(self) -> float | None:
        """The slope of the two largest sizes; None where they cost too little."""
        own = {items: cost.cpu_s - self.start.cpu_s for items, cost in sorted(self.costs.items())[-2:]}
        return exponent_of(own) if len(own) == 2 and min(own.values()) > SMALLEST_S else None

    @property
    def ratio(self) -> float:
        """Cost of the largest size beyond the start, by that of the bound."""
        last = self.costs[max(self.costs)]
        return max(last.cpu_s - self.start.cpu_s, 0.0) / max(self.bound_s, 1e-3)


def exponent_of(costs: Mapping[int, float]) -> float:
    """Return the slope between two sizes, in logarithms."""
    (few, low), (many, high) = costs.items()
    return math.log(max(high, 1e-3) / max(low, 1e-3)) / math.log(many / few)


def write_steps(path: Path, num_steps: int) -> None:
    write_scripted_record(path, num_steps, num_rows=8)


def write_two_records(path: Path, num_steps: int) -> None:
    """Write a record and a copy whose last step has other rewards."""
    path.mkdir()
    write_steps(path / "a", num_steps)
    shutil.copytree(path / "a", path / "b")


def write_rows(path: Path, num_rows: int, tokens_of_row: int = 40) -> None:
    """Write a record with text, of steps of a thousand rows."""
    rng = np.random.default_rng(num_rows)
    with Recorder(path, config={"seed": 1}, queue_steps=0) as recorder:
        for step, first in enumerate(range(0, num_rows, ROWS_OF_STEP)):
            rows = range(first, min(num_rows, first + ROWS_OF_STEP))
            recorder.step(step, [sample_of(row, tokens_of_row, rng) for row in rows])


def sample_of(row: int, num_tokens: int, rng: np.random.Generator) -> dict[str, object]:
    return {
        "tokens": rng.integers(0, 32_000, num_tokens, np.int32),
        "logprobs": -rng.random(num_tokens, np.float32),
        "prompt_length": num_tokens // 2,
        "reward": float(row % 2),
        "group": row // 4,
        "finish_reason": "stop",
        "prompt": f"What is {row} + {row}? Answer with a number.",
        "completion": f"The answer is {row * 2 if row % 2 else row}.",
    }


def metrics_of(step: int) -> dict[str, float]:
    noise = math.sin(step * 12.9898)
    rise = step / (step + 100)
    return {
        "reward": 0.2 + 0.5 * rise + 0.02 * noise, "loss": 0.1 + 0.01 * noise, "grad_norm": 0.5 + 0.05 * noise,
        "entropy": 0.8 - 0.2 * rise + 0.01 * noise, "kl": 0.01 + 0.001 * noise, "clip_ratio": 0.02 + 0.002 * noise,
        "response_length": 200 + 5 * noise, "learning_rate": 1e-6,
    }  # fmt: skip


def write_stats(path: Path, num_rows: int) -> None:
    path.mkdir()
    with open(path / "stats.jsonl", "w") as file:
        file.writelines(json.dumps({"step": step, **metrics_of(step)}) + "\n" for step in range(num_rows))


def protobuf(number: int, value: bytes) -> bytes:
    """Return a field of bytes of a protobuf message."""
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(number: int) -> bytes:
    low = number & 127
    return bytes([low]) if number < 128 else bytes([low | 128]) + varint(number >> 7)


def write_events(path: Path, num_rows: int) -> None:
    """Write an event file of TensorBoard: an event with one scalar for each metric of a step."""
    path.mkdir()
    with open(path / "events.out.tfevents.1.host", "wb") as file:
        for step in range(num_rows):
            for name, value in metrics_of(step).items():
                scalar = protobuf(1, protobuf(1, name.encode()) + b"\x15" + struct.pack("<f", value))
                event = b"\x09" + struct.pack("<d", step) + b"\x10" + varint(step) + protobuf(5, scalar)
                length = struct.pack("<Q", len(event))
                file.write(length + struct.pack("<I", masked_checksum(length)) + event)
                file.write(struct.pack("<I", masked_checksum(event)))


def write_wandb(path: Path, num_rows: int) -> None:
    """Write the file of an offline run: a log of LevelDB with one record for each step."""
    path.mkdir()
    data = bytearray(b":W&B\xe1\xbe\x00")
    for step in range(num_rows):
        items = [protobuf(1, protobuf(2, name.encode()) + protobuf(16, repr(value).encode()))
                 for name, value in metrics_of(step).items()]  # fmt: skip
        record, is_first = protobuf(2, b"".join(items) + protobuf(2, b"\x08" + varint(step))), True
        while record:
            rest = BLOCK_BYTES - len(data) % BLOCK_BYTES - FRAGMENT.size
            if rest < 0:
                data += bytes(rest + FRAGMENT.size)
                continue
            piece, record = record[:rest], record[rest:]
            kind = (FIRST if is_first else MIDDLE) if record else (FULL if is_first else LAST)
            data += FRAGMENT.pack(zlib.crc32(piece, zlib.crc32(bytes([kind]))), len(piece), kind) + piece
            is_first = False
    (path / "run-growth.wandb").write_bytes(data)


def write_console(path: Path, num_rows: int) -> None:
    path.mkdir()
    with open(path / "train.log", "w") as file:
        for step in range(num_rows):
            values = " - ".join(f"{name}:{value:.5g}" for name, value in metrics_of(step).items())
            file.write(f"(TaskRunner pid=7) step:{step} - {values}\n")


def write_trace(path: Path, num_ranks: int) -> None:
    """Write the trace of four steps on each rank."""
    path.mkdir()

    def span(name: str, kind: str, at: float, seconds: float, **args: object) -> dict[str, object]:
        facts = {"ph": "X", "name": name, "cat": kind, "ts": 1e6 * at, "dur": 1e6 * seconds, "tid": 0}
        return {**facts, "args": args}

    lines: list[dict[str, object]] = []
    for at in range(0, 40, 10):
        lines += [span("rollout", "stage", at, 1), span("train_step", "stage", at + 1, 0.5)]
        batch = span("batch", "batch", at + 1, 0, step=at // 10, version=at, prompts=[at], tokens=9)
        lines += [batch | {"ph": "i"}, span("step", "stage", at, 2)]
        for sample in range(4):
            facts = {"prompt_id": at, "sample_id": sample, "status": "accepted", "tokens": 10}
            lines.append(span(f"episode {at}.{sample}", "episode", at, 1, **facts) | {"tid": 1 + sample})
    body = "".join(json.dumps(line) + "\n" for line in lines)
    for rank in range(num_ranks):
        args = {"rank": rank, "world_size": num_ranks, "host": "n", "pid": rank, "start_ns": 10**18}
        head = json.dumps({"ph": "M", "name": "areal_trace_rank", "args": args | {"batch_size": 1}})
        (path / f"rank-{rank:05}.jsonl").write_text(f"{head}\n{body}")


def write_flight_recorder(path: Path, num_ranks: int) -> None:
    """Write the dumps of all ranks, each with 100 collectives; the last rank is one behind."""
    path.mkdir()
    dump = pickle.loads(flight_recorder_dump(0, num_ranks, 100))
    ahead, behind = pickle.dumps(dump), pickle.dumps(dump | {"entries": dump["entries"][:-1]})
    for rank in range(num_ranks):
        (path / f"nccl_trace_rank_{rank}").write_bytes(behind if rank == num_ranks - 1 else ahead)


WATCHDOG = (
    "[rank{rank}]:[E101 00:10:00.0 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={number}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for "
    "600029 milliseconds before timing out.\n"
)


def write_log(path: Path, num_lines: int) -> None:
    """Write the log of eight ranks whose last lines are those of a watchdog."""
    with open(path, "w") as file:
        for line in range(num_lines):
            clock = f"2026-01-01 00:00:{line % 60:02},{line % 1000:03}"
            file.write(f"[rank{line % 8}]: {clock} INFO step {line // 8} loss 0.1{line}\n")
        for rank in range(8):
            file.write(WATCHDOG.format(rank=rank, number=90 + (rank == 3)))


def write_stacks(path: Path, num_ranks: int) -> None:
    """Write one text with what py-spy prints for each rank; rank 0 reads data."""
    with open(path, "w") as file:
        for rank in range(num_ranks):
            file.write(f"rank {rank}:\n")
            for thread in threads_of(rank, rank == 0, random.Random(rank))[:3]:
                file.write(f'Thread {thread["os_thread_id"]} (idle): "{thread["thread_name"]}"\n')
                for frame in thread["frames"]:
                    file.write(f"    {frame['name']} ({frame['filename']}:{frame['line']})\n")
            file.write("\n")


def write_evaluations(path: Path, num_prompts: int) -> None:
    """Write two evaluations of one sample a prompt."""
    sampling = {"greedy": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 64}
    summary = {"rows": "valid", "num_rows": num_prompts, "n_samples": 1, "sampling": sampling}
    same = {"sample_id": 0, "num_sampled": 10, "finish_reason": "stop", "completion": "!"}
    for number, name in enumerate(("before", "after")):
        folder = path / name / "evaluation"
        folder.mkdir(parents=True)
        with open(folder / "samples-0.jsonl", "w") as file:
            for prompt in range(num_prompts):
                reward = float(hash((prompt, number)) % 3 > 0)
                file.write(json.dumps({"prompt_id": prompt, "reward": reward, "prompt": "?", **same}) + "\n")
        model = {"path": name, "version": 0, "file": "samples-0.jsonl", "seconds": 2.0}
        (folder / "evaluation.json").write_text(json.dumps(summary | {"models": [model]}))


def write_run(path: Path, num_steps: int) -> None:
    """Write a run with a record, and metrics of as many steps."""
    path.mkdir()
    write_steps(path / "record", num_steps)
    write_stats(path / "logs", num_steps)


def write_reward(path: Path, num_rows: int) -> None:
    path.mkdir()
    write_rows(path / "record", num_rows)
    code = "def score(prompt, completion, *ids, **facts):\n    return float(completion.endswith('.'))\n"
    (path / "score.py").write_text(code)


Command = Callable[[Path, Path], Sequence[object]]
OUT = object()  # stands for a path that does not exist


def verb(*words: object) -> Command:
    """Return a command on an input, which the empty string stands for."""
    return lambda path, out: (*VERB, *({"": path, OUT: out / "new"}.get(word, word) for word in words))


def export(name: str, file: str) -> Command:
    return lambda path, out: verb("record", "export", "", "--format", name, "--to", out / file)(path, out)


def of_input(*words: str, below: Sequence[str]) -> Command:
    return lambda path, out: (*VERB, *words, *(f"{path}/{name}" for name in below))


SQL = "select step, avg(reward) from samples group by step"
CASES = [
    Case("record ls", (STEPS, "steps"), write_steps, verb("record", "ls", "")),
    Case("record verify", (STEPS, "steps"), write_steps, verb("record", "verify", "")),
    Case("record archive", (STEPS, "steps"), write_steps, verb("record", "archive", "", "--to", OUT)),
    Case("record redact", (STEPS, "steps"), write_steps, verb("record", "redact", "", "--to", OUT, "--without-text")),
    Case("record seam", (STEPS, "steps"), write_steps, verb("record", "seam", "", "--at", 1)),
    Case("query", (STEPS, "steps"), write_steps, verb("query", "", SQL)),
    Case("doctor on a record", (STEPS, "steps"), write_steps, verb("doctor", "")),
    Case("why", (STEPS, "steps"), write_two_records, of_input("why", "--no-replay", below="ab")),
    Case("open RUN -o", (STEPS, "steps"), write_run, verb("open", "", "-o", OUT)),
    Case("open RECORD -o", (STEPS, "steps"), write_steps, verb("open", "", "--step", 0, "-o", OUT)),
    Case("open --all-steps -o", (STEPS, "steps"), write_steps, verb("open", "", "--all-steps", "-o", OUT)),
    Case("export jsonl", (ROWS, "rows"), write_rows, export("jsonl", "rows.jsonl")),
    Case("export parquet", (ROWS, "rows"), write_rows, export("parquet", "rows.parquet")),
    Case("export slime", (ROWS, "rows"), write_rows, export("slime", "rollout_{step}.pt")),
    Case("export pt", (ROWS, "rows"), write_rows, export("pt", "step_{step}.pt")),
    Case("reward rescore", (ROWS, "rows"), write_reward, of_input("reward", "rescore", below=("record", "score.py:score"))),
    Case("doctor on stats.jsonl", (1_000_000, "rows"), write_stats, verb("doctor", "")),
    Case("doctor on tfevents", (ROWS, "rows"), write_events, verb("doctor", "")),
    Case("doctor on W&B", (ROWS, "rows"), write_wandb, verb("doctor", "")),
    Case("doctor on a log", (ROWS, "rows"), write_console, verb("doctor", "")),
    Case("trace", (4_096, "ranks"), write_trace, verb("trace", "")),
    Case("hang: Flight Recorder", (4_096, "ranks"), write_flight_recorder, verb("hang", "diagnose", "")),
    Case("hang: a log", (1_000_000, "lines"), write_log, verb("hang", "diagnose", "")),
    Case("hang: stacks as text", (100_000, "ranks"), write_stacks, verb("hang", "diagnose", "")),
    Case("eval --compare", (100_000, "prompts"), write_evaluations, of_input("eval", "--compare", below=("before", "after"))),
]  # fmt: skip

FOREGROUND = """
import sys, time
import numpy as np
from benchmarks.growth import sample_of
from recorder.trainers.recorder import Recorder
rng, rows = np.random.default_rng(0), int(sys.argv[2])
samples = [sample_of(row, 1000, rng) for row in range(rows)]
with Recorder(sys.argv[1], config={}) as recorder:
    begin = time.thread_time()
    recorder.step(0, samples)
    print(time.thread_time() - begin)
    begin = time.thread_time()
    copies = [{name: getattr(value, "copy", str)() for name, value in one.items()} for one in samples]
    print(time.thread_time() - begin)
"""
TEST = """
import pytest

@pytest.mark.parametrize("last", [0, 1, 2])
@pytest.mark.replay("{record}")
def test_it(replay_record, last):
    assert replay_record(steps=(0, last)).identical
"""


def measured(command: Sequence[object], folder: Path = ROOT, **environment: str) -> Cost:
    """Run Python with arguments. Raises RuntimeError with the output of a run that fails."""
    arguments = [sys.executable, *map(str, command)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", **environment}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(arguments, cwd=folder, stdout=output, stderr=output, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if process.returncode not in (0, 1, 2) or "Error: " in text or "Traceback" in text:
        raise RuntimeError(f"{' '.join(arguments)} ended with {process.returncode}:\n{text[-3000:]}")
    return Cost(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def read_and_check(path: Path) -> None:
    """Read every file below a path, in blocks, and compute its checksum."""
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        if file.is_file():
            with open(file, "rb") as opened:
                deque(map(crc32c, iter(lambda: opened.read(1 << 20), b"")), maxlen=0)


def measure(case: Case, folder: Path, sizes: Sequence[float]) -> Row:
    """Measure a case at all sizes, and with next to no items."""
    costs, bound_s = dict[int, Cost](), 0.0
    for size in (0, *sizes):
        items = max(FEWEST + (size > 0), round(case.items[0] * size))
        place = folder / f"{case.make.__name__}-{items}"  # several cases have the same input
        source, out = place / "input", place / case.name.replace("/", "")
        out.mkdir(parents=True)
        if not source.exists():
            in_fork(lambda source=source, items=items: case.make(source, items))
        costs[items] = measured(case.command(source, out))
        bound_s = cpu_seconds(lambda source=source: read_and_check(source))
        shutil.rmtree(out)
    start = costs.pop(FEWEST)
    return Row(case, start, costs, bound_s)


def in_fork(work: Callable[[], object]) -> tuple[int, Cost]:
    """Run in a fork of this process, whose memory stays small; return exit code and cost."""
    pid = os.fork()
    if pid == 0:
        code: object = 1
        try:
            work()
            code = 0
        except SystemExit as end:
            code = end.code
        finally:
            os._exit(code if isinstance(code, int) else 1)
    _, status, used = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), Cost(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def measured_in_fork(command: Sequence[object]) -> Cost:
    """Run a verb in a fork of this process, which has imported what it needs: for tests."""

    def run() -> None:
        from areal_debug.cli import main as cli

        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        cli([str(argument) for argument in command[len(VERB) :]])

    code, cost = in_fork(run)
    if code not in (0, 1, 2):
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {code}")
    return cost


def foreground(folder: Path, num_tokens: int) -> tuple[float, float]:
    """CPU seconds of `Recorder.step` in the trainer's thread, and of a copy of what it is given."""
    command = [sys.executable, "-c", FOREGROUND, str(folder / "record"), str(num_tokens // 1000)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    shutil.rmtree(folder / "record")
    step_s, copy_s = map(float, done.stdout.split())
    return step_s, copy_s


def starts(folder: Path) -> Iterator[tuple[str, Cost]]:
    """Yield the cost of verbs that need torch on a record of three steps of a tiny model."""
    yield "import torch", measured(["-c", "import torch"])
    yield (
        "import torch and a model of Transformers",
        measured(["-c", "from transformers import LlamaForCausalLM"]),
    )
    model, record = make_tiny_model(folder / "model"), folder / "record"
    options = [
        "--config",
        ROOT / "tests/debug/tiny.yaml",
        f"actor.path={model}",
        f"cluster.fileroot={folder / 'runs'}",
    ]
    script = ROOT / "tests/debug/train_tiny.py"
    measured(
        (*VERB, "train", script, *options, "--dump-rollout", record), folder=folder, PYTHONPATH=str(ROOT)
    )
    (folder / "test_it.py").write_text(TEST.format(record=record))
    commands = {name: (*VERB, name, record) for name in ("replay", "crosscheck", "consistency")}
    commands["pytest, 3 tests"] = ("-m", "pytest", "-q", "-p", "areal_debug.pytest_plugin", "test_it.py")
    for name, command in commands.items():
        yield name, measured(command, folder=folder, PYTHONPATH=str(ROOT))


def seconds(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def line_of(row: Row) -> str:
    costs = sorted(row.costs.items())
    cells = [row.case.name, f"{costs[-1][0]:,} {row.case.items[1]}", seconds(row.start.cpu_s)]
    cells.append(" / ".join(seconds(cost.cpu_s) for _, cost in costs))
    cells.append(f"{costs[-1][1].peak_mib:,.0f}")
    cells.append("-" if row.exponent is None else f"{row.exponent:.2f}")
    cells += [f"{row.bound_s:.2f}", f"{row.ratio:,.0f}"]
    return f"| {' | '.join(cells)} |"


HEAD = (
    "| verb | largest input | CPU s without input | CPU s by size | peak MiB | exponent | bound, CPU s | of the bound |\n"
    "|---|---|---|---|---|---|---|---|"
)
INTRODUCTION = """# How cost grows

`python -m benchmarks.growth --write` writes this page. Each verb runs on inputs of several sizes:
the largest is in the second column, the others are {sizes} of it. Times are CPU seconds of
the process and its children, peak memory is that of the largest of them. The exponent is the slope
between the two largest sizes of the cost beyond that of next to no input: 1 is linear, and
`tests/debug/test_growth.py` fails above {largest}. The bound is reading and checking the same bytes;
the last column is the cost beyond the start by that of the bound.

Machine: {machine}.
"""


def rest_of_page(folder: Path, num_tokens: int) -> Iterator[str]:
    """Yield the lines below the table."""
    step_s, copy_s = foreground(folder, num_tokens)
    yield f"\n`Recorder.step` of {num_tokens:,} tokens in the background: {step_s:.2f} CPU s in the trainer's"
    yield f"thread; a copy of what it is given: {copy_s:.2f}.\n"
    yield "Starts of verbs that need torch, on three steps of a tiny model:\n"
    yield "| verb | CPU s | peak MiB |\n|---|---|---|"
    for name, cost in starts(folder):
        yield f"| {name} | {seconds(cost.cpu_s)} | {cost.peak_mib:,.0f} |"


def main() -> None:
    options = read_options(__doc__, sizes=[0.01, 0.1, 1.0], only=[""], write=False)
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder, largest = Path(name), max(options.sizes)
        chosen = [case for case in CASES if case.name.startswith(tuple(options.only))]
        table = (line_of(measure(case, folder, options.sizes)) for case in chosen)
        for line in chain(
            [HEAD], table, rest_of_page(folder, round(1e7 * largest)) if options.only == [""] else ()
        ):
            print(line, flush=True)
            lines.append(line)
    if options.write:
        sizes = " and ".join(f"{size / largest:.2g}" for size in sorted(options.sizes)[:-1])
        machine = f"{os.cpu_count()} cores, Python {sys.version.split()[0]}"
        PAGE.parent.mkdir(exist_ok=True)
        page = INTRODUCTION.format(sizes=sizes, largest=LARGEST_EXPONENT, machine=machine)
        PAGE.write_text("\n".join([page, *lines, ""]))


if __name__ == "__main__":
    main()
