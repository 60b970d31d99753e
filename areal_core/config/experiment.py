# ruff: noqa: RUF009  (option() and section() return dataclass fields)
"""Options of a run: data, saving, debugging, and one class per method."""

from dataclasses import dataclass
from typing import Any

from areal_core.config.allocation import Allocation, resolve_allocation
from areal_core.config.generation import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    SGLangConfig,
    VLLMConfig,
)
from areal_core.config.option import ABOVE_0, AT_LEAST_0, AT_LEAST_1, REQUIRED, option, section
from areal_core.config.scheduling import placed_together
from areal_core.config.services import (
    ClusterSpecConfig,
    LauncherConfig,
    MemoryProfilerConfig,
    PerfTracerConfig,
    SchedulerConfig,
    StatsLoggerConfig,
)
from areal_core.config.train_engine import (
    DPOEngineConfig,
    PPOActorConfig,
    PPOCriticConfig,
    RewardModelConfig,
    TeacherConfig,
    TrainEngineConfig,
)


@dataclass
class DatasetConfig:
    """Source of the training rows, and the batch size."""

    path: str = option(REQUIRED, "File (JSONL, CSV, Parquet), folder, hub name, 'arithmetic' or 'shapes'.")
    type: str = option(REQUIRED, "Kind of rows.", ("rl", "sft", "rw", "dpo"))
    split: str | None = option(None, "Split to use.")
    batch_size: int = option(1, "Rows per step over all ranks.", limits=AT_LEAST_1)
    shuffle: bool = option(True, "Shuffle again every epoch.")
    pin_memory: bool = option(False, "Without effect: rows are not tensors.")
    num_workers: int = option(0, "Without effect: the trainer's process reads rows.")
    drop_last: bool = option(True, "Leave out a last batch that is not full.")
    max_length: int | None = option(None, "Longest prompt in tokens; others are left out.", limits=AT_LEAST_1)
    dataset_kwargs: dict[str, Any] = section(dict, "Arguments of this data source.")
    scheduling_spec: Any = option(None, "Without effect: the trainer's process reads rows.")


@dataclass
class ValidDatasetConfig(DatasetConfig):
    """Source of the validation rows."""

    split: str | None = option("test", "Split to use.")
    shuffle: bool = option(False, "Shuffle again every epoch.")
    drop_last: bool = option(False, "Leave out a last batch that is not full.")


@dataclass
class TimerConfig:
    """Frequency of an action: it runs when the first of the given periods has elapsed."""

    experiment_name: str = option("", "Empty: the experiment's.")
    trial_name: str = option("", "Empty: the experiment's.")
    fileroot: str = option("", "Empty: cluster.fileroot.")
    freq_epochs: int | None = option(None, "Period in epochs.", limits=AT_LEAST_0)
    freq_steps: int | None = option(None, "Period in steps.", limits=AT_LEAST_0)
    freq_secs: int | None = option(None, "Period in seconds.", limits=AT_LEAST_0)


@dataclass
class SaverConfig(TimerConfig):
    """Frequency of Hugging Face checkpoints; write mode of these and of recovery checkpoints."""

    mode: str = option("auto", "Training waits for the write, but for async.", ("auto", "sync", "async"))
    save_last: bool = option(True, "Also write the model after the last step.")


@dataclass
class EvaluatorConfig(TimerConfig):
    """Frequency of evaluation on the validation set; what a run evaluates that does not train."""

    eval_before_train: bool = option(False, "Also before the first step.")
    checkpoints: list[str] | None = option(None, "Models to evaluate, without training; empty: actor.path.")
    rows: str = option("valid", "Rows to evaluate on, without training.", ("valid", "train"))
    max_rows: int | None = option(None, "The first N of these rows; empty: all.", limits=AT_LEAST_1)


@dataclass
class RecoverConfig(TimerConfig):
    """Frequency of recovery checkpoints, and whether a run resumes from them."""

    mode: str = option("disabled", "Whether to resume.", ("disabled", "off", "on", "auto", "fault", "resume"))
    retries: int = option(3, "Maximum restarts of a failed run by the launcher.", limits=AT_LEAST_0)
    no_save_optim: bool = option(False, "No optimiser states: smaller, but no exact resume.")
    no_load_optim: bool = option(False, "Start with fresh optimiser states.")


