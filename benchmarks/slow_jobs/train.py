"""A tiny DDP job that one cause slows down, named with its rank in the file SLOW_FOLDER/cause.

A step loads a batch, copies it, runs forward and backward of a DDP model and its optimizer; the
causes add about SLOW_S to it at one place of one rank (or of one rank after the other). The times
are sleeps inside the usual calls, so that many ranks fit on two cores. Each step starts with the
cause that rank 0 reads, so that one job serves for many causes.
"""

import gc
import io
import itertools
import json
import mmap
import os
import random
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, get_worker_info

FOLDER = Path(os.environ["SLOW_FOLDER"])
ENGINES = [int(port) for port in os.environ.get("SLOW_ENGINES", "").split(",") if port]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
INPUT_S, COPY_S, FORWARD_S, BACKWARD_S, OPTIMIZER_S = 0.04, 0.02, 0.1, 0.1, 0.03
SLOW_S = 0.6
NUM_TOKENS, LONG = 4, 16
NUM_OBJECTS = 250_000
FILE_BYTES, PAGE_BYTES = 64 << 20, 4096


@dataclass(frozen=True)
class Cause:
    """What slows which rank; the rank is -1 where it is none or another in each step."""

    name: str
    rank: int


def read_cause() -> Cause:
    """Return the cause that the benchmark has written."""
    name, rank = (FOLDER / "cause").read_text().split()
    return Cause(name, int(rank))


chosen = read_cause()


def slow(name: str) -> float:
    """Return the seconds that this cause adds on this rank; loader workers read it themselves."""
    cause = read_cause() if get_worker_info() else chosen
    return SLOW_S if cause == Cause(name, RANK) else 0.0


class Samples(Dataset):
    """Random rows; the time of each is that of a small file."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(INPUT_S + slow("dataset") + slow("loader_worker"))
        if slow("remote_storage"):
            body = json.dumps({"tokens": LONG}).encode()
            request = urllib.request.Request(f"http://127.0.0.1:{ENGINES[0]}/shard", body)
            urllib.request.urlopen(request).read()
        if chosen.name == "healthy_input_bound":
            time.sleep(SLOW_S)
        return torch.ones(8)


class Batch:
    """A batch that takes its time to be copied, as pageable memory does."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def to(self, device: str) -> Tensor:
        time.sleep(COPY_S + slow("copy_to_device"))
        return self.rows.to(device)


class Timed(torch.autograd.Function):
    """The identity; its backward takes as long as that of a layer."""

    @staticmethod
    def forward(_, rows: Tensor) -> Tensor:
        return rows.clone()

    @staticmethod
    def backward(_, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD_S + slow("slow_device") / 2)
        return gradient


class Model(nn.Module):
    """One layer, and the time of many."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, rows: Tensor) -> Tensor:
        jitter = random.random() if chosen.name == "healthy_uneven" else 0.0
        time.sleep(FORWARD_S * (1 + jitter) + slow("forward") + slow("slow_device") / 2)
        return Timed.apply(self.layer(rows))


class Sgd(torch.optim.SGD):
    """SGD that takes the time of a large model."""

    def step(self, closure: None = None) -> None:
        time.sleep(OPTIMIZER_S + slow("optimizer"))
        super().step(closure)


class SlowDisk(io.BytesIO):
    """A file on a slow file system."""

    def write(self, data: bytes) -> int:
        time.sleep(SLOW_S / 6)
        return super().write(data)


class Node:
    """An object in a cycle with itself, which only the collector frees."""

    def __init__(self) -> None:
        self.itself = self


def after_backward(_: Tensor) -> None:
    """Compress the gradient, as communication hooks do."""
    time.sleep(slow("backward_hook"))


def evaluate(model: nn.Module, rows: Tensor) -> None:
    """Run some forward passes on one rank."""
    with torch.no_grad():
        for _ in range(6):
            model(rows)


def compute_reward(answers: list[str]) -> list[float]:
    """Return a score per answer; a slow verifier needs its time."""
    time.sleep(slow("reward"))
    return [float(len(answer)) for answer in answers]


def build_cache() -> list[Node]:
    """Return many new objects: Python's collector starts several times meanwhile."""
    return [Node() for _ in range(NUM_OBJECTS)]


