"""Plan a run from its options and local files: no network, no device, no process.

The functions of a real run are called, not copied: allocation, placement, number of steps and
periods are computed by the same code.
"""

import heapq
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from areal_core.config import (
    DPOConfig,
    PPOActorConfig,
    PPOConfig,
    PPOCriticConfig,
    RWConfig,
    TrainEngineConfig,
)
from areal_core.config.allocation import Allocation, Parallel
from areal_core.config.checks import engines_of
from areal_core.config.experiment import DatasetConfig
from areal_core.config.vision_checks import model_type
from areal_core.data.read import file_of_split, get_dataset, length_of, read_rows, tokenized
from areal_core.engine.memory_plan import AnyConfig, Memory, estimate_memory
from areal_core.errors import ConfigError
from areal_core.launch.job import Job
from areal_core.launch.placement import Placement, place
from areal_core.paths import run_folder
from areal_core.trainer.build import count_steps, load_tokenizer
from areal_debug.render import count

LONGEST_TEXTS = 64  # of the dataset
DATA_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
METHODS = {
    "rl": "policy optimisation",
    "sft": "supervised fine-tuning",
    "rw": "reward model",
    "dpo": "direct preference optimisation",
}


@dataclass(frozen=True)
class Processes:
    """Processes of one kind: how many, with how many devices each, and where."""

    what: str
    count: int
    devices_each: int
    where: str


@dataclass(frozen=True)
class Steps:
    """Rows of the dataset and steps of the run.

    If the rows cannot be counted here, `rows` is the reason and `total` an upper bound from the
    config.
    """

    num_rows: int | None
    rows: str
    per_epoch: int | None
    total: int | None


@dataclass(frozen=True)
class DryRun:
    """Everything that is known about a run before it starts."""

    script: str
    config_file: str
    method: str
    model: str
    allocation: str
    processes: tuple[Processes, ...]
    steps: Steps | None  # None: the allocation has no training part
    memory: Memory
    update: str  # "" where nothing is trained
    logs: str
    notes: tuple[str, ...]
    unchecked: tuple[str, ...]  # what the run needs and nobody looked at


def plan_run(script: Path, config_file: str, config: AnyConfig, notes: list[str]) -> DryRun:
    """Plan a run whose config has been checked; `notes` are those of `load_with_notes`.

    Raises:
        ConfigError: the job cannot be placed, has no step to train, or needs a package that is not
            installed.
        DatasetError: the dataset is local and cannot be read.
    """
    allocation = config.allocation
    refuse_missing_packages(config)
    refuse_missing_files(config)
    steps = plan_length(config) if allocation.trains else None
    return DryRun(
        script=str(script),
        config_file=config_file,
        method=METHODS[config.train_dataset.type],
        model=config.actor.path,
        allocation=str(allocation),
        processes=tuple(place_processes(config, allocation)),
        steps=steps,
        memory=estimate_memory(config, allocation, longest_row(config)),
        update=plan_update(config, config.actor, allocation) if steps is not None else "",
        logs=str(run_folder(config, "logs")),
        notes=(*notes, *note_on_devices(config, allocation), *note_on_pictures(config, allocation)),
        unchecked=tuple(unchecked(config)),
    )


def refuse_missing_packages(config: AnyConfig) -> None:
    """Raise ConfigError for a package that an option needs and that is not installed."""
    needed = {
        "stats_logger.wandb.mode": ("wandb", config.stats_logger.wandb.mode != "disabled"),
        "stats_logger.trackio.mode": ("trackio", config.stats_logger.trackio.mode != "disabled"),
        "scheduler.type": ("ray", config.scheduler.type == "ray"),
        "use_liger": ("liger_kernel", any(engine.use_liger for _, engine in engines_of(config))),
    }
    for option, (package, is_needed) in needed.items():
        if is_needed and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{option} needs the package {package}, which is not installed here: install it"
            )


def sources_of(config: AnyConfig) -> dict[str, str]:
    """Return the paths of models and data sets by option; "" and built-in data sets left out."""
    found = {"train_dataset.path": config.train_dataset.path, "tokenizer_path": config.tokenizer_path}
    if config.valid_dataset is not None:
        found["valid_dataset.path"] = config.valid_dataset.path
    found |= {f"{name}.path": engine.path for name, engine in engines_of(config)}
    return {option: path for option, path in found.items() if path and path != "arithmetic"}


def refuse_missing_files(config: AnyConfig) -> None:
    """Raise ConfigError for a model or data set that is named by a local path and is not there.

    `name` and `owner/name` may be names of a hub.
    """
    missing = []
    for option, path in sources_of(config).items():
        is_local = path.startswith(("/", ".", "~")) or path.count("/") > 1 or Path(path).suffix in DATA_FILES
        if is_local and not Path(path).expanduser().exists():
            missing.append(f"{option}: {path} does not exist: give a file or folder of this machine")
    if missing:
        raise ConfigError("\n".join(missing))


