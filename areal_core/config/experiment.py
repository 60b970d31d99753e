# ruff: noqa: RUF009  (option() and section() return dataclass fields)
"""A whole run: data, saving, debugging, and one class per method."""

from dataclasses import dataclass
from typing import Any

from areal_core.allocation import Allocation, resolve_allocation
from areal_core.config.engine import (
    DPOEngineConfig,
    PPOActorConfig,
    PPOCriticConfig,
    TeacherConfig,
    TrainEngineConfig,
)
from areal_core.config.generation import GenerationHyperparameters, InferenceEngineConfig, SGLangConfig
from areal_core.config.option import ABOVE_0, AT_LEAST_0, AT_LEAST_1, REQUIRED, option, section
from areal_core.config.services import (
    ClusterSpecConfig,
    LauncherConfig,
    PerfTracerConfig,
    SchedulerConfig,
    StatsLoggerConfig,
)


@dataclass
class DatasetConfig:
    """Where the rows come from, and how many make a batch."""

    path: str = option(REQUIRED, "JSONL file, folder, Hugging Face name, or 'arithmetic' (generated).")
    type: str = option(REQUIRED, "What a row is.", ("rl", "sft", "rw", "dpo"))
    split: str | None = option(None, "Split to take.")
    batch_size: int = option(1, "Rows per step over all ranks.", limits=AT_LEAST_1)
    shuffle: bool = option(True, "A new order every epoch.")
    pin_memory: bool = option(False, "Kept for older files; rows are not tensors here.")
    num_workers: int = option(0, "Kept for older files; rows are read in the trainer's process.")
    drop_last: bool = option(True, "Leave out a last batch that is not full.")
    max_length: int | None = option(
        None, "Longest prompt in tokens; longer rows are left out.", limits=AT_LEAST_1
    )
    dataset_kwargs: dict[str, Any] = section(dict, "Arguments of this data source.")


@dataclass
class ValidDatasetConfig(DatasetConfig):
    """Where the validation rows come from."""

    split: str | None = option("test", "Split to take.")
    shuffle: bool = option(False, "A new order every epoch.")
    drop_last: bool = option(False, "Leave out a last batch that is not full.")


@dataclass
class TimerConfig:
    """How often something happens: whichever of the given periods ends first."""

    experiment_name: str = option("", "Empty: the experiment's.")
    trial_name: str = option("", "Empty: the experiment's.")
    fileroot: str = option("", "Empty: cluster.fileroot.")
    freq_epochs: int | None = option(None, "Epochs between two times.", limits=AT_LEAST_0)
    freq_steps: int | None = option(None, "Steps between two times.", limits=AT_LEAST_0)
    freq_secs: int | None = option(None, "Seconds between two times.", limits=AT_LEAST_0)


@dataclass
class SaverConfig(TimerConfig):
    """When Hugging Face checkpoints are written, and how these and those of `recover` are."""

    mode: str = option(
        "auto", "While training waits (auto, sync), or by a thread beside it.", ("auto", "sync", "async")
    )


@dataclass
class EvaluatorConfig(TimerConfig):
    """When the validation set is run."""

    eval_before_train: bool = option(False, "Also before the first step.")


@dataclass
class RecoverConfig(TimerConfig):
    """When the state that a run can continue from is written, and whether it continues."""

    mode: str = option(
        "disabled", "Whether a run continues.", ("disabled", "off", "on", "auto", "fault", "resume")
    )
    retries: int = option(3, "Times the launcher starts a failed run again.", limits=AT_LEAST_0)
    no_save_optim: bool = option(
        False, "Leave optimiser states out: a smaller checkpoint, which does not lead to the same bits."
    )
    no_load_optim: bool = option(False, "Start with fresh optimiser states.")


