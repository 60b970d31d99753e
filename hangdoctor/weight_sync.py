"""The two sides of an RL weight update: who sends, who receives, and what each waits for.

A process takes its side from its role (an engine by name or command) or, without one, from the
functions and files on its stacks. Names are matched by their words, so that a library's next
version, or a program of one's own, needs no row here.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from hangdoctor.case import Case, ProcessState
from hangdoctor.frames import is_library
from hangdoctor.model import Frame
from hangdoctor.waits import ThreadWait

# verl, TRL, NeMo-RL, SkyRL, slime, OpenRLHF, SGLang, vLLM, AReaL and this project call it so.
UPDATE_NAMES = re.compile(
    r"\w*(update|sync|synchroni[sz]e|push|send|receive|recv|fetch|pull|publish|broadcast|transfer|stream|refit|share)"
    r"(ed|s|ing)?_(the_|new_|latest_|policy_|model_|actor_|rollout_|rank0_|all_|hf_|lora_|fsdp\d?_)*(weights?|named_params?)(?!_decay)\w*|"
    r"\w*weights?_(update|sync|transfer|send|receiv|broadcast)\w*|\w*refit\w*|_?move_model_to_(vllm|sglang|engine|rollout)\w*|"
    r"_?sync_\w*params?_to_(vllm|sglang|engine|rollout)\w*|(init|close)_communicator|_?rollout_mode",
    re.IGNORECASE,
)
UPDATE_FILES = re.compile(
    r"(?!deepspeed/|torch/).*(weight_?(update|sync|transfer|sender|receiver)|update_weight|param_sync|refit)\w*(/.*|\.py)|"
    r"(?!deepspeed/|torch/)(.*/)?(checkpoint_engine|weight_transfer|weight_sync)/.*|.*(fleet|servers)/update_group\.py",
    re.IGNORECASE,
)
GROUP_NAMES = re.compile(
    r"init_(weights?_|communicator|collective|model_update|process_group_for)\w*|\w*update_group\w*", re.I
)
PAUSE_NAMES = re.compile(
    r"\w*(pause|unpause|resume|drain|quiesce|outstanding|in_?flight|abort_all|until_idle|flush_cache|wait_for_requests)\w*",
    re.IGNORECASE,
)
ENGINE_WORDS = re.compile(
    r"vllm|sglang|engine|rollout|generat|infer|sampler|serve|scheduler|decode", re.IGNORECASE
)
TRAINER_WORDS = re.compile(
    r"train|learner|actor|policy|fsdp|megatron|deepspeed|archon|backward|optimi[sz]er|ppo|grpo|learn_step|driver",
    re.IGNORECASE,
)
RECEIVE_WORDS = re.compile(r"receive|recv|pull|fetch|load_weights|from_collective", re.IGNORECASE)
SEND_WORDS = re.compile(
    r"send|push|publish|broadcast_weights|_to_(vllm|sglang|engine|rollout)", re.IGNORECASE
)


ROLES_APART = ("engine", "reference", "reward", "proxy", "critic")


@dataclass(frozen=True, slots=True)
class Side:
    """One process in, or opposite to, an update; `thread_wait` is of the thread that shows it."""

    process: ProcessState
    thread_wait: ThreadWait
    is_engine: bool
    updates: bool

    @property
    def role(self) -> str:
        """`engine` or `trainer`."""
        return "engine" if self.is_engine else "trainer"

    @property
    def joins_group(self) -> bool:
        """True if it waits for the group of the update to form."""
        names = any(GROUP_NAMES.fullmatch(f.function) for f in self.thread_wait.frames)
        return names and self.thread_wait.kind in ("store", "collective", "http", "rpc")

    @property
    def pauses(self) -> Frame | None:
        """The frame that waits for a pause to begin or to end, or None."""
        found = (f for f in self.thread_wait.frames if not f.native and PAUSE_NAMES.fullmatch(f.function))
        return next(found, None)


@lru_cache(maxsize=65536)
def updates(frame: Frame) -> bool:
    """True if a frame belongs to a weight update: by its name, or by its file where that is a
    library's (a program of that name is in it with every frame).
    """
    if frame.native or frame.file.startswith(("torch/", "transformers/")):
        return False
    in_library = is_library(frame.file) or frame.file.startswith(("areal", "rollout/fleet"))
    return bool(UPDATE_NAMES.fullmatch(frame.function) or (in_library and UPDATE_FILES.fullmatch(frame.file)))


def sides_of(case: Case) -> tuple[Side, ...]:
    """Return every process of the job with its side. Stacks that are one object are judged once."""
    processes = [*case.ranks, *(s for s in case.others if s.role not in ("child", "launcher") and s.threads)]
    mains = {id(s.thread_wait.frames): s.thread_wait for s in processes}
    threads = {id(s.threads): s.threads for s in processes}
    waits = mains | {id(t.thread_wait.frames): t.thread_wait for ts in threads.values() for t in ts}
    updating = {key for key, wait in waits.items() if any(map(updates, wait.frames))}
    files = [{f.file for f in wait.frames} for wait in mains.values()]
    shared = frozenset(set.intersection(*files)) if len(processes) > 1 else frozenset()
    named = any(s.role in ROLES_APART for s in processes)
    engines: dict[int, bool] = {}
    known: dict[tuple[int, int, str], Side] = {}
    sides = []
    for s in processes:
        key = (id(s.thread_wait), id(s.threads), s.role)
        if key not in known:
            known[key] = side_of(s, updating, shared, None if named else engines)
        alike = known[key]
        sides.append(Side(s, alike.thread_wait, alike.is_engine, alike.updates))
    return tuple(sides)


def side_of(
    process_state: ProcessState,
    updating: set[int],
    shared: frozenset[str],
    engines: dict[int, bool] | None,
) -> Side:
    """Return the side of one process, by the thread that is in an update where there is one.

    `updating` are the stacks that are in one, `shared` the files that every process runs: they
    distinguish none. `engines` has the answers of `is_engine`; None means that the processes have
    roles.
    """
    waits = (process_state.thread_wait, *(t.thread_wait for t in process_state.threads))
    found = next((w for w in waits if id(w.frames) in updating), None)
    thread_wait = found or process_state.thread_wait
    if engines is None:
        return Side(process_state, thread_wait, process_state.role == "engine", found is not None)
    key = id(thread_wait.frames)
    if key not in engines:
        engines[key] = is_engine(thread_wait, shared)
    return Side(process_state, thread_wait, engines[key], found is not None)


def is_engine(thread_wait: ThreadWait, shared: frozenset[str]) -> bool:
    """True for a stack that generates: by the way the weights go, by an engine's own files, else by
    the words of its functions and then of its files.
    """
    frames = [f for f in thread_wait.frames if not f.native and not f.file.startswith("torch/")]
    sync = " ".join(f.function for f in frames if updates(f))
    receives, sends = RECEIVE_WORDS.search(sync), SEND_WORDS.search(sync)
    if bool(receives) != bool(sends):
        return bool(receives)
    files = " ".join(f.file for f in frames if f.file not in shared)
    if re.search(r"\b(vllm|sglang)/", files):
        return not re.search(r"\b(trl|verl/trainer|nemo_rl/algorithms)/", files)
    for words in (" ".join(f.function for f in frames), files):
        generates, trains = ENGINE_WORDS.search(words), TRAINER_WORDS.search(words)
        if bool(generates) != bool(trains):
            return bool(generates)
    return False
