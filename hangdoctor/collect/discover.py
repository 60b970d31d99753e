"""Find the ranks of one job on this host, their children, and the ranks that have no process.

process table --(search)--> scope --(claims a rank, no ancestor claims the same)--> ranks
                              |---(below a rank)--> children          expected - found --> gone

A process claims a rank and a job by its environment and command line. Environments are inherited:
a data-loader worker carries the RANK of the rank that forked it, so a claim is checked against the
process's ancestors.
"""

import itertools
import os
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hangdoctor.collect.process import Process, ancestors, descendants, read_facts, read_stat
from hangdoctor.errors import NoRanksFound, SeveralJobs

RANK_AND_WORLD = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
RANK_ARGUMENT = re.compile(r"^--(?:global[-_])?rank(?:=(\d+))?$")
ENGINE = re.compile(r"^(?:sglang|vllm)\b|\b(?:sglang|vllm)[.:]", re.IGNORECASE)
LAUNCHER = re.compile(r"\b(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate|deepspeed)\b")
ROLES = ("engine", "reference", "reward", "proxy")
SERVER_ROLES = (
    ("engine", ENGINE),
    ("reward", re.compile(r"reward|verifier")),
    ("reference", re.compile(r"(?:\b|_)ref(?:erence)?(?:_|\b)")),
    ("proxy", re.compile(r"proxy|router|^ray (?:task runner|.*driver|.*controller)\b")),
    (
        "engine",
        re.compile(r"\bengine|inference_server|rollout_server|^ray (?:.* )?(?:llm|rollout|generation)\b"),
    ),
)
# `ray::LLMRayActor.generate`; an actor that trains may do more (`ActorRolloutRefWorker`).
ACTOR = re.compile(r"^ray::(\w+?)(?:Ray)?(?:Actor|Worker)?\b")
TRAINS = re.compile(r"actor|policy|train", re.I)
MAX_CHILDREN = 64


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """What a process claims to be.

    `job` groups the ranks of one rendezvous; `inferred` is true for schedulers' variables, which
    their launchers and shells carry as well.
    """

    rank: int | None
    world_size: int | None
    role: str
    job: str
    inferred: bool = False


def identify(environment: dict[str, str], command: tuple[str, ...]) -> ProcessIdentity:
    """Return the rank, world size, role and job that an environment and a command line define."""
    job = job_key(environment)
    for rank_name, world_name in RANK_AND_WORLD:
        rank = _number(environment, rank_name)
        if rank is not None:
            role = role_of_rank(environment, command)
            return ProcessIdentity(
                rank, _number(environment, world_name), role, job, rank_name.startswith("SLURM")
            )
    return ProcessIdentity(_rank_argument(command), None, role_of_server(command), job)


def role_of_rank(environment: dict[str, str], command: tuple[str, ...]) -> str:
    """Return the role of a process with a rank: torchelastic's ROLE_NAME, engine by its title, else
    trainer.

    The name of a script does not count: `train_reward_model.py` trains.
    """
    named = environment.get("ROLE_NAME", "")
    if named in ROLES:
        return named
    return "engine" if ENGINE.search(" ".join(_program(command))) else "trainer"


def role_of_server(command: tuple[str, ...]) -> str:
    """Return the role of a process without a rank, from its title, module or script; trainer by
    default.
    """
    words = " ".join(_program(command))
    if actor := ACTOR.match(words):
        if TRAINS.search(actor[1]):
            return "trainer"
        words = "ray " + re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", actor[1])
    return next((role for role, pattern in SERVER_ROLES if pattern.search(words.lower())), "trainer")


def is_launcher(command: tuple[str, ...]) -> bool:
    """True if the program that a command line runs starts ranks, whatever its arguments say."""
    for previous, word in itertools.pairwise(("", *command)):
        if LAUNCHER.search(word.rsplit("/", 1)[-1]):
            return True
        if previous and not word.startswith("-") and previous not in ("-X", "-W", "-m"):
            return False
    return False