@dataclass
class DebugConfig:
    """Recording a run, and running a record again without an inference engine."""

    dump_rollout_data: bool = option(False, "Record every step.")
    replay_rollout_data: bool = option(False, "Take the batches from a record instead of an engine.")
    path: str = option("", "Folder of the record; empty: 'record' beside the run's logs.")
    overwrite: bool = option(False, "Record into a folder that already holds a record.")
    record_text: bool = option(True, "Also record decoded prompts and completions.")
    dump_scope: str = option(
        "plan",
        "What is recorded of a step: its batch; also its plan and outcome; also what was learned from, token by token.",
        ("rollout", "plan", "full"),
    )
    dump_steps: list[int] | None = option(None, "The steps to record; empty: as dump_every says.")
    dump_every: int = option(1, "Record one step in so many.", limits=AT_LEAST_1)
    dump_queue_steps: int = option(
        2, "Steps that may wait for the disk while training goes on; 0: it waits for each.", limits=AT_LEAST_0
    )
    dump_when_slow: str = option(
        "wait",
        "When the disk is slower than training: training waits, or steps are left out.",
        ("wait", "drop"),
    )
    dump_when_failing: str = option(
        "stop",
        "When recording fails, by a full disk or otherwise: the run stops, or goes on without.",
        ("stop", "continue"),
    )
    max_keep: int | None = option(
        None, "Keep so many recorded steps, the last ones; empty: all.", limits=AT_LEAST_1
    )
    keep_every: int | None = option(
        None, "Keep steps that this divides, whatever max_keep says.", limits=AT_LEAST_1
    )
    pin_steps: list[int] | None = option(None, "Keep these steps, whatever any limit says.")
    max_size_gb: float | None = option(
        None,
        "Remove the oldest recorded steps when all take more than so many GB (1e9 bytes).",
        limits=ABOVE_0,
    )
    min_free_gb: float = option(
        1.0,
        "Leave so many GB of the disk free: remove the oldest steps, and fail when that is not enough.",
        limits=AT_LEAST_0,
    )
    save_initial_weights: bool = option(False, "Record the weights that the run starts from.")
    anchor_every_steps: int | None = option(
        None,
        "Put a checkpoint into the record before every so many steps, for `goto` and replays to start from.",
        limits=AT_LEAST_1,
    )
    anchor_max_replay_s: float | None = option(
        None, "Put one there as soon as replaying from the last would take so many seconds.", limits=ABOVE_0
    )
    anchor_max_gb: float | None = option(
        None, "Thin those checkpoints out when all take more than so many GB (1e9 bytes).", limits=ABOVE_0
    )


@dataclass
class ConsistencyConfig:
    """Comparing the engine's logprobs with the trainer's while the run trains."""

    every_k_steps: int = option(
        0, "Compare every k-th step at no further forward; 0: never.", limits=AT_LEAST_0
    )


class TrainsActor:
    """Declare the section that every method has. It is a field of each method's own config class, of its own type."""

    actor: TrainEngineConfig


