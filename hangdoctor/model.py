"""The data model: frames, threads, processes, a snapshot, and the diagnosis made of it.

Every reader in `hangdoctor.parse` returns these dataclasses and every rule starts from them, so a
rule never knows whether a stack came from py-spy, faulthandler or gdb. Everything is frozen and
hashable: equal stacks of ten thousand ranks are one object.
"""

import re
from dataclasses import asdict, dataclass, field
from typing import Literal

Label = Literal[
    "cleanup_deadlock",
    "collective_mismatch",
    "nccl_timeout",
    "partial_exception",
    "p2p_shape_mismatch",
    "init_deadlock",
    "missing_rank",
    "dataloader_stall",
    "checkpoint_stall",
    "weight_sync_deadlock",
    "external_wait",
    "lock_deadlock",
    "straggler_or_not_hung",
    "unknown",
]
Confidence = Literal["high", "medium", "low"]
Kind = Literal["", "stuck_in_launch", "transport", "device", "starting"]
"""What keeps a collective that every rank has reached from ending, or that the job is starting;
empty where nothing decides.
"""
Status = Literal["dumped", "gone", "not_permitted", "not_python", "stopped", "timed_out", "not_collected"]
"""`not_collected` means that nobody looked for the process; every other status is a finding."""
NUMBER = re.compile(r'(id": ?)(\d+|null)')
"""A number of a process or thread in py-spy's JSON, where equal stacks differ."""
Rank = int | str
"""A rank of the job's trainer (or only) role is an int; a process of another role is named, such as
`engine_rank_1`."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on a stack, as the dump printed it. `line` is 0 where the dump has none."""

    function: str
    file: str
    line: int = 0
    native: bool = False


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread with its frames, innermost first. None where the format does not record it."""

    frames: tuple[Frame, ...]
    name: str | None = None
    active: bool | None = None
    holds_gil: bool | None = None
    waits_for_gil: bool | None = None


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """The contents of /proc at the time of one dump, and of `proc/K/NAME.json`.

    None where the process is gone or /proc refuses access. `state` is the letter of /proc/PID/stat;
    `cpu_s` is user plus system time of all threads, `start_time` is seconds since the epoch.
    """

    state: str | None = None
    wchan: str | None = None
    parent_pid: int | None = None
    cpu_s: float | None = None
    voluntary_switches: int | None = None
    involuntary_switches: int | None = None
    start_time: float | None = None
    backend: str | None = None


@dataclass(frozen=True, slots=True)
class ProcessDump:
    """One process in one sample.

    `name` is the stem of its files (`rank_3`, `engine_rank_1`, `rank_0_child_0`); `parent` is the
    name of the process that started it, for children; `rank` counts within `role`; `time` is
    seconds since the epoch; `detail` is the collector's reason for a status other than `dumped`.
    """

    name: str
    rank: int | None
    role: str = "trainer"
    host: str | None = None
    pid: int | None = None
    parent: str | None = None
    status: Status = "dumped"
    detail: str = ""
    sample: int = 0
    time: float | None = None
    threads: tuple[Thread, ...] = ()
    facts: ProcessFacts = ProcessFacts()
    command: str = ""


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """One entry of a Flight Recorder ring, or a message of the NCCL watchdog (`source`): the
    operation a rank enqueued, its number, and its state.

    `state` is scheduled, started or completed. Sizes are element counts per dimension, one tuple
    per tensor.
    """

    rank: int
    group: str
    operation: str
    sequence: int
    is_p2p: bool
    state: str
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    created_ns: int | None = None
    source: str = "Flight Recorder"


@dataclass(frozen=True, slots=True)
class RasRank:
    """NCCL RAS on one rank of one communicator: how many operations it has launched, and whether it
    responds. `rank` is None for ranks that a report counts and does not name.
    """

    communicator: str
    rank: int | None
    operations: int | None
    status: str


@dataclass(frozen=True, slots=True)
class LogTail:
    """The last lines of one log, with the process that wrote it where that is known."""

    name: str
    rank: int | None
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ErrorFile:
    """A torchelastic error file: the exception that a rank reported before it exited."""

    rank: int | None
    message: str
    time: float | None
    traceback: str = ""


How = Literal["timed_out", "lost_peer", "failed", "killed", "ended", "cut"]
"""`ended`: by the launcher or the scheduler, without an error of its own."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank of a dead job ended: `words` are its exception's, a peer's or the launcher's.

    `named` says that a peer names it as the one it waited for; `first` that it failed first.
    """

    rank: int
    how: How
    words: str
    named: bool = False
    first: bool = False


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU at one sample."""

    host: str
    index: int
    sample: int
    utilization_percent: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that is known of a job at the time of the collection.

    `expected` maps each rank that the job should have to a status, where the collection,
    `--world-size` or a message about a rank defines it. A rank without a dump is `not_collected`
    unless the input proves that its process was looked for. `source` maps `FILE:LINE` to the text
    of a line. `absent` maps processes of other roles that were looked for and have no stack to
    a status. `notes` are remarks on the input for the reader (files not read). `endings` has the
    ranks of a job that is dead; `stopped` are the words of who ended it from outside; `recovered`
    says that it ran on after that, `complete` that no rank of it is unknown. `steps` are the last
    training steps of which each rank has logged a line.
    """

    dumps: tuple[ProcessDump, ...]
    expected: dict[int, Status] = field(default_factory=dict)
    absent: dict[str, Status] = field(default_factory=dict)
    num_samples: int = 1
    records: tuple[CollectiveRecord, ...] = ()
    ras: tuple[RasRank, ...] = ()
    logs: tuple[LogTail, ...] = ()
    errors: tuple[ErrorFile, ...] = ()
    gpus: tuple[GpuFacts, ...] = ()
    source: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    endings: tuple[Ending, ...] = ()
    stopped: str = ""
    recovered: bool = False
    complete: bool = True
    steps: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact that supports a verdict: where a process waits, or what a record shows about it."""

    ranks: str
    fact: str
    process: str = ""
    thread: str = ""
    frame: str = ""
    location: str = ""


@dataclass(frozen=True, slots=True)
class NextStep:
    """One action: a command or a variable in `do`, the reason in `why`, and the price in `cost`."""

    do: str
    why: str
    cost: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks whose main threads are at the same place: `ranks` is a range text such as `0-2,5-7`."""

    ranks: str
    size: int
    waits_for: str
    doing: str
    stack: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another reading of the same evidence, with lower priority."""

    label: Label
    confidence: Confidence
    culprit_ranks: tuple[Rank, ...]
    summary: str


@dataclass(frozen=True, slots=True)
class RankVerdict:
    """One cell of the rank map. `part` is a key of `report.text.SYMBOLS`; the rest identifies the
    process: `started` is in seconds since the epoch.
    """

    rank: Rank
    part: str
    status: Status
    group: int | None
    doing: str
    pid: int | None = None
    host: str | None = None
    command: str = ""
    started: float | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer. `as_json` returns exactly the object that `--json` prints."""

    label: Label
    confidence: Confidence
    culprit_ranks: tuple[Rank, ...]
    victim_ranks: tuple[Rank, ...]
    summary: str
    evidence: tuple[Evidence, ...] = ()
    next_steps: tuple[NextStep, ...] = ()
    would_refute: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    groups: tuple[Group, ...] = ()
    ranks: tuple[RankVerdict, ...] = ()
    collect: tuple[str, ...] = ()
    kind: Kind = ""

    def as_json(self) -> dict[str, object]:
        """Return a dict of plain lists, strings and numbers, ready for `json.dumps`."""
        return asdict(self)