def job_key(environment: dict[str, str]) -> str:
    """Return the key shared by the ranks of one job: the address of their rendezvous, or the
    scheduler's job.
    """
    if "MASTER_PORT" in environment:
        address = environment.get("MASTER_ADDR", "")
        return f"{address}:{environment['MASTER_PORT']}"
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "OMPI_MCA_ess_base_jobid"):
        if name in environment:
            return environment[name]
    return ""


def ranks_of_host(environment: dict[str, str]) -> range | None:
    """Return the ranks that torchrun started on the host of a process with this environment, or
    None without torchrun.
    """
    size, group = _number(environment, "LOCAL_WORLD_SIZE"), _number(environment, "GROUP_RANK")
    rank, local = _number(environment, "RANK"), _number(environment, "LOCAL_RANK")
    if size is None or rank is None or local is None or group is None:
        return None
    return range(rank - local, rank - local + size)


def _program(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words that name a program: its title, `-m module`, the file name of its script."""
    words = command[:1]
    for previous, word in itertools.pairwise(command):
        if previous == "-m":
            return (*words, word)
        if word.endswith(".py"):
            return (*words, word.rsplit("/", 1)[-1])
    return words


def _rank_argument(command: tuple[str, ...]) -> int | None:
    for word, following in zip(command, (*command[1:], ""), strict=True):
        found = RANK_ARGUMENT.match(word)
        value = found[1] or following if found else ""
        if value.isdigit():
            return int(value)
    return None


def _number(environment: dict[str, str], name: str) -> int | None:
    value = environment.get(name, "")
    return int(value) if value.isdigit() else None


"""Per rank. A compile pool has as many workers as the host has cores, with equal stacks."""


@dataclass(frozen=True, slots=True)
class Search:
    """The processes to search.

    Those at or below `pids`; else those whose command line matches the regular expression `match`
    and that carry the environment variable `variable`; or (all empty) every process of this user
    that claims a rank. `declared` are variables of a process, by pid, beside those of its start:
    Ray's workers set their RANK when they run.
    """

    pids: tuple[int, ...] = ()
    match: str = ""
    variable: tuple[str, str] | None = None
    declared: Mapping[int, Mapping[str, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.pids:
            return "at or below pid " + ", ".join(map(str, self.pids))
        conditions = [f"with a command line that matches {self.match!r}"] if self.match else []
        conditions += [f"started with {'='.join(self.variable)}"] if self.variable else []
        if conditions:
            return " and ".join(conditions)
        return "of this user with RANK (or the rank of MPI or SLURM) in its environment"


@dataclass(frozen=True, slots=True)
class Target:
    """One process to dump; `parent` is the name of the rank that a child belongs to."""

    name: str
    rank: int | None
    role: str
    process: Process
    parent: str | None = None

    @property
    def pid(self) -> int:
        return self.process.pid


@dataclass(frozen=True, slots=True)
class Job:
    """Every process of one job on this host: ranks, their children, the launcher.

    `gone` are ranks that should run here and have no process; `elsewhere` are ranks that other
    hosts should have.
    """

    targets: tuple[Target, ...]
    gone: tuple[int, ...]
    elsewhere: tuple[int, ...]
    world_size: int | None


NO_JOB = Job((), (), (), None)


@dataclass(frozen=True, slots=True)
class Claim:
    """A process and what it claims to be."""

    process: Process
    identity: ProcessIdentity


def find_job(search: Search, table: dict[int, Process]) -> Job:
    """Return the one job that `search` leads to.

    Raises:
        NoRanksFound: no process looks like a rank.
        SeveralJobs: there are ranks of more than one rendezvous.
    """
    table = table | {
        pid: replace(table[pid], environment={**(table[pid].environment or {}), **variables})
        for pid, variables in search.declared.items()
        if pid in table
    }
    scope = members(search, table)
    claims = _rank_claims(scope, table)
    if any(claim.process.pid in search.pids for claim in claims):
        claims = _with_peers(claims, table)
    _refuse_several_jobs(claims)
    servers = _servers(scope, claims, table) if search != Search() else []
    served = {server.pid for server in servers}
    apart = [pid for pid in scope if served.isdisjoint((pid, *ancestors(pid, table)))]
    if not claims and (not servers or any(ACTOR.match(" ".join(table[pid].command)) for pid in apart)):
        claims = _unranked(search, apart, table)
    ranks = _name_ranks(claims) + servers
    launcher = _launcher(ranks, table)
    children = [child for rank in ranks for child in _children(rank, ranks, table)]
    world_size = max((claim.identity.world_size or 0 for claim in claims), default=0) or None
    gone, elsewhere = _absent(ranks, world_size or 0)
    return Job((*ranks, *children, *launcher), gone, elsewhere, world_size)


def _ours(table: dict[int, Process]) -> set[int]:
    """Return this process and its ancestors: never part of the job, unless named by pid."""
    return {os.getpid(), *ancestors(os.getpid(), table)}


def members(search: Search, table: dict[int, Process]) -> list[int]:
    """Return the pids of every process that `search` leads to, with all their descendants."""
    if search.pids:
        named = [pid for pid in search.pids if pid in table]
        return list(dict.fromkeys([*named, *descendants(named, table)]))
    ours = _ours(table)
    seeds = [pid for pid, process in table.items() if pid not in ours and _matches(search, process)]
    return [pid for pid in dict.fromkeys([*seeds, *descendants(seeds, table)]) if pid not in ours]


def _matches(search: Search, process: Process) -> bool:
    if search.match and not re.search(search.match, " ".join(process.command)):
        return False
    if search.variable and search.variable not in (process.environment or {}).items():
        return False
    return search != Search() or process.uid == os.getuid()


def _claim(process: Process) -> Claim:
    return Claim(process, identify(process.environment or {}, process.command))


def _rank_claims(scope: list[int], table: dict[int, Process]) -> list[Claim]:
    """Return Python processes that claim a rank which none of their ancestors claims, in order of
    rank.
    """
    claims = {
        pid: claim
        for pid in scope
        if table[pid].is_python and not is_launcher(table[pid].command)
        for claim in [_claim(table[pid])]
        if claim.identity.rank is not None
    }
    tops = [claim for pid, claim in claims.items() if not _inherited(pid, claims, table)]
    strong = {claim.process.pid for claim in tops if not claim.identity.inferred}
    return sorted(
        (c for c in tops if not c.identity.inferred or not strong & set(descendants([c.process.pid], table))),
        key=lambda claim: (claim.identity.rank, claim.process.pid),
    )


def _inherited(pid: int, claims: dict[int, Claim], table: dict[int, Process]) -> bool:
    mine = claims[pid].identity
    above = [claims[parent].identity for parent in ancestors(pid, table) if parent in claims]
    return any(parent.rank == mine.rank and parent.job == mine.job for parent in above)


def _with_peers(claims: list[Claim], table: dict[int, Process]) -> list[Claim]:
    """Return every rank of the jobs of these ranks: only its peers show why a rank waits."""
    jobs = {(claim.identity.job, claim.process.uid) for claim in claims}
    ours = _ours(table)
    everywhere = _rank_claims([pid for pid in table if pid not in ours], table)
    return [claim for claim in everywhere if (claim.identity.job, claim.process.uid) in jobs]


def _refuse_several_jobs(claims: list[Claim]) -> None:
    jobs: dict[str, list[Claim]] = defaultdict(list)
    for claim in claims:
        if claim.identity.role == "trainer":
            jobs[claim.identity.job].append(claim)
    if len(jobs) > 1:
        lines = [
            f"  areal-debug hang --pid {members[0].process.pid}   # {job or 'no rendezvous'}: {len(members)} ranks since "
            f"{_start_of(members[0].process.pid)}, {' '.join(members[0].process.command)[:80]}"
            for job, members in jobs.items()
        ]
        raise SeveralJobs(f"{len(jobs)} jobs run here; select one:\n" + "\n".join(lines))


def _start_of(pid: int) -> str:
    started = read_facts(pid).start_time
    return time.strftime("%H:%M:%S", time.localtime(started)) if started else "an unknown time"


def _servers(scope: list[int], claims: list[Claim], table: dict[int, Process]) -> list[Target]:
    """Return processes in the scope that have a role and no rank (inference servers, reward
    actors): topmost only, numbered.
    """
    ranked = {claim.process.pid for claim in claims}
    roles = {
        pid: _claim(table[pid]).identity.role for pid in scope if table[pid].is_python and pid not in ranked
    }
    served = {pid for pid, role in roles.items() if role != "trainer"}
    counts: dict[str, int] = defaultdict(int)
    targets = []
    for pid in sorted(served):
        if (served | ranked).isdisjoint(ancestors(pid, table)):
            role = roles[pid]
            targets.append(Target(f"{role}_rank_{counts[role]}", counts[role], role, table[pid]))
            counts[role] += 1
    return targets


def _unranked(search: Search, scope: list[int], table: dict[int, Process]) -> list[Claim]:
    python = {pid for pid in scope if table[pid].is_python and not is_launcher(table[pid].command)}
    tops = [pid for pid in sorted(python) if not python & set(ancestors(pid, table))]
    if search == Search() or not tops or _ours(table) & set(search.pids):
        raise NoRanksFound(_nothing_found(search, scope, table))
    return [Claim(table[pid], ProcessIdentity(index, None, "trainer", "")) for index, pid in enumerate(tops)]


def _nothing_found(search: Search, scope: list[int], table: dict[int, Process]) -> str:
    hidden = sum(process.environment is None for process in table.values())
    if missing := [pid for pid in search.pids if read_stat(pid) is None and pid not in table]:
        return f"There is no process {', '.join(map(str, missing))} on this host. It may have ended: read its logs."
    everything = scope if search != Search() else table
    launchers = [pid for pid in everything if table[pid].is_python and is_launcher(table[pid].command)]
    if launchers:
        pid = launchers[0]
        return (
            f"The job is starting: the launcher with pid {pid} (since {_start_of(pid)}) has no rank yet. "
            f"Ask again in 30 s: areal-debug hang --pid {pid}"
        )
    return (
        f"No rank was found. Looked for a Python process {search}, among {len(table)} processes ({len(scope)} in reach"
        + (f", {hidden} of other users not readable without root" if hidden else "")
        + "). Select the job with --pid PID of a rank or of its launcher, or with --match REGEX of its command line."
    )


def _name_ranks(claims: list[Claim]) -> list[Target]:
    named: dict[str, Target] = {}
    for claim in claims:
        prefix = "" if claim.identity.role == "trainer" else f"{claim.identity.role}_"
        name = f"{prefix}rank_{claim.identity.rank}"
        named.setdefault(name, Target(name, claim.identity.rank, claim.identity.role, claim.process))
    return list(named.values())


def _children(rank: Target, ranks: list[Target], table: dict[int, Process]) -> list[Target]:
    others = {other.pid for other in ranks if other is not rank}
    below = []
    for pid in descendants([rank.pid], table):
        above = ancestors(pid, table)
        if not others & {pid, *above[: above.index(rank.pid)]} and pid != os.getpid():
            below.append(pid)
    return [
        Target(f"{rank.name}_child_{index}", None, "child", table[pid], rank.name)
        for index, pid in enumerate(below[:MAX_CHILDREN])
    ]


def _launcher(ranks: list[Target], table: dict[int, Process]) -> list[Target]:
    for rank in ranks:
        for pid in ancestors(rank.pid, table):
            if table[pid].is_python and is_launcher(table[pid].command):
                return [Target("launcher", None, "launcher", table[pid])]
    return []


def _absent(ranks: list[Target], world_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return trainer ranks that no process claims: those of this host, those of others."""
    trainers = [target for target in ranks if target.role == "trainer"]
    expected = set(range(world_size))
    local = _ranks_of_this_host([target.process.environment or {} for target in trainers], expected)
    absent = sorted(expected - {target.rank for target in trainers})
    return tuple(rank for rank in absent if rank in local), tuple(
        rank for rank in absent if rank not in local
    )


def _ranks_of_this_host(environments: list[dict[str, str]], expected: set[int]) -> set[int]:
    """Return the ranks torchrun placed here; else all of them, unless a scheduler reports other
    hosts.
    """
    spans = [ranks_of_host(environment) for environment in environments]
    known = [span for span in spans if span is not None]
    if known:
        return {rank for span in known for rank in span}
    nodes = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    is_larger = any((_number(one, name) or 1) > 1 for one in environments for name in nodes)
    return set() if is_larger else expected
