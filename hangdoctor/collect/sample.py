"""Dump one process in one sample: /proc facts, then its stacks, and the outcome of the attempt."""

import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hangdoctor.collect import pyspy
from hangdoctor.collect.discover import Target
from hangdoctor.collect.layout import write_json, write_text
from hangdoctor.collect.permission import current_access, explain_refusal
from hangdoctor.collect.process import read_facts, read_stat


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a collection. Times in seconds; `timeout_s` is for one dump of one process."""

    num_samples: int = 2
    interval_s: float = 3.0
    timeout_s: float = 10.0
    native: bool = False
    log_lines: int = 200
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of dumping one target in one sample."""

    status: str
    detail: str


def dump_target(target: Target, tool: str, folder: Path, sample: int, options: Options) -> Outcome:
    """Dump one process in one sample: /proc facts first, since py-spy's own reading would change
    them.
    """
    place = folder / f"samples/{sample}/{target.name}"
    stat = read_stat(target.pid)
    if stat is None or stat.state in "ZX":
        return Outcome("gone", f"pid {target.pid} ended before sample {sample}")
    write_json(folder / f"proc/{sample}/{target.name}.json", asdict(read_facts(target.pid)))
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
        return Outcome(done.status, explain_refusal(current_access(target.process.uid)))
    return Outcome(done.status, done.detail)


def _second_pass(target: Target, tool: str, place: Path, options: Options) -> None:
    """Dump native frames, which py-spy cannot combine with JSON; a failure saves its message and
    keeps the first pass.
    """
    done = pyspy.dump(tool, target.pid, options.timeout_s, native=True)
    ending = "native.txt" if done.status == "dumped" else "native.error.txt"
    write_text(
        place.with_name(f"{target.name}.{ending}"), done.output if done.status == "dumped" else done.complaint
    )
