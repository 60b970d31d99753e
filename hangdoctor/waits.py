"""Classify what a stack waits for: tables map (function, file) to a kind of wait and to a phase of
the job.

A wait is *specific* (a collective, a data loader, an HTTP client: it names what must happen) or
*generic* (a lock, a queue, a socket, a sleep: it only shows how). The innermost specific wait
decides; a generic one counts where nothing around it is specific. Phases (cleanup, init,
checkpoint, data, error, engine) are read from the complete stack.

Python frames end where C begins. A native pass shows the C calls; where there is none, the source
line names the call, and `/proc/PID/wchan` names the kernel function in which the main thread
sleeps.

In the tables, `USER` as a file means: not in a library.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache

from hangdoctor.frames import is_library, normal_frames, python_only, user_frames
from hangdoctor.model import Frame
from hangdoctor.patterns import (
    COLLECTIVE_FILES,
    COLLECTIVES,
    ENGINE_LOOP,
    GENERIC,
    P2P,
    PEER_KINDS,
    SPECIFIC,
    WORKER_LOOP,
    Pattern,
)

# fmt: off
NATIVE = (
    Pattern("p2p", "recv", r"c10d::ProcessGroupGloo::RecvWork::wait|.*RecvWork.*", r".*"),
    Pattern("p2p", "send", r"c10d::ProcessGroupGloo::SendWork::wait|.*SendWork.*", r".*"),
    # Under a collective these mean that its communicator does not exist yet.
    Pattern(
        "store", "communicator",
        r"ncclCommInitRank.*|ncclCommSplit.*|.*broadcastUniqueNCCLID.*|bootstrapInit.*|commInit.*|.*::initNCCLComm.*|.*getNCCLComm.*|"
        r"gloo::rendezvous.*",
        r".*",
    ),
    Pattern(
        "collective", "work.wait",
        r"c10d::Work::wait|c10d::(ops|ProcessGroup)[^(]*::(wait|synchronize).*|.*WorkNCCL::.*|"
        r"gloo::(?!transport|rendezvous).*|ncclGroupEnd.*|ncclAllReduce.*",
        r".*",
    ),
    Pattern(
        "store", "store",
        r"c10d::(TCPStore|FileStore|PrefixStore|HashStore|detail::TCPClient|.*Store::).*",
        r".*",
    ),
    Pattern(
        "device", "device sync",
        r"(cuda|cu|hip)(Stream|Device|Event|Ctx)Synchronize.*|aclrtSynchronize.*|c10_npu::.*|cudaMemcpy.*|cuMemcpy.*|"
        r"at::native::_local_scalar_dense.*|at::native::item.*",
        r".*",
    ),
    Pattern("backward", "backward", r"torch::autograd::Engine::.*", r".*"),
    Pattern("gil", "GIL", r"take_gil|PyEval_AcquireThread|PyEval_RestoreThread", r".*"),
    Pattern(
        "lock", "lock",
        r"(lock|rlock)_(PyThread_)?acquire.*|.*acquire_timed|PyMutex_Lock.*|_PyMutex.*|_*(GI_)?_*lll_lock_wait.*|"
        r"_*(GI_)?_*pthread_(mutex|rwlock|spin)_\w*lock.*|std::(__1::)?\w*mutex::lock.*|sem_wait.*|absl::.*Mutex::.*Lock.*",
        r".*",
    ),
    Pattern("file_lock", "file lock", r"flock|fcntl_flock.*|fcntl_lockf.*|lockf", r".*"),
    Pattern("sleep", "sleep", r"clock_nanosleep|time_sleep|nanosleep|pysleep", r".*"),
    Pattern("subprocess", "waitpid", r"wait4|waitpid|waitid|os_waitpid.*", r".*"),
    Pattern("prompt", "input", r"builtin_input.*|PyOS_Readline|readline.*", r".*"),
    Pattern(
        "socket", "socket",
        r"sock_recv.*|sock_accept.*|sock_connect.*|recv|recvfrom|accept4?|connect|SSL_read.*|__libc_recv|"
        r"__poll|poll|epoll_wait|select",
        r".*",
    ),
    Pattern(
        "file", "file",
        r"os_read.*|os_fsync.*|fsync|fdatasync|_io_FileIO_(read|write).*|os_write.*",
        r".*",
    ),
)
NATIVE_EXIT = r"exit|Py_(Exit|Finalize(Ex)?|RunMain_exit)|__run_exit_handlers|__cxa_finalize|atexit_callfuncs"
# A call into C leaves no Python frame: the text of the source line names the call that sleeps.
SOURCE = (
    ("destroy", "destroy_process_group", r"\b(destroy_process_group|_abort_process_group)\("),
    ("sleep", "sleep", r"\bsleep\("),
    ("file_lock", "file lock", r"\b(flock|lockf)\("),
    ("lock", "lock", r"\bwith\b.*(lock|mutex|semaphore|condition|\bcv\b)|(lock|mutex|sem\w*)\.acquire\(|\.acquire\("),
    ("prompt", "input", r"\binput\(|breakpoint\(|set_trace\("),
    ("subprocess", "waitpid", r"\bos\.(system|wait\w*)\("),
    ("collective", "work.wait", r"\b\w*(work|handle|req|request|pending|future|fut|op|w|h|works?\[\w+\])\.wait\("),
    ("store", "store", r"\bstore\.\w+\(|TCPStore\("),
    ("socket", "socket", r"\.(recv\w*|accept|connect)\(|getaddrinfo\("),
    ("device", "device sync", r"\.(item|cpu|tolist|numpy|synchronize)\(|\bsynchronize\("),
    ("file", "file", r"\bopen\(|\.(open|read\w*|write\w*|readline\w*)\(|\bos\.(read|write|fsync)\("),
)
POSTED = re.compile(
    r"\b(i?recv|i?send|batch_isend_irecv)\b|\b(all_reduce|all_gather\w*|reduce_scatter\w*|broadcast|all_to_all\w*|barrier)\b"
)
# Where the stack ends in a line of Python, the kernel still names the call in which the main thread
# sleeps.
WCHAN = (
    ("sleep", r"hrtimer_nanosleep|do_nanosleep|common_nsleep.*"),
    ("subprocess", r"do_wait.*|kernel_wait.*"),
    ("queue", r"(anon_)?pipe_(read|write).*|eventfd_read"),
    (
        "socket",
        r".*poll.*|ep_.*|do_select|core_sys_select|inet_csk_accept|sk_wait_data|wait_woken|unix_stream.*|"
        r"skb_wait.*|tcp_.*",
    ),
    ("prompt", r"n_tty_read|tty_.*"),
    (
        "file",
        r"(nfs|rpc_wait|folio_wait|io_schedule|jbd2|fuse|request_wait|wait_on_page|xfs|ext4|lustre|ll_|cl_|wait_for_partner|fifo_open|pipe_wait).*",
    ),
    ("file_lock", r"(flock_lock|locks_lock|posix_lock).*"),
    ("stopped", r"do_signal_stop|ptrace_stop"),
)
# fmt: on


# fmt: off
PHASES = (
    (
        "cleanup",
        r"destroy_process_group|_shutdown|_exit_function|_run_finalizers|_run_exitfuncs|_python_exit|"
        r"_cleanup_process_groups",
        r"torch/distributed/.*|threading.py|multiprocess(ing)?/(util|process).py|concurrent/futures/.*|<frozen.*|"
        r"weakref.py",
    ),
    (
        "cleanup",
        r"shutdown|__exit__|_terminate_pool|terminate",
        r"concurrent/futures/.*|multiprocess(ing)?/pool.py",
    ),
    ("cleanup", r"_shutdown_workers|_clean_up_worker", r"torch(data)?/.*"),
    (
        "cleanup",
        r"__del__|_?(destroy|tear_?down|clean_?up|shut_?down)(_\w+)?|\w+_(tear_?down|clean_?up|shut_?down)",
        r"(?!torch|asyncio/|concurrent/|multiprocess|threading.py|selectors.py|socket.py).*",
    ),
    (
        "cleanup",
        r"_?(tear_?down|clean_?up|shut_?down|destroy|finali[sz]e|close|on_exit|atexit|dispose|__del__)"
        r"(_(all|dist\w*|engines?|process\w*|workers?|train\w*|job|run|servers?|resources?|everything|groups?|parallel\w*|"
        r"loaders?|writers?|threads?|pools?|and_\w+))?|\w+_(clean_?up|tear_?down|shut_?down)|"
        r"stop_\w*(workers?|engines?|servers?|threads?|writers?)",
        r"USER",
    ),
    # A timer's or a profiler's context ends with every step.
    (
        "cleanup",
        r"__a?exit__",
        r"(?!torch|deepspeed/|megatron/|accelerate/|(pytorch_)?lightning|contextlib.py|threading.py|multiprocess|concurrent/|"
        r"asyncio/|tqdm/|.*(timer|timing|profil|nvtx|trac(e|ing)|metric|stats)).*",
    ),
    (
        "cleanup",
        r"finish|end_training|teardown|_teardown|strategy_teardown",
        r"(wandb|accelerate|lightning|pytorch_lightning)/.*",
    ),
    (
        "init",
        r"init_process_group|_store_based_barrier|rendezvous|_tcp_rendezvous_handler|next_rendezvous|"
        r"new_group|new_subgroups.*|_new_group_with_tag|_new_process_group_helper|split_group|"
        r"init_device_mesh|_init_device_mesh|_init_process_groups|_get_or_create_default_group",
        r"torch/distributed/.*",
    ),
    (
        "init",
        r"initialize_model_parallel|init_distributed|init_torch_distributed|init_distributed_environment|"
        r"initialize_megatron|_initialize_distributed|setup_distributed|_sync_module_states|"
        r"_sync_params_and_buffers|_verify_param_shape_across_processes|_ddp_init_helper",
        r".*",
    ),
    ("init", r"_find_and_load.*", r"<frozen importlib.*|importlib/_bootstrap.*"),
    (
        "init",
        r"_?(init|initiali[sz]e|setup|build|create|construct)_?(distributed|dist|model|engine|process_groups?|"
        r"groups?|parallel|trainer|worker|mesh|env)\w*|load_model\w*|build_\w*model\w*",
        r"USER",
    ),
    ("init", r"__init__", r"torch/nn/parallel/distributed.py|torch/distributed/fsdp/.*"),
    (
        "checkpoint",
        r".*",
        r"torch/distributed/checkpoint/.*|torch/serialization.py|safetensors/.*|"
        r".*dist_checkpointing/.*|deepspeed/runtime/checkpoint_engine/.*",
    ),
    (
        "checkpoint",
        r"(?!main|<module>|\w*(forward|backward|gradient|activation|recompute)).*",
        r"(?!torch/utils/|.*(activation|gradient|recompute|checkpoint_wrapper))(.*/)?(async_|background_|dist_)?"
        r"(checkpoint|ckpt|saver).*",
    ),
    # Activation checkpointing only shares the name.
    (
        "checkpoint",
        r"(?!.*(forward|gradient|grad_|activation|layer|block|sequential|wrap|function))\w*(checkpoint|ckpt)\w*",
        r"USER",
    ),
    (
        "checkpoint",
        r"save_pretrained|save_state|_?save_model\w*|async_save|maybe_finalize_async\w*|save_hf\w*|"
        r"_?(save|load)_?\w*(checkpoint|ckpt)\w*|_save_and_\w+",
        r"(?!torch/utils/checkpoint).*",
    ),
    ("data", r".*", r"torch/utils/data/.*|torchdata/.*|webdataset/.*|nvidia/dali/.*|datasets/.*"),
    (
        "data",
        r"__(next|iter|getitem)__|next|get|_?(next|get|fetch|fill|load|read|iter|prefetch)_?\w*",
        r".*(data_?loader|dataset|data_?iter|datapipe|prefetch|streaming|litdata|shards).*",
    ),
    (
        "data",
        r"_?(get|next|load|fetch|prefetch|read)_?(batch|data|sample|minibatch|microbatch)\w*|_?next_batch|"
        r"data_?iter\w*",
        r"USER",
    ),
    (
        "error",
        r"\w*(handle|on|report|recover|catch)\w*_(error|exception|failure|oom|crash|fault|nan)\w*|\w*(error|"
        r"exception|failure)_(handler|handling|loop|recovery)\w*|excepthook\w*|recover\w*|\w*retry\w*|"
        r"\w*_on_(error|failure|exception)|rollback\w*|wait_for_(recovery|debugger|restart|admin)\w*|"
        r"\w*after_(error|failure|exception|crash|oom)\w*|post_mortem\w*|panic\w*|except_\w*|quarantine\w*",
        r"USER",
    ),
    ("error", r"on_\w*exception|_interrupt|_on_exception", r"(pytorch_)?lightning\w*/.*|accelerate/.*|transformers/.*"),
    (
        "error",
        r".*",
        r"(tenacity|backoff|retrying)/.*|retrying.py|pdb.py|bdb.py|code.py|traceback.py|ipdb/.*|pudb/.*|"
        r"debugpy/.*|rpdb/.*",
    ),
    # Requests to services outside the job for samples or rewards: a poll there is no error path.
    (
        "outside",
        r"_?\w*(rollout|generat|trajector|infer(ence|_)|reward|verif|judge|grade)\w*|prepare_batch|"
        r"_?wait_(for|until)\w*|_?wait_(server|engine|results?|samples?|response|health)\w*|_?poll_\w+",
        r"USER",
    ),
    (
        "engine",
        r"event_loop.*|run_busy_loop|worker_busy_loop|_process_input_queue|run_scheduler_process|"
        r"run_engine_core|run_worker.*|run_batch|worker_main",
        r"(sglang|vllm)/.*|.*(scheduler|engine/core|multiproc_executor|disaggregation/\w+|decode|prefill).py",
    ),
)
# The parallel dimension of a library's collective: different ones may be different groups.
DOMAINS = (
    ("pipeline", r"megatron/.*pipeline.*|deepspeed/runtime/pipe/.*|torch/distributed/pipelining/.*"),
    ("expert", r".*(moe|expert|token_dispatcher|deep_ep).*"),
    (
        "tensor",
        r"megatron/.*tensor_parallel/.*|.*(parallel_state|tensor_parallel|tensor/parallel|sequence_parallel|"
        r"vocab_parallel).*",
    ),
    ("context", r".*(context_parallel|ring_attention|ulysses).*"),
    ("sharded data", r"torch/distributed/.*fsdp/.*|deepspeed/runtime/zero/.*"),
    (
        "data",
        r"torch/nn/parallel/distributed.py|megatron/.*distributed/.*|.*(distributed_data_parallel|"
        r"param_and_grad_buffer|distrib_optimizer).*",
    ),
)
# fmt: on


# These call the program back: the code of a module waits, not the import around it.
AROUND = ("import", "load", "compile", "launcher")


@dataclass(frozen=True, slots=True)
class ThreadWait:
    """The wait of one thread.

    `frame` shows the wait, `chain` is the user's call path to it, innermost first. `operation` is
    the outermost name of a collective, as the user called it; `domain` is the parallel dimension
    whose library calls it, or an empty string. `python` are the Python frames of `frames`.
    """

    kind: str
    operation: str
    frame: Frame | None
    chain: tuple[Frame, ...]
    phases: frozenset[str] = frozenset()
    domain: str = ""
    frames: tuple[Frame, ...] = ()
    python: tuple[Frame, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "python", python_only(self.frames))

    @property
    def waits_for_peers(self) -> bool:
        """True if the wait ends only when other ranks arrive."""
        return self.kind in PEER_KINDS


@lru_cache(maxsize=65536)
def specific_wait(function: str, file: str) -> tuple[str, str] | None:
    """Return (kind, operation) where this frame alone identifies the wait."""
    if file.endswith(COLLECTIVE_FILES):
        name = function.lstrip("_")
        if function in COLLECTIVES or name in COLLECTIVES:
            return "collective", function
        if function in P2P:
            return "p2p", function
    return first_match(SPECIFIC, function, file)


@lru_cache(maxsize=65536)
def generic_wait(function: str, file: str) -> tuple[str, str] | None:
    return first_match(GENERIC, function, file)


@lru_cache(maxsize=65536)
def native_wait(function: str) -> tuple[str, str] | None:
    return first_match(NATIVE, function[:300], "")


def first_match(table: tuple[Pattern, ...], function: str, file: str) -> tuple[str, str] | None:
    for row in table:
        if compiled(row.function).fullmatch(function) and compiled(row.file).fullmatch(file):
            return row.kind, row.operation
    return None


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern, cached."""
    return re.compile(pattern)


