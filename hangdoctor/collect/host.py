"""All of one host: find the job, dump every process a few times in parallel, keep the facts beside the dumps.

find_job ─> sample 0 ─(interval)─> sample 1 ... ─> surroundings ─> collection.json (last: the folder is whole)
               └ thread pool: each thread waits for one py-spy, and a time-out unblocks it
"""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hangdoctor.collect import evidence, pyspy
from hangdoctor.collect.discover import Job, Search, Target, find_job
from hangdoctor.collect.layout import (
    HostEntry,
    Manifest,
    ProcessEntry,
    write_json,
    write_manifest,
    write_text,
)
from hangdoctor.collect.permission import explain_refusal, look_at_access
from hangdoctor.collect.process import process_table, read_facts, read_stat
from hangdoctor.collect.source import source_lines

PARALLEL_DUMPS = 4 * (os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Options:
    """How to collect. Times in seconds; `timeout_s` is for one dump of one process."""

    num_samples: int = 2
    interval_s: float = 3.0
    timeout_s: float = 10.0
    native: bool = False
    log_lines: int = 200
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of dumping one target in one sample."""

    status: str
    detail: str


def collect_host(search: Search, folder: Path, options: Options) -> Manifest:
    """Write a collection of the job that `search` finds on this host.

    Raises:
        HangInputError: there is no py-spy, no rank, or more than one job (its subclasses in `errors`).
    """
    tool = pyspy.find_pyspy()
    job = find_job(search, process_table())
    outcomes: list[dict[str, Outcome]] = []
    times: list[float] = []
    with ThreadPoolExecutor(PARALLEL_DUMPS) as pool:
        for sample in range(options.num_samples):
            if sample:
                time.sleep(options.interval_s)
            times.append(time.time())
            one = partial(_dump_target, tool=tool, folder=folder, sample=sample, options=options)
            outcomes.append(
                dict(zip([target.name for target in job.targets], pool.map(one, job.targets), strict=True))
            )
            _keep(folder / f"gpu/{sample}/{options.host}.json", evidence.gpus())
        list(pool.map(partial(_keep_source, folder=folder), job.targets))
        list(pool.map(partial(_surroundings, folder=folder, options=options), job.targets))
    ras = evidence.nccl_ras()
    if ras is not None:
        write_text(folder / f"ras/{options.host}.txt", ras)
    manifest = _manifest(job, outcomes, times, options.host)
    write_manifest(folder, manifest)
    return manifest


def _dump_target(target: Target, tool: str, folder: Path, sample: int, options: Options) -> Outcome:
    """One process in one sample: /proc facts first (py-spy's own reading costs the target nothing they would show)."""
    place = folder / f"samples/{sample}/{target.name}"
    stat = read_stat(target.pid)
    if stat is None or stat.state in "ZX":
        return Outcome("gone", f"pid {target.pid} ended before sample {sample}")
    write_json(folder / f"proc/{sample}/{target.name}.json", read_facts(target.pid))
    if not target.process.is_python and target.role == "child":
        return Outcome("not_python", f"{target.process.executable} is no Python")
    done = pyspy.dump(tool, target.pid, options.timeout_s)
    if done.status != "dumped":
        write_text(place.with_name(f"{target.name}.error.txt"), done.complaint or done.detail)
    else:
        write_text(place.with_name(f"{target.name}.json"), done.output)
        if options.native and stat.state != "T":
            _second_pass(target, tool, place, options)
    if stat.state in "Tt":
        return Outcome("stopped", f"pid {target.pid} is stopped (state {stat.state}): SIGCONT would wake it")
    if done.status == "not_permitted":
        return Outcome(done.status, explain_refusal(look_at_access(target.process.uid)))
    return Outcome(done.status, done.detail)


def _second_pass(target: Target, tool: str, place: Path, options: Options) -> None:
    """Native frames, which py-spy cannot give together with JSON; a failure leaves its words, the first pass stands."""
    done = pyspy.dump(tool, target.pid, options.timeout_s, native=True)
    ending = "native.txt" if done.status == "dumped" else "native.error.txt"
    write_text(
        place.with_name(f"{target.name}.{ending}"), done.output if done.status == "dumped" else done.complaint
    )


def _keep_source(target: Target, folder: Path) -> None:
    """The lines that its stacks point at, over all samples."""
    dumps = sorted(folder.glob(f"samples/*/{target.name}.json"))
    if dumps:
        write_json(folder / f"source/{target.name}.json", source_lines(path.read_text() for path in dumps))


def _surroundings(target: Target, folder: Path, options: Options) -> None:
    """Environment, log tail, error files and Flight Recorder of one rank; children only share them."""
    if target.role == "child":
        return
    environment = target.process.environment or {}
    if target.role != "launcher":
        write_json(folder / f"env/{target.name}.json", evidence.selected_environment(environment))
    tail = evidence.log_tail(target.pid, options.log_lines)
    if tail is not None:
        write_text(folder / f"logs/{target.name}.log", tail)
    if target.role != "trainer" or target.rank is None:
        return
    for rank, text in evidence.error_files(environment).items():
        write_text(folder / f"errors/rank_{rank}.json", text)
    started = read_facts(target.pid)["start_time"]
    recorded = evidence.flight_recorder_dump(
        target.rank, environment, started if isinstance(started, float) else 0.0
    )
    if recorded is not None:
        path = folder / f"fr/{target.name}.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(recorded)


def _keep(path: Path, value: object) -> None:
    if value is not None:
        write_json(path, value)


def _manifest(job: Job, outcomes: list[dict[str, Outcome]], times: list[float], host: str) -> Manifest:
    found = [_entry(target, [sample[target.name] for sample in outcomes], host) for target in job.targets]
    absent = [
        ProcessEntry(
            f"rank_{rank.rank}",
            rank.rank,
            "trainer",
            host if rank.status == "gone" else "",
            None,
            None,
            rank.status,
            rank.detail,
            "",
        )
        for rank in job.absent
    ]
    return Manifest(times[0], job.world_size, (HostEntry(host),), tuple(times), (*found, *absent))


def _entry(target: Target, outcomes: list[Outcome], host: str) -> ProcessEntry:
    """The status of a process over all samples: stopped in the last one, else dumped once is dumped."""
    last = outcomes[-1]
    dumped = any(outcome.status == "dumped" for outcome in outcomes)
    status = "dumped" if dumped and last.status != "stopped" else last.status
    command = " ".join(target.process.command)
    return ProcessEntry(
        target.name, target.rank, target.role, host, target.pid, target.parent, status, last.detail, command
    )
