"""The phase of a training step that a stack shows, from its frames, source lines and /proc state.

The innermost frame with a row in PHASE_ROWS decides, except that some phases are only the means of
an outer one: a forward pass inside a backward is recomputation, an HTTP request inside a dataset
loads data. C calls have no frame, so the text of the innermost source line is read, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hangdoctor.frames import LIBRARIES, is_library, main_thread, normal, show
from hangdoctor.model import Frame, Thread
from hangdoctor.slow.proc_state import ProcState
from hangdoctor.waits import compiled, phases_of, specific_wait

WAITING = ("collective", "device")
"""Phases that end when other ranks arrive: a rank in one of them is not the one that is late. On a
GPU, waiting for the device is mostly waiting for a collective that is queued on it."""
OTHER = "other"
STARTUP = "startup"
"""Imports, process groups that are made, models that are built: before the first step."""
# Phase to its name in reports, in the order of the columns.
PHASE_NAMES = {
    "input": "data loading",
    "h2d": "host-to-device copy",
    "forward": "forward",
    "backward": "backward",
    "collective": "collective wait",
    "device": "device wait",
    "optimizer": "optimizer",
    "gc": "garbage collection",
    "checkpoint": "checkpoint",
    "swap": "swap or page faults",
    "reward": "reward",
    "rollout": "rollout wait",
    "weight_sync": "weight update",
    "evaluation": "evaluation",
    "compile": "compilation",
    "logging": "logging",
    STARTUP: "start-up",
    "stopped": "stopped",
    OTHER: "other",
}
# fmt: off
# (phase, last component of a function name, file below site-packages); USER: not in a library.
PHASE_ROWS = (
    ("gc", r"\w*garbage_?collect\w*|gc_collect\w*|(run|do|manual|force)_gc|_?collect_garbage\w*", r".*"),
    ("gc", r"collect|run", r".*garbage.*|torchtitan/tools/utils.py"),
    ("evaluation", r"_?(evaluate|validate)(_\w+)?|(run_)?(eval|validation|evaluation)_(loop|step|epoch|model)", r".*"),
    ("compile", r"_compile\w*|compile_inner|_?compile_fx\w*|transform|convert_frame\w*|codegen\w*|inner_compile",
     r"torch/(_dynamo|_inductor)/.*"),
    ("compile", r".*", r"triton/(compiler|backends|runtime/(build|autotuner))\W?.*|torch/utils/cpp_extension.py"),
    ("optimizer", r".*", r"torch/(optim|distributed/optim)/.*|torch/amp/grad_scaler.py|torch/nn/utils/clip_grad.py|"
     r"apex/optimizers/.*|bitsandbytes/optim/.*|deepspeed/ops/.*"),
    ("optimizer", r"_?optimizer_step|_?clip_grad\w*|_take_model_step", r".*"),
    ("backward", r"_engine_run_backward|backward|grad|_run_backward", r"torch/autograd/.*|torch/_tensor.py"),
    ("forward", r"_call_impl|_wrapped_call_impl|inner", r"torch/nn/modules/module.py"),
    ("forward", r"forward|compute_loss|_?forward_(step|pass)|loss_fn|loss_func", r".*"),
    ("h2d", r"pin_memory", r"torch/utils/data/_utils/pin_memory.py"),
    ("h2d", r"to|cuda|_apply", r"torch/nn/modules/module.py|transformers/(tokenization_utils_base|feature_extraction_utils).py"),
    ("h2d", r"to|cuda|pin_memory", r"USER"),
    ("h2d", r"_recursive_to|_to_kwargs|send_to_device|move_data_to_device|to_device|"
     r"_?((move|send|copy|transfer|put|batch|data|tensors?|inputs?)_)+to_?(the_)?(device|gpu|cuda)\w*|"
     r"h2d\w*|host_to_device\w*|_?prefetch_to_(device|gpu)\w*", r".*"),
    ("logging", r".*", r"(wandb|mlflow|swanlab|trackio|comet_ml|tensorboard|tensorboardX|neptune|clearml)/.*|"
     r"torch/utils/tensorboard/.*"),
    ("logging", r"_?(log|report|write|upload|push|flush)_?(to_\w+|metrics?|stats|scalars?|wandb)", r"USER"),
    ("weight_sync", r"_?(update|sync|publish|broadcast|transfer)_(actor_|engine_|policy_|rollout_)?weights?(_\w+)?|"
     r"weight_(update|sync)\w*", r".*"),
    ("reward", r"(?!_?(train|main|run|fit|load|init|log|__))\w*(reward|verif(y|ier)|judge|grade)\w*", r"USER"),
    ("reward", r".*", r".*areal_core/reward/.*|verl/.*reward.*"),
    ("input", r"__getitem__|__getitems__|__next__|\w*collate\w*|tokeni[sz]e\w*|preprocess\w*|"
     r"(load|read|decode)_(image|shard|video|audio|record)\w*", r"USER"),
    ("input", r".*", r"(datasets|tokenizers|webdataset|torchdata|PIL|streaming)/.*|torch/utils/data/.*"),
    ("rollout", r"_?(prepare_batch|rollout_batch|(wait_for|collect|run|get|make|do)_(rollouts?|generations?|trajector\w+)|"
     r"rollout|generate(_\w+)?|agenerate)", r".*"),
    ("rollout", r".*", r".*areal_core/(rollout|agent)/.*|(sglang|vllm|openai)/.*"),
)
# A call into C that the innermost source line names.
SOURCE_ROWS = (
    ("gc", r"\bgc\.(collect|freeze)\("),
    ("h2d", r"\.(cuda|pin_memory)\(|\.to\([^)]*(device|cuda|gpu|non_blocking)"),
    ("optimizer", r"\b(optimizer|optim|opt)\w*\.(step|zero_grad)\("),
    ("checkpoint", r"\bos\.(fsync|fdatasync|sync)\("),
    ("collective", r"\b\w*(work|handle|req|request|pending)s?(\[\w+\])?\.wait\("),
    ("device", r"\.(item|tolist|cpu)\(|\bsynchronize\("),
)
# fmt: on
# Phases of `waits.phases_of` and kinds of waits, in our terms.
SAME = {"checkpoint": "checkpoint", "data": "input", "init": STARTUP}
KINDS = {
    "collective": "collective",
    "p2p": "collective",
    "store": "collective",
    "destroy": "collective",
    "http": "http",
    "rpc": "http",
    "checkpoint": "checkpoint",
    "data": "input",
}
REQUEST = "http"
"""A request to some server: the calls around it decide for what, by default for a rollout."""
MEANS = {
    REQUEST: {"input", "reward", "checkpoint", "logging", "evaluation", "weight_sync", "rollout"},
    "forward": {"backward", "evaluation", "reward", "rollout", "checkpoint"},
    "backward": {"optimizer"},
    "checkpoint": {"input", "weight_sync"},
    "optimizer": set(),
    "input": {"evaluation"},
}
"""Phase to those phases around it which it only serves."""
IMPORTER = "<frozen importlib"
MOST_FAULTS = 50
"""Major page faults between two rounds: more is a rank that waits for its memory."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process did at one moment.

    `place` is the innermost call of the user's program, `busy` is True if the main thread ran or
    was runnable, `gil_held_at` is the place of another thread that held the GIL meanwhile.
    """

    phase: str
    place: str
    busy: bool
    gil_held_at: str = ""

    @property
    def waits(self) -> bool:
        """True if other ranks must arrive."""
        return self.phase in WAITING


Source = Callable[[str, int], str]
"""Returns the text of a line of a file, or an empty string."""


def activity_of(threads: tuple[Thread, ...], proc: ProcState, faults: int, source: Source) -> Activity:
    """Return what a process does.

    Args:
        threads: its stacks.
        proc: its state at the same time.
        faults: major page faults since the last round.
        source: reads a source line.
    """
    main = main_thread(threads)
    if main is None:
        return Activity("stopped" if proc.state in "Tt" else OTHER, "", False)
    place = place_of(main.frames)
    busy = proc.state in "RD"
    if proc.state in "Tt":
        return Activity("stopped", place, False)
    found = phase_of(main.frames, source, proc.has_gpu)
    if found == "backward" and waits_in_backward(main.frames, proc):
        found = "collective"
    if found == OTHER and not busy:
        found, place = of_other_threads(threads, main, source) or (found, place)
    if faults >= MOST_FAULTS and found not in (*WAITING, "input"):
        found = "swap"
    holder = next((t for t in threads if t.holds_gil and t is not main and t.frames), None)
    return Activity(found, place, busy, place_of(holder.frames) if holder and found not in WAITING else "")


def place_of(frames: tuple[Frame, ...]) -> str:
    """Return the innermost call of the user's program, else the innermost call."""
    plain = [frame for f in frames if not (frame := normal(f)).native]
    users = [frame for frame in plain if not is_library(frame.file)]
    return show((users or plain)[0]) if plain else ""