@lru_cache(maxsize=65536)
def phases_of(function: str, file: str) -> frozenset[str]:
    """Return the phases of the job that one frame indicates. `USER` in a table means: not in a
    library.
    """
    user = not is_library(file)
    return frozenset(
        phase
        for phase, names, files in PHASES
        if compiled(names).fullmatch(function)
        and (user if files == "USER" else compiled(files).fullmatch(file))
    )


@lru_cache(maxsize=65536)
def domain_of(file: str) -> str:
    """Return the parallel dimension that a library file belongs to, or an empty string."""
    return next((name for name, pattern in DOMAINS if compiled(pattern).fullmatch(file)), "")


@lru_cache(maxsize=65536)
def thread_wait_of(raw: tuple[Frame, ...]) -> ThreadWait:
    """Classify a stack from its frames alone."""
    frames = normal_frames(raw)
    python = python_only(frames)
    phases = frozenset(phase for f in python for phase in phases_of(f.function, f.file))
    if any(f.native and compiled(NATIVE_EXIT).fullmatch(f.function) for f in frames):
        phases |= {"cleanup"}
    domain = next((name for f in python if (name := domain_of(f.file))), "")
    kind, operation, frame = wait_of(frames, python)
    return ThreadWait(kind, operation, frame, user_frames(frames), phases, domain, frames)