def read_rows(table: mmap.mmap) -> int:
    """Return the sum of a byte of many pages, which are in no memory: each is a page fault."""
    table.madvise(mmap.MADV_DONTNEED)
    with (FOLDER / "table").open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    end, total = time.monotonic() + SLOW_S, 0
    while time.monotonic() < end:
        total += table[random.randrange(FILE_BYTES // PAGE_BYTES) * PAGE_BYTES]
    return total


def collect_for(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        gc.collect()


def export_metrics(numbers: list[float]) -> None:
    """Serialise many numbers in C, which holds the GIL for long, while that is the cause."""
    while slow("gil"):
        json.dumps(numbers)


def stop_this_process() -> subprocess.Popen[bytes]:
    """Let another process stop this one half of the time, as a freezer does."""
    loop = f"while kill -STOP {os.getpid()}; do sleep 0.6; kill -CONT {os.getpid()}; sleep 0.5; done"
    return subprocess.Popen(["/bin/sh", "-c", loop])


def generate_rollouts(connection: HTTPConnection, step: int) -> None:
    """Request one answer; the long one is that of one rank, or of one rank after the other."""
    is_long = chosen == Cause("long_prompt", RANK) or (
        chosen.name == "long_prompts_in_turn" and step % WORLD == RANK
    )
    num_tokens = LONG if is_long else NUM_TOKENS
    connection.request("POST", "/generate", json.dumps({"tokens": num_tokens}))
    connection.getresponse().read()


@contextmanager
def prepared() -> Iterator[list[object]]:
    """Yield what the current cause needs to stay alive: heaps, files; end its processes."""
    if "garbage" in chosen.name:
        yield [[Node() for _ in range(NUM_OBJECTS)]]
    elif slow("page_faults"):
        with (FOLDER / "table").open("wb") as file:
            file.write(os.urandom(FILE_BYTES))
            os.fsync(file.fileno())
        with (FOLDER / "table").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as table:
            table.madvise(mmap.MADV_RANDOM)
            yield [table]
    elif slow("gil"):
        numbers = [random.random() for _ in range(600_000)]
        threading.Thread(target=export_metrics, args=(numbers,), daemon=True).start()
        yield []
    elif slow("stopped"):
        stopper = stop_this_process()
        yield []
        stopper.kill()
        stopper.wait()
    else:
        yield []


def extra_work(step: int, kept: list[object], model: nn.Module, rows: Tensor) -> None:
    """Do what the cause adds outside the usual calls of a step."""
    if slow("collect_garbage") or (chosen.name == "garbage_in_turn" and step % WORLD == RANK):
        collect_for(SLOW_S)
    if slow("automatic_garbage"):
        kept[1:] = [build_cache()]
    if slow("page_faults"):
        read_rows(kept[0])
    if slow("evaluation"):
        evaluate(model.module, rows)
    if slow("checkpoint"):
        torch.save(model.module.state_dict(), SlowDisk())
    if chosen.name == "reward":
        compute_reward(["yes", "no"])
    if chosen.name == "healthy_communication":
        dist.all_reduce(torch.ones(1 << 21))


def next_cause() -> Cause:
    """Return the cause of this step, which rank 0 reads for all."""
    cause = [read_cause() if RANK == 0 else None]
    dist.broadcast_object_list(cause)
    return cause[0]


def train() -> None:
    global chosen
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Model())
    model.module.layer.weight.register_hook(after_backward)
    optimizer = Sgd(model.parameters(), lr=0.01)
    connection = HTTPConnection("127.0.0.1", ENGINES[RANK % len(ENGINES)]) if ENGINES else None
    num_workers = int(os.environ["SLOW_WORKERS"])
    batches = iter(DataLoader(Samples(), batch_size=1, num_workers=num_workers))
    while True:
        with prepared() as kept:
            for step in itertools.count():
                if (cause := next_cause()) != chosen:
                    break
                rows = Batch(next(batches)).to("cpu")
                if connection and chosen.name != "remote_storage":
                    generate_rollouts(connection, step)
                extra_work(step, kept, model, rows)
                model(rows).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    (FOLDER / f"ready-{chosen.name}-{RANK}").touch()
        chosen = cause


train()