def unchecked(config: AnyConfig) -> Iterator[str]:
    """Yield what is not on this machine or runs code, so that nobody has looked at it."""
    for option, path in sources_of(config).items():
        if not Path(path).expanduser().exists():
            yield f"{option} ({path} would be downloaded)"
    if config.train_dataset.type == "rl":
        yield "what the reward function and workflow do (they are not imported)"


def plan_length(config: AnyConfig) -> Steps:
    """Count rows, steps per epoch, and steps of the run, as far as local files allow.

    Raises:
        ConfigError: the run would have no step.
    """
    data = config.train_dataset
    if config.debug.replay_rollout_data:
        return Steps(None, "a replay has the steps of its record", None, None)
    num_rows, text = count_rows(config, data)
    if num_rows is None:
        return Steps(None, text, None, config.total_train_steps)
    return Steps(num_rows, text, num_rows // data.batch_size, count_steps(config, num_rows))


def columns_of(config: AnyConfig) -> set[str]:
    """Return the columns of the rows that a reward gets, none where they are not on this machine."""
    data = config.train_dataset
    if data.type != "rl" or count_rows(config, data)[0] is None:
        return set()
    rows = read_rows(data.path, data.split, dict(data.dataset_kwargs))
    return {"messages", *(column for row in rows[:1] for column in row)}


def count_rows(config: AnyConfig, data: DatasetConfig) -> tuple[int | None, str]:
    path = Path(data.path)
    if data.path != "arithmetic" and not path.exists():
        return None, f"{data.path} is not a local file or folder"
    if path.is_dir() and file_of_split(path, data.split) is None:
        return None, f"{data.path} contains no JSONL or CSV files"
    if data.max_length is None:
        return len(read_rows(data.path, data.split, dict(data.dataset_kwargs))), data.path
    if not Path(config.tokenizer_path or config.actor.path).is_dir():
        return (
            None,
            f"rows of more than {data.max_length} tokens are dropped, and the tokenizer is not a local folder",
        )
    rows = get_dataset(data, tokenizer=load_tokenizer(config))
    return len(rows), f"{data.path}, prompts of at most {data.max_length} tokens"


def longest_row(config: AnyConfig) -> int | None:
    """Return the tokens of the longest prompt, row or side of a pair; None if they are not local.

    Only the rows of the longest texts are tokenized.
    """
    data, tokenizer_path = config.train_dataset, Path(config.tokenizer_path or config.actor.path)
    is_local = data.path == "arithmetic" or (
        Path(data.path).exists() and count_rows(config, data)[0] is not None
    )
    if not is_local or not tokenizer_path.is_dir():
        return None
    rows = read_rows(data.path, data.split, dict(data.dataset_kwargs))
    longest = heapq.nlargest(LONGEST_TEXTS, rows, key=lambda row: len(str(row)))
    tokenizer = load_tokenizer(config)
    unlimited = replace(data, max_length=None)
    lengths = [length_of(row, data.type, tokenizer) for row in tokenized(longest, unlimited, tokenizer)]
    limit = data.max_length or max(lengths, default=0)
    return min(limit, max(lengths, default=limit))


def plan_update(config: AnyConfig, model: TrainEngineConfig, allocation: Allocation) -> str:
    """Return the optimizer steps of one step, and what computes the attention."""
    assert allocation.train is not None
    limit, num_ranks = model.mb_spec.max_tokens_per_mb, allocation.train.data
    rows, minibatches = config.train_dataset.batch_size // num_ranks, 1
    if isinstance(config, PPOConfig):
        rows *= config.gconfig.n_samples
    if isinstance(model, PPOActorConfig | PPOCriticConfig):
        minibatches = model.ppo_n_minibatches
    micro = (
        f"micro-batches of at most {limit:,} tokens"
        if limit
        else count(model.mb_spec.n_mbs or 1, "micro-batch")
    )
    checkpointing = ", activations recomputed" if model.gradient_checkpointing else ""
    compiled = ", layers compiled" if model.fsdp.compile else ""
    unit = "pairs" if isinstance(config, RWConfig | DPOConfig) else "sequences"
    times = "1 optimizer step" if minibatches == 1 else f"{minibatches} optimizer steps"
    times += f" of an adapter of rank {model.lora_rank}" * model.use_lora
    return (
        f"{times} over {rows:,} {unit} {row_owner(allocation.train)}, in {micro}{checkpointing}{compiled}; "
        f"attention is {describe_attention(config.device, model)}"
    )


def describe_attention(device: str, model: TrainEngineConfig) -> str:
    """Describe the kernel that `attn_impl` selects, on a GPU unless the config names a CPU."""
    import torch

    from areal_core.engine.attention import choose_attention

    kind = "cpu" if device == "cpu" else "cuda"
    return choose_attention(model.attn_impl, kind, getattr(torch, model.dtype)).reason


def row_owner(sizes: Parallel) -> str:
    """Describe which ranks share rows: one rank, or a group and how it divides them."""
    if sizes.context * sizes.tensor == 1:
        return "per rank"
    shares = [f"their tokens {sizes.context} ways"] * (sizes.context > 1)
    shares += [f"the layers {sizes.tensor} ways"] * (sizes.tensor > 1)
    return f"per group of {sizes.context * sizes.tensor} ranks, which divide {' and '.join(shares)}"


def place_processes(config: AnyConfig, allocation: Allocation) -> list[Processes]:
    """Place servers and ranks on devices or machines. Raises ConfigError if they do not fit."""
    with_servers = not config.debug.replay_rollout_data
    job = Job((), config, allocation, {}, run_folder(config, "logs"), with_servers)
    found, is_local = [], config.scheduler.type in (None, "local")
    placement = None if is_local else place(job)
    num_taken = 0
    if job.uses_given_servers and allocation.rollout is not None:
        rollout = allocation.rollout
        size = rollout.world_size // rollout.data
        found.append(Processes("SGLang server that runs already", rollout.data, size, job.given_servers))
    if job.num_servers:
        assert allocation.rollout is not None
        num_taken = allocation.rollout.world_size
        where = (
            on_this_machine(config, 0, num_taken)
            if placement is None
            else on_machines(placement.server_nodes, placement)
        )
        name = {"sglang": "SGLang server", "vllm": "vLLM server"}[str(allocation.rollout_backend)]
        found.append(Processes(name, job.num_servers, num_taken // job.num_servers, where))
    if allocation.train is not None:
        world = allocation.train.world_size
        first = 0 if allocation.shares_devices else num_taken
        where = (
            on_this_machine(config, first, world)
            if placement is None
            else on_machines(range(placement.num_trainer_nodes), placement)
        )
        kind = "FSDP rank with the embedded engine" if allocation.engine == "embedded" else "FSDP rank"
        kind = kind if allocation.trains else "evaluating FSDP rank"
        found.append(Processes(kind, world, 1, where + describe_groups(allocation.train)))
    elif allocation.kind == "eval":
        where = "without a GPU" if allocation.has_servers else on_this_machine(config, 0, 1)
        found.append(Processes("process that evaluates and does not train", 1, 1, where))
    return found


def describe_groups(sizes: Parallel) -> str:
    """Describe how ranks share rows; empty if none do.

    For example `; 2 groups of 4 with the same rows: 2 share the tokens (c) x 2 share the layers
    (t)`.
    """
    shared = {"tokens (c)": sizes.context, "layers (t)": sizes.tensor}
    text = " x ".join(f"{size} share the {what}" for what, size in shared.items() if size > 1)
    num_groups = f"{sizes.data} group{'s' * (sizes.data != 1)}"
    return text and f"; {num_groups} of {sizes.context * sizes.tensor} with the same rows: {text}"


def on_this_machine(config: AnyConfig, first: int, count: int) -> str:
    """Name the devices that the local launcher assigns: servers take the first ones."""
    if config.device == "cpu":
        return "CPU of this machine"
    if config.device != "cuda" and not torch.cuda.is_available():
        return "CPU of this machine, where no GPU is found"
    return f"GPU {numbers(range(first, first + count))} of the machine where it is started"


def on_machines(nodes: Sequence[int], placement: Placement) -> str:
    return f"machine {numbers(nodes)} (of {placement.num_nodes}, from 0)"


def numbers(found: Sequence[int]) -> str:
    """Format a range as `0-3`, or `2`."""
    low, high = min(found), max(found)
    return f"{low}" if low == high else f"{low}-{high}"


def note_on_devices(config: AnyConfig, allocation: Allocation) -> list[str]:
    sides = [side for side in (allocation.rollout, allocation.train) if side is not None]
    num_devices = max if allocation.kind == "colocated" else sum
    needed, per_node = num_devices(side.world_size for side in sides), config.cluster.n_gpus_per_node
    if config.device == "cpu" or config.scheduler.type in ("ray", "slurm") or needed <= per_node:
        return []
    return [
        f"the allocation {allocation} needs {needed} devices on one machine and cluster.n_gpus_per_node is {per_node}: "
        "to use several machines, set scheduler.type to ray or slurm"
    ]


def note_on_pictures(config: AnyConfig, allocation: Allocation) -> list[str]:
    kind = model_type(config.actor.path, "vision_config")
    if kind is None or allocation.rollout_backend != "sglang" or config.sglang.enable_multimodal:
        return []
    return [
        f"actor.path is a vision model of type {kind!r} and sglang.enable_multimodal is false: the servers take text "
        "alone; for pictures in prompts set it to true, with VisionRLVRWorkflow or an agent"
    ]