def phase_of(frames: tuple[Frame, ...], source: Source, has_gpu: bool = False) -> str:
    python = [frame for frame in frames if not frame.native]
    if not python:
        return OTHER
    if imports_library(python):
        return STARTUP
    text = source(python[0].file, python[0].line)
    named = next((phase for phase, pattern in SOURCE_ROWS if compiled(pattern).search(text)), None)
    around = [phase for frame in python if (phase := phase_of_frame(normal(frame)))]
    phases = [named, *around] if named and (has_gpu or named != "device") else around
    if not phases:
        return OTHER
    innermost = phases[0]
    outer = next((phase for phase in phases[1:] if phase in MEANS.get(innermost, ())), None)
    return outer or ("rollout" if innermost == REQUEST else innermost)


@lru_cache(maxsize=65536)
def phase_of_frame(frame: Frame) -> str | None:
    wait = specific_wait(frame.function, frame.file)
    if wait and KINDS.get(wait[0]) == "collective":
        return "collective"
    place = frame.file if is_library(frame.file) else "USER"
    for phase, functions, files in PHASE_ROWS:
        if compiled(functions).fullmatch(frame.function) and (
            compiled(files).fullmatch(place) or compiled(files).fullmatch(frame.file)
        ):
            return phase
    if wait and wait[0] in KINDS:
        return KINDS[wait[0]]
    return next((SAME[phase] for phase in SAME if phase in phases_of(frame.function, frame.file)), None)


def imports_library(frames: Sequence[Frame]) -> bool:
    importer = next((i for i, f in enumerate(frames) if f.file.startswith(IMPORTER)), None)
    if importer is None:
        return False
    module = next((f for f in reversed(frames[:importer]) if f.function == "<module>"), None)
    return module is None or is_library(normal(module).file)


def waits_in_backward(frames: tuple[Frame, ...], proc: ProcState) -> bool:
    """True if autograd sleeps in C++: its kernels run on the CPU, so it waits for the reduction.

    A hook or a custom function would show Python frames inside it, and a device thread would run.
    """
    innermost = next(normal(frame) for frame in frames if not frame.native)
    return (
        innermost.function in ("_engine_run_backward", "backward", "_run_backward")
        and innermost.file.startswith(LIBRARIES)
        and proc.state == "S"
        and not proc.autograd_runs
    )


def of_other_threads(threads: tuple[Thread, ...], main: Thread, source: Source) -> tuple[str, str] | None:
    """Return phase and place of a thread that the main thread waits for: the first in a known
    phase.
    """
    for thread in threads:
        if thread is not main and thread.frames:
            phase = phase_of(thread.frames, source)
            if phase not in (OTHER, *WAITING):
                return phase, place_of(thread.frames)
    return None