@dataclass
class DebugConfig:
    """Recording of a run, and replay of a record without an inference engine."""

    dump_rollout_data: bool = option(False, "Record every step.")
    replay_rollout_data: bool = option(False, "Read the batches from a record instead of sampling them.")
    path: str = option("", "Folder of the record; empty: 'record' next to the run's logs.")
    overwrite: bool = option(False, "Record into a folder that already contains a record.")
    record_text: bool = option(True, "Also record decoded prompts and completions, and the calls of agents.")
    dump_scope: str = option(
        "plan", "A step's batch; also plan and outcome; also training inputs.", ("rollout", "plan", "full")
    )
    dump_images: str = option("original", "Files, or the pixels that a model gets.", ("original", "pixels"))
    dump_steps: list[int] | None = option(None, "Steps to record; empty: those of dump_every.")
    dump_every: int = option(1, "Record every n-th step.", limits=AT_LEAST_1)
    dump_queue_steps: int = option(2, "Steps that wait for the disk; 0: none.", limits=AT_LEAST_0)
    dump_when_slow: str = option("wait", "If the disk is slower: wait, or drop steps.", ("wait", "drop"))
    dump_when_failing: str = option("stop", "If recording fails: stop, or go on.", ("stop", "continue"))
    group_readable: bool = option(False, "Let the user's group read: modes 0640 and 0750.")
    max_keep: int | None = option(None, "Latest recorded steps to keep; empty: all.", limits=AT_LEAST_1)
    keep_every: int | None = option(None, "Keep multiples of this, whatever max_keep.", limits=AT_LEAST_1)
    pin_steps: list[int] | None = option(None, "Keep these steps, regardless of any limit.")
    max_size_gb: float | None = option(None, "Remove the oldest steps above this, in GB.", limits=ABOVE_0)
    min_free_gb: float = option(1.0, "GB to keep free: remove old steps, then fail.", limits=AT_LEAST_0)
    save_initial_weights: bool = option(False, "Record the initial weights of the run.")
    anchor_every_steps: int | None = option(None, "Steps between checkpoints for replays.", limits=AT_LEAST_1)
    anchor_max_replay_s: float | None = option(None, "One more where a replay takes longer.", limits=ABOVE_0)
    anchor_max_gb: float | None = option(None, "Remove some above this size, in 1e9 bytes.", limits=ABOVE_0)
    verify_every: int | None = option(
        None, "Compute every n-th step twice and compare bits; empty: never.", limits=AT_LEAST_1
    )
    verify_on: str = option(
        "self", "Who computes again: the same rank, or the one before it.", ("self", "neighbour")
    )
    verify_action: str = option("stop", "If bits differ: stop, or skip the update.", ("stop", "warn"))
    reduction: str = option(
        "library", "Sum over ranks: as NCCL or gloo do, or in rank order.", ("library", "fixed")
    )
    record_bit_sums: bool = option(False, "Record sums of the bits of outputs and gradients.")


@dataclass
class ConsistencyConfig:
    """Comparison of the engine's logprobs with the trainer's during training."""

    every_k_steps: int = option(0, "Compare every k-th step, at no extra pass; 0: never.", limits=AT_LEAST_0)


class TrainsActor:
    """Declare the section that every method has.

    It is a field of each method's own config class, of its own type.
    """

    actor: TrainEngineConfig