@dataclass
class BaseExperimentConfig(TrainsActor):
    """Options of every method."""

    experiment_name: str = option(REQUIRED, "Name of the experiment; part of every path.")
    trial_name: str = option(REQUIRED, "Name of this attempt; part of every path.")
    cluster: ClusterSpecConfig = section(ClusterSpecConfig, "The machines.")
    allocation_mode: str = option("", "Who runs where, as 'sglang:d4+fsdp:d4'; empty: each engine's backend.")
    seed: int = option(1, "Seed of everything random.", limits=AT_LEAST_0)
    deterministic: bool = option(False, "Same inputs, same bits; stops where that cannot be had.")
    device: str = option("auto", "Device of the trainer.", ("auto", "cpu", "cuda"))
    enable_offload: bool = option(False, "Let every model leave device memory while it is idle.")
    total_train_epochs: int = option(1, "Passes over the data.", limits=AT_LEAST_1)
    total_train_steps: int | None = option(None, "Stop after so many steps.", limits=AT_LEAST_1)
    total_train_n_seqs: int | None = option(
        None,
        "Stop before more sequences than so many: rows of data times samples of each.",
        limits=AT_LEAST_1,
    )
    tokenizer_path: str = option("", "Tokenizer; empty: actor.path.")
    train_dataset: DatasetConfig = section(DatasetConfig, "Training rows.")
    valid_dataset: ValidDatasetConfig | None = option(None, "Validation rows.")
    saver: SaverConfig = section(SaverConfig, "When checkpoints are written.")
    checkpointer: SaverConfig = section(SaverConfig, "Older name of recover's timer.")
    evaluator: EvaluatorConfig = section(EvaluatorConfig, "When the validation set is run.")
    stats_logger: StatsLoggerConfig = section(StatsLoggerConfig, "Where statistics go.")
    perf_tracer: PerfTracerConfig | None = option(None, "Traces of the run.")
    memory_profiler: Any = option(None, "Snapshots of device memory.")
    recover: RecoverConfig = section(RecoverConfig, "Whether and how a run continues.")
    sglang: SGLangConfig = section(SGLangConfig, "The SGLang servers.")
    vllm: Any = option(None, "Options of vLLM servers; nothing here reads them.")
    launcher: LauncherConfig = section(LauncherConfig, "What the launcher gives each process.")
    scheduler: SchedulerConfig = section(SchedulerConfig, "What starts the processes of a run.")
    debug: DebugConfig = section(DebugConfig, "Record and replay.")

    def __post_init__(self) -> None:
        """`enable_offload` speaks for every model of the run."""
        if self.enable_offload:
            for engine in vars(self).values():
                if isinstance(engine, TrainEngineConfig):
                    engine.offload = True

    @property
    def allocation(self) -> Allocation:
        """The sizes and backends of rollout and training. Raises AllocationError."""
        return resolve_allocation(self.allocation_mode, "", self.actor.backend)


@dataclass
class PPOConfig(BaseExperimentConfig):
    """PPO, GRPO and their relatives."""

    async_training: bool = option(
        True, "Generate while training; how far ahead is rollout.max_head_offpolicyness."
    )
    gconfig: GenerationHyperparameters = section(
        GenerationHyperparameters, "How training completions are sampled."
    )
    eval_gconfig: GenerationHyperparameters | None = option(
        None, "How validation completions are sampled; empty: the same."
    )
    rollout: InferenceEngineConfig = section(InferenceEngineConfig, "The rollout client.")
    actor: PPOActorConfig = section(PPOActorConfig, "The policy.")
    ref: PPOActorConfig | None = option(None, "The reference policy of the KL penalty.")
    critic: PPOCriticConfig | None = option(None, "The value model.")
    teacher: TeacherConfig | None = option(None, "The model that is distilled.")
    dynamic_bs: bool = option(False, "Rejected prompts keep their place in a batch, which is then smaller.")
    consistency: ConsistencyConfig = section(ConsistencyConfig, "Engine logprobs against the trainer's.")

    @property
    def allocation(self) -> Allocation:
        """The sizes and backends of rollout and training. Raises AllocationError."""
        return resolve_allocation(self.allocation_mode, self.rollout.backend, self.actor.backend)


GRPOConfig = PPOConfig


@dataclass
class SFTConfig(BaseExperimentConfig):
    """Supervised fine-tuning."""

    actor: TrainEngineConfig = section(TrainEngineConfig, "The model.")


@dataclass
class RWConfig(BaseExperimentConfig):
    """A reward model, trained on pairs of answers of which one was preferred."""

    actor: TrainEngineConfig = section(
        TrainEngineConfig, "The model; a language model gets a head of scores."
    )


@dataclass
class DPOConfig(BaseExperimentConfig):
    """Direct preference optimisation, on pairs of answers of which one was preferred."""

    actor: DPOEngineConfig = section(DPOEngineConfig, "The policy.")
    ref: TrainEngineConfig | None = option(None, "The reference; empty: the policy as it was at first.")