@lru_cache(maxsize=65536)
def context(frames: tuple[Frame, ...], phases: frozenset[str]) -> str:
    """Return the outermost of `phases` on a stack, or an empty string: a save that closes its
    writer is a save, a clean-up that saves is a clean-up.
    """
    for frame in reversed(python_only(frames)):
        if found := phases_of(frame.function, frame.file) & phases:
            return min(found)
    return ""


def wait_of(frames: tuple[Frame, ...], python: tuple[Frame, ...]) -> tuple[str, str, Frame | None]:
    """Return the innermost specific wait, else the outermost generic one, else that of the native
    frames, else running.
    """
    # A loader's worker runs the program: what that waits for is the wait of the worker.
    in_worker = any(f.function == "_worker_loop" for f in python)
    found = [
        (wait, f)
        for f in python
        if (wait := specific_wait(f.function, f.file))
        and not (wait[0] in AROUND and calls_program(python, f))
        and not (wait[1] == WORKER_LOOP and f is not python[0])
        and not (wait[0] == "data" and in_worker and calls_program(python, f))
    ]
    native = [(wait, f) for f in frames if f.native and (wait := native_wait(f.function))]
    if found:
        (kind, operation), frame = found[0]
        if kind == "collective" and any(wait[0] == "store" for wait, _ in native):
            return "store", "communicator", frame
        if operation == "shm_broadcast" and caller_of(python, frame) == "worker_busy_loop":
            return "idle", ENGINE_LOOP, frame
        if kind in ("import", "load", "compile") and native and native[0][0][0] != "lock":
            return native[0][0][0], native[0][0][1], python[0] if python else frame
        if kind in ("collective", "p2p"):
            # The user called the outermost collective: all_gather_object, not its all_gather.
            outer = [(w, f) for w, f in found if w[0] == kind and f.file == frame.file]
            (kind, operation), frame = outer[-1]
        return kind, operation, frame
    generic = [(wait, f) for f in python if (wait := generic_wait(f.function, f.file))]
    if generic and not calls_program(python, generic[0][1]):
        (kind, operation), frame = outermost_of_run(python, generic[0][1])
        if kind in ("backward", "device") and native and native[0][0][0] == "collective":
            (kind, operation) = native[0][0]
        return kind, operation, frame
    if native:
        (kind, operation), _ = native[0]
        return kind, operation, python[0] if python else native[0][1]
    return "running", "", python[0] if python else (frames[0] if frames else None)


def caller_of(python: tuple[Frame, ...], frame: Frame) -> str:
    outer = python[python.index(frame) :]
    return next((f.function for f in outer if f.file != frame.file), "")


def outermost_of_run(python: tuple[Frame, ...], first: Frame) -> tuple[tuple[str, str], Frame]:
    """Return the last of the generic waits that call each other: `Condition.wait` under
    `Future.result` is a future.
    """
    found = (generic_wait(first.function, first.file) or ("blocked", ""), first)
    for frame in python[python.index(first) :]:
        wait = generic_wait(frame.function, frame.file)
        if wait is None or wait[0] in ("backward", "device"):
            break
        found = (wait, frame)
    return found


def calls_program(python: tuple[Frame, ...], frame: Frame) -> bool:
    """True if user code runs *inside* the generic frame: `Thread.run` calling the program is no
    wait of threading.
    """
    inner = python[: python.index(frame)]
    return any(not is_library(f.file) for f in inner)
