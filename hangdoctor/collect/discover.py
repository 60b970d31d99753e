"""Find the ranks of one job on this host, their children, and the ranks that have no process.

process table --(search)--> scope --(claims a rank, no ancestor claims the same)--> ranks
                              \\--(below a rank)--> children          expected - found --> gone
"""

import os
import re
from collections import defaultdict
from dataclasses import dataclass

from hangdoctor.collect.errors import NoRanksFound, SeveralJobs
from hangdoctor.collect.identity import Identity, identify, is_launcher, ranks_of_host, spans_hosts
from hangdoctor.collect.process import Process, ancestors, descendants

MAX_CHILDREN = 64
"""Per rank. A compile pool has as many workers as the host has cores, with equal stacks."""


@dataclass(frozen=True, slots=True)
class Search:
    """The processes to search.

    Those at or below `pids`; else those whose command line matches the regular expression `match`
    and that carry the environment variable `variable`; or (all empty) every process of this user
    that claims a rank.
    """

    pids: tuple[int, ...] = ()
    match: str = ""
    variable: tuple[str, str] | None = None

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
        """The pid of its process."""
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
    identity: Identity


def find_job(search: Search, table: dict[int, Process]) -> Job:
    """Return the one job that `search` leads to.

    Raises:
        NoRanksFound: no process looks like a rank.
        SeveralJobs: there are ranks of more than one rendezvous.
    """
    scope = members(search, table)
    claims = _rank_claims(scope, table)
    if any(claim.process.pid in search.pids for claim in claims):
        claims = _with_peers(claims, table)
    _refuse_several_jobs(claims)
    servers = _servers(scope, claims, table) if search != Search() else []
    if not claims and not servers:
        claims = _unranked(search, scope, table)
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
    if search.variable and not _carries(process, search.variable):
        return False
    return search != Search() or process.uid == os.getuid()


def _carries(process: Process, variable: tuple[str, str]) -> bool:
    name, value = variable
    return (
        process.environment is not None and name in process.environment and process.environment[name] == value
    )


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
            f"  {job or '(no rendezvous)'}: "
            + ", ".join(f"rank {claim.identity.rank} is pid {claim.process.pid}" for claim in members[:4])
            + (f" and {len(members) - 4} more" if len(members) > 4 else "")
            for job, members in jobs.items()
        ]
        raise SeveralJobs(
            f"{len(jobs)} jobs run here; select one with `--pid` of any of its ranks:\n" + "\n".join(lines)
        )


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
    """Number named processes that claim no rank by pid, topmost Python processes only."""
    python = {pid for pid in scope if table[pid].is_python}
    tops = [pid for pid in sorted(python) if not python & set(ancestors(pid, table))]
    if search == Search() or not tops:
        raise NoRanksFound(_nothing_found(search, scope, table))
    return [Claim(table[pid], Identity(index, None, "trainer", "")) for index, pid in enumerate(tops)]


def _nothing_found(search: Search, scope: list[int], table: dict[int, Process]) -> str:
    hidden = sum(process.environment is None for process in table.values())
    if missing := [pid for pid in search.pids if pid not in table]:
        return f"There is no process {', '.join(map(str, missing))} on this host. It may have ended: read its logs."
    return (
        f"No rank was found. Looked for a Python process {search}, among {len(table)} processes ({len(scope)} in reach"
        + (f", {hidden} of other users not readable without root" if hidden else "")
        + "). Select the job with --pid PID of a rank or of its launcher, or with --match REGEX of its command line."
    )


def _name_ranks(claims: list[Claim]) -> list[Target]:
    """Return one target per rank: the oldest process, where several claim it."""
    named: dict[str, Target] = {}
    for claim in claims:
        prefix = "" if claim.identity.role == "trainer" else f"{claim.identity.role}_"
        name = f"{prefix}rank_{claim.identity.rank}"
        named.setdefault(name, Target(name, claim.identity.rank, claim.identity.role, claim.process))
    return list(named.values())


def _children(rank: Target, ranks: list[Target], table: dict[int, Process]) -> list[Target]:
    """Return processes below a rank that are not below another rank."""
    others = {other.pid for other in ranks if other is not rank}
    below = [
        pid
        for pid in descendants([rank.pid], table)
        if pid not in others and not others & set(_between(pid, rank.pid, table)) and pid != os.getpid()
    ]
    return [
        Target(f"{rank.name}_child_{index}", None, "child", table[pid], rank.name)
        for index, pid in enumerate(below[:MAX_CHILDREN])
    ]


def _between(pid: int, top: int, table: dict[int, Process]) -> list[int]:
    above = ancestors(pid, table)
    return above[: above.index(top)]


def _launcher(ranks: list[Target], table: dict[int, Process]) -> list[Target]:
    """Return the nearest known launcher above a rank."""
    for rank in ranks:
        for pid in ancestors(rank.pid, table):
            if table[pid].is_python and is_launcher(table[pid].command):
                return [Target("launcher", None, "launcher", table[pid])]
    return []


def _absent(ranks: list[Target], world_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return trainer ranks that the world size includes and no process claims: those of this host,
    those of others.
    """
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
    return set() if any(spans_hosts(environment) for environment in environments) else expected
