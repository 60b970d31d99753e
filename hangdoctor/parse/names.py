"""Parse the process from a file name: `rank_3.txt`, `host-2_rank_17.json`, `engine_rank_1.txt`,
`rank_0_child_0`.
"""

import re
from dataclasses import dataclass

ROLES = {
    "engine": "engine",
    "rollout": "engine",
    "sglang": "engine",
    "vllm": "engine",
    "server": "engine",
    "inference": "engine",
    "reference": "reference",
    "ref": "reference",
    "reward": "reward",
    "proxy": "proxy",
    "critic": "critic",
    "trainer": "trainer",
    "actor": "trainer",
    "train": "trainer",
}
RANKED = re.compile(
    r"^(?P<before>.*?)(?<![a-z])rank[_\-.= ]?(?P<rank>\d{1,7})(?!\d)(?:[_\-.]child[_\-.]?(?P<child>\d{1,6}))?",
    re.I,
)
BARE = re.compile(r"^(?:worker|gpu|r|proc)?[_\-]?(?P<rank>\d{1,6})$", re.I)
LOCAL_RANK = re.compile(r"--(?:local[_-])?rank[= ](\d{1,6})\b")
# Engines rename their processes: `sglang::scheduler_PP1_TP0`, `VLLM::Worker_TP3`.
COORDINATE = re.compile(r"_(DP|PP|TP|EP)(\d{1,5})")
SUFFIXES = (".native", ".error", ".stacktrace", ".pyspy", ".dump", ".stack", ".trace")
# File endings of formats, so that `rank_3.pickle` and `nccl_trace_rank_3` have the same stem.
ENDINGS = (".json", ".txt", ".log", ".pickle", ".pkl", ".out", ".err", ".bin", ".gz", ".md")


@dataclass(frozen=True, slots=True)
class ProcessName:
    """The process of a dump. `name` is canonical; `rank` is None for children and names without a
    rank.
    """

    name: str
    rank: int | None
    role: str = "trainer"
    host: str | None = None
    parent: str | None = None


def parse_name(file_name: str) -> ProcessName:
    """Return the process that a file name stands for; never raises, an unknown name is a process
    without a rank.
    """
    stem = stem_of(file_name)
    match = RANKED.match(stem)
    if match is None:
        bare = BARE.match(stem)
        if bare is None:
            return ProcessName(stem, None, role_in(stem))
        return ProcessName(canonical("trainer", int(bare["rank"])), int(bare["rank"]))
    rank, before = int(match["rank"]), match["before"].strip("_-. ")
    role = role_in(before)
    host = host_in(before) if role == "trainer" else None
    name = canonical(role, rank)
    if match["child"]:
        return ProcessName(f"{name}_child_{int(match['child'])}", None, "child", host, parent=name)
    return ProcessName(name, rank, role, host)


def coordinates_in(command: str) -> tuple[int, ...] | None:
    """Return the position of a process in its job by its command line, as numbers that sort like
    ranks, or None without one.
    """
    if match := LOCAL_RANK.search(command):
        return (int(match[1]),)
    found = dict(COORDINATE.findall(command)) if "::" in command else {}
    return tuple(int(found.get(name, 0)) for name in ("DP", "PP", "TP", "EP")) if found else None


def stem_of(file_name: str) -> str:
    """Return a file name without folders and without the endings of known formats."""
    stem = file_name.replace("\\", "/").rsplit("/", 1)[-1]
    while stem.lower().endswith(ENDINGS + SUFFIXES):
        stem = stem.rsplit(".", 1)[0]
    return stem


def canonical(role: str, rank: int) -> str:
    """Return the name of a rank: `rank_3`, or `engine_rank_3` for another role."""
    return f"rank_{rank}" if role == "trainer" else f"{role}_rank_{rank}"


def role_in(text: str) -> str:
    """Return the role that a word of the text names; `trainer` without one."""
    words = re.split(r"[_\-. ]+", text.lower())
    return next((ROLES[word] for word in reversed(words) if word in ROLES), "trainer")


def host_in(text: str) -> str | None:
    """Return the text before `rank` as a host, unless it is a common file name of collectors."""
    plain = {
        "",
        "stack",
        "stacks",
        "pyspy",
        "py-spy",
        "py_spy",
        "dump",
        "nccl_trace",
        "comm_lib_trace",
        "trace",
        "fr",
    }
    return None if text.lower() in plain else text
