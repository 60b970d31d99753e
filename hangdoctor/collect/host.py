"""Collect one host: find the job, dump every process a few times in parallel, save facts with the
dumps.

    find_job ─> sample 0 ─(interval)─> sample 1 ... ─> surroundings ─> collection.json (comes last)
                   └ thread pool: each thread waits for one py-spy, and a time-out unblocks it
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from areal_core.safety.secrets import Masker, masker, secret_values
from hangdoctor.collect import evidence, pyspy
from hangdoctor.collect.discover import Job, Search, Target, find_job
from hangdoctor.collect.evidence import source_lines
from hangdoctor.collect.process import process_table, read_facts
from hangdoctor.collect.pyspy import Options, Outcome, dump_target
from hangdoctor.collect.write import (
    HostEntry,
    Manifest,
    ProcessEntry,
    gone_rank,
    write_json,
    write_manifest,
    write_text,
)

PARALLEL_DUMPS = 4 * (os.cpu_count() or 1)


def collect_host(search: Search, folder: Path, options: Options) -> Manifest:
    """Write a collection of the job that `search` finds on this host.

    Args:
        search: the processes to look at.
        folder: of the collection (COLLECTION.md).
        options: number of stack dumps, the time between them, and others.

    Returns:
        The content of collection.json.

    Raises:
        PySpyMissing: there is no py-spy.
        NoRanksFound: no process looks like a rank.
        SeveralJobs: more than one job was found.
    """
    tool = pyspy.find_pyspy()
    job = find_job(search, process_table())
    mask = masker()
    for target in job.targets:  # a log may show the secrets of another process
        mask.learn(secret_values(target.process.environment or {}))
    commands = {target.name: " ".join(mask.command(target.process.command)) for target in job.targets}
    outcomes: list[dict[str, Outcome]] = []
    times: list[float] = []
    with ThreadPoolExecutor(PARALLEL_DUMPS) as pool:
        for sample in range(options.num_samples):
            if sample:
                time.sleep(options.interval_s)
            times.append(time.time())
            one = partial(dump_target, tool=tool, folder=folder, sample=sample, options=options, mask=mask)
            outcomes.append(
                dict(zip([target.name for target in job.targets], pool.map(one, job.targets), strict=True))
            )
            if cards := evidence.gpus():
                write_json(folder / f"gpu/{sample}/{options.host}.json", [asdict(card) for card in cards])
        list(pool.map(partial(_keep_source, folder=folder, mask=mask), job.targets))
        list(pool.map(partial(_surroundings, folder=folder, options=options, mask=mask), job.targets))
    ras = evidence.nccl_ras()
    if ras is not None:
        write_text(folder / f"ras/{options.host}.txt", mask.text(ras))
    manifest = _manifest(job, outcomes, commands, times, options.host, mask.count)
    write_manifest(folder, manifest)
    return manifest


def _keep_source(target: Target, folder: Path, mask: Masker) -> None:
    dumps = sorted(folder.glob(f"samples/*/{target.name}.json"))
    if dumps:
        write_json(
            folder / f"source/{target.name}.json", mask.tree(source_lines(path.read_text() for path in dumps))
        )


def _surroundings(target: Target, folder: Path, options: Options, mask: Masker) -> None:
    """Save environment, log tail, error files and Flight Recorder dump of one rank; children share
    those of their rank.
    """
    if target.role == "child":
        return
    environment = target.process.environment or {}
    if target.role != "launcher":
        variables = mask.tree(evidence.selected_environment(environment))
        write_json(folder / f"env/{target.name}.json", variables)
    tail = evidence.log_tail(target.pid, options.log_lines)
    if tail is not None:
        write_text(folder / f"logs/{target.name}.log", mask.text(tail))
    if target.role != "trainer" or target.rank is None:
        return
    for rank, text in evidence.error_files(environment).items():
        write_text(folder / f"errors/rank_{rank}.json", mask.document(text))
    started = read_facts(target.pid).start_time or 0.0
    recorded = evidence.flight_recorder_dump(target.rank, environment, started, target.process.uid)
    if recorded is not None:
        path = folder / f"fr/{target.name}.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(recorded)


def _manifest(
    job: Job,
    outcomes: list[dict[str, Outcome]],
    commands: dict[str, str],
    times: list[float],
    host: str,
    num_masked: int,
) -> Manifest:
    found = [
        _entry(target, [sample[target.name] for sample in outcomes], commands[target.name], host)
        for target in job.targets
    ]
    gone = [gone_rank(rank, host, "no process on this host claims this rank") for rank in job.gone]
    return Manifest(
        times[0], job.world_size, job.elsewhere, (HostEntry(host),), tuple(times), (*found, *gone), num_masked
    )


def _entry(target: Target, outcomes: list[Outcome], command: str, host: str) -> ProcessEntry:
    """Return the status of a process over all samples: stopped in the last one, else dumped if any
    sample was.
    """
    last = outcomes[-1]
    dumped = any(outcome.status == "dumped" for outcome in outcomes)
    status = "dumped" if dumped and last.status != "stopped" else last.status
    return ProcessEntry(
        target.name, target.rank, target.role, host, target.pid, target.parent, status, last.detail, command
    )