@dataclass
class BaseExperimentConfig(TrainsActor):
    """Options of every method."""

    experiment_name: str = option(REQUIRED, "Name of the experiment; part of every path.")
    trial_name: str = option(REQUIRED, "Name of this attempt; part of every path.")
    cluster: ClusterSpecConfig = section(ClusterSpecConfig, "The machines.")
    allocation_mode: str = option("", "Devices, as 'sglang:d4+fsdp:d4'; empty: the engines' backends.")
    seed: int = option(1, "Seed of everything random.", limits=AT_LEAST_0)
    deterministic: bool = option(False, "Bitwise reproducible; stops where that is not possible.")
    device: str = option("auto", "Device of the trainer.", ("auto", "cpu", "cuda"))
    enable_offload: bool = option(False, "Move every model to host memory while it is idle.")
    total_train_epochs: int = option(1, "Passes over the data.", limits=AT_LEAST_1)
    total_train_steps: int | None = option(None, "Stop after this many steps.", limits=AT_LEAST_1)
    total_train_n_seqs: int | None = option(None, "Stop before more rows x samples.", limits=AT_LEAST_1)
    tokenizer_path: str = option("", "Tokenizer; empty: actor.path.")
    train_dataset: DatasetConfig = section(DatasetConfig, "Training rows.")
    valid_dataset: ValidDatasetConfig | None = option(None, "Validation rows.")
    saver: SaverConfig = section(SaverConfig, "Frequency of checkpoints.")
    checkpointer: SaverConfig = section(SaverConfig, "Older name of the timer of recover.")
    evaluator: EvaluatorConfig = section(EvaluatorConfig, "Frequency of evaluation on the validation set.")
    stats_logger: StatsLoggerConfig = section(StatsLoggerConfig, "Destinations of statistics.")
    perf_tracer: PerfTracerConfig | None = option(None, "Traces of the run.")
    memory_profiler: MemoryProfilerConfig | None = option(None, "Memory history of some steps' training.")
    recover: RecoverConfig = section(RecoverConfig, "Whether and how a run resumes.")
    sglang: SGLangConfig = section(SGLangConfig, "The SGLang servers.")
    vllm: VLLMConfig = section(VLLMConfig, "The vLLM servers.")
    launcher: LauncherConfig = section(LauncherConfig, "Resources and environment of each process.")
    scheduler: SchedulerConfig = section(SchedulerConfig, "Scheduler that starts the processes.")
    debug: DebugConfig = section(DebugConfig, "Record and replay.")
    post_exit_hook: str = option("", "Shell command after the last attempt; LOG_DIR is the logs' folder.")

    def __post_init__(self) -> None:
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
    """PPO, GRPO and related algorithms."""

    async_training: bool = option(True, "Asynchronous; rollout.max_head_offpolicyness bounds staleness.")
    gconfig: GenerationHyperparameters = section(GenerationHyperparameters, "Sampling in training.")
    eval_gconfig: GenerationHyperparameters | None = option(None, "Sampling in validation; empty: gconfig.")
    rollout: InferenceEngineConfig = section(InferenceEngineConfig, "The rollout client.")
    actor: PPOActorConfig = section(PPOActorConfig, "The policy.")
    ref: PPOActorConfig | None = option(None, "The reference policy of the KL penalty.")
    critic: PPOCriticConfig | None = option(None, "The value model.")
    teacher: TeacherConfig | None = option(None, "The model that is distilled.")
    reward_model: RewardModelConfig | None = option(None, "The model whose scores are added to the rewards.")
    dynamic_bs: bool = option(False, "Do not replace rejected prompts: the batch becomes smaller.")
    consistency: ConsistencyConfig = section(ConsistencyConfig, "Engine logprobs against the trainer's.")

    @property
    def allocation(self) -> Allocation:
        """The sizes and backends of rollout and training. Raises AllocationError."""
        allocation = resolve_allocation(self.allocation_mode, self.rollout.backend, self.actor.backend)
        return placed_together(allocation, self.actor.scheduling_strategy, self.rollout.scheduling_strategy)


GRPOConfig = PPOConfig
"""The options of GRPO and related algorithms: another name of `PPOConfig`, as AReaL's scripts use.

Every option is on the page "Options" of the reference. `load_expr_config` makes one of a YAML file.
"""


@dataclass
class SFTConfig(BaseExperimentConfig):
    """Supervised fine-tuning."""

    actor: TrainEngineConfig = section(TrainEngineConfig, "The model.")


@dataclass
class RWConfig(BaseExperimentConfig):
    """A reward model, trained on pairs of answers of which one was preferred."""

    actor: TrainEngineConfig = section(TrainEngineConfig, "The model; a language model gets a score head.")


@dataclass
class DPOConfig(BaseExperimentConfig):
    """Direct preference optimisation, on pairs of answers of which one was preferred."""

    actor: DPOEngineConfig = section(DPOEngineConfig, "The policy.")
    ref: TrainEngineConfig | None = option(None, "The reference; empty: the initial policy.")


METHODS: dict[str, type[Any]] = {"sft": SFTConfig, "rw": RWConfig, "dpo": DPOConfig, "ppo": PPOConfig}
