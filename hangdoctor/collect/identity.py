"""The rank and job of a process, from the environment and the command line it was started with.

Environments are inherited: a data-loader worker carries the RANK of the rank that forked it, so an
identity is what a process *claims*; `discover` decides which process is the rank itself.
"""

import itertools
import re
from dataclasses import dataclass

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
    ("proxy", re.compile(r"proxy|router")),
    ("engine", re.compile(r"\bengine|inference_server|rollout_server")),
)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a process claims to be.

    `job` groups the ranks of one rendezvous; `inferred` is true for schedulers' variables, which
    their launchers and shells carry as well.
    """

    rank: int | None
    world_size: int | None
    role: str
    job: str
    inferred: bool = False


def identify(environment: dict[str, str], command: tuple[str, ...]) -> Identity:
    """Return the rank, world size, role and job that an environment and a command line define."""
    job = job_key(environment)
    for rank_name, world_name in RANK_AND_WORLD:
        rank = _number(environment, rank_name)
        if rank is not None:
            role = role_of_rank(environment, command)
            return Identity(rank, _number(environment, world_name), role, job, rank_name.startswith("SLURM"))
    return Identity(_rank_argument(command), None, role_of_server(command), job)


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
    words = " ".join(_program(command)).lower()
    return next((role for role, pattern in SERVER_ROLES if pattern.search(words)), "trainer")


def is_launcher(command: tuple[str, ...]) -> bool:
    """True if a command line is one of the usual launchers of ranks."""
    return any(LAUNCHER.search(word.rsplit("/", 1)[-1]) for word in command[:4])


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


def spans_hosts(environment: dict[str, str]) -> bool:
    """True if a scheduler reports that the job of this process has several hosts."""
    names = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    return any((_number(environment, name) or 1) > 1 for name in names)


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
