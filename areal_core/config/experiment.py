# ruff: noqa: RUF009  (option() and section() return dataclass fields)
"""A whole run: data, saving, logging, cluster, debugging, and one class per method."""

from dataclasses import dataclass
from typing import Any

from areal_core.config.engine import (
    DPOEngineConfig,
    PPOActorConfig,
    PPOCriticConfig,
    TeacherConfig,
    TrainEngineConfig,
)
from areal_core.config.generation import GenerationHyperparameters, InferenceEngineConfig, SGLangConfig
from areal_core.config.option import REQUIRED, option, section


@dataclass
class DatasetConfig:
    """Where the rows come from, and how many make a batch."""

    path: str = option(REQUIRED, "JSONL file, folder, Hugging Face name, or 'arithmetic' (generated).")
    type: str = option(REQUIRED, "What a row is.", ("rl", "sft", "rw", "dpo"))
    split: str | None = option(None, "Split to take.")
    batch_size: int = option(1, "Rows per step over all ranks.")
    shuffle: bool = option(True, "A new order every epoch.")
    pin_memory: bool = option(False, "Kept for older files; rows are not tensors here.")
    num_workers: int = option(0, "Kept for older files; rows are read in the trainer's process.")
    drop_last: bool = option(True, "Leave out a last batch that is not full.")
    max_length: int | None = option(None, "Longest prompt in tokens; longer rows are left out.")
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
    freq_epochs: int | None = option(None, "Epochs between two times.")
    freq_steps: int | None = option(None, "Steps between two times.")
    freq_secs: int | None = option(None, "Seconds between two times.")


@dataclass
class SaverConfig(TimerConfig):
    """When Hugging Face checkpoints are written."""

    mode: str = option("auto", "Write while training waits, or beside it.", ("auto", "sync", "async"))


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
    retries: int = option(3, "Times the launcher starts a failed run again.")
    no_save_optim: bool = option(False, "Leave optimiser states out.")
    no_load_optim: bool = option(False, "Start with fresh optimiser states.")


@dataclass
class WandBConfig:
    """Weights & Biases."""

    mode: str = option("disabled", "Whether runs are sent.", ("disabled", "online", "offline", "shared"))
    wandb_base_url: str = option("", "Server.")
    wandb_api_key: str = option("", "Key; the environment is the better place for it.")
    entity: str | None = option(None, "Entity.")
    project: str | None = option(None, "Project.")
    name: str | None = option(None, "Run.")
    job_type: str | None = option(None, "Kind of run.")
    group: str | None = option(None, "Group.")
    notes: str | None = option(None, "Notes.")
    tags: list[str] | None = option(None, "Tags.")
    config: Any = option(None, "Options to send.")
    id_suffix: str | None = option("train", "Suffix of the run's id.")


@dataclass
class SwanlabConfig:
    """SwanLab."""

    mode: str | None = option(
        "disabled", "Whether runs are sent.", ("disabled", "online", "cloud", "local", "offline", None)
    )
    project: str | None = option(None, "Project.")
    name: str | None = option(None, "Run.")
    config: Any = option(None, "Options to send.")
    logdir: str | None = option(None, "Folder of local runs.")
    api_key: str | None = option(None, "Key; the environment is the better place for it.")


@dataclass
class TrackioConfig:
    """Trackio."""

    mode: str = option("disabled", "Whether runs are written.", ("disabled", "online", "local"))
    project: str | None = option(None, "Project.")
    name: str | None = option(None, "Run.")
    space_id: str | None = option(None, "Hugging Face space.")


@dataclass
class TensorBoardConfig:
    """TensorBoard."""

    path: str | None = option(None, "Folder of event files; empty: off.")


@dataclass
class StatsLoggerConfig:
    """Where statistics go. The JSONL file is always written."""

    experiment_name: str = option("", "Empty: the experiment's.")
    trial_name: str = option("", "Empty: the experiment's.")
    fileroot: str = option("", "Empty: cluster.fileroot.")
    wandb: WandBConfig = section(WandBConfig, "Weights & Biases.")
    swanlab: SwanlabConfig = section(SwanlabConfig, "SwanLab.")
    tensorboard: TensorBoardConfig = section(TensorBoardConfig, "TensorBoard.")
    trackio: TrackioConfig = section(TrackioConfig, "Trackio.")


@dataclass
class NameResolveConfig:
    """How processes find each other."""

    type: str = option("nfs", "Kind of store.", ("nfs", "etcd3", "ray"))
    nfs_record_root: str = option("/tmp/areal/name_resolve", "Folder that all processes see.")
    etcd3_addr: str = option("localhost:2379", "Address of etcd.")
    ray_actor_name: str = option("ray_kv_store", "Name of the Ray actor.")


@dataclass
class ClusterSpecConfig:
    """The machines."""

    name_resolve: NameResolveConfig = section(NameResolveConfig, "How processes find each other.")
    cluster_name: str = option("local", "Name of the cluster.")
    fileroot: str = option("/tmp/areal/", "Where logs, checkpoints and records go; seen by all machines.")
    n_nodes: int = option(32, "Machines.")
    n_gpus_per_node: int = option(8, "GPUs on each.")


@dataclass
class SlurmLauncherConfig:
    """SLURM and the container that jobs run in."""

    srun_additional_args: str = option("--mpi=pmi2 -K --chdir $PWD", "More arguments of srun.")
    additional_bash_cmds: list[str] | None = option(None, "Commands before the job.")
    container_type: str = option("apptainer", "Container runtime.", ("apptainer", "none"))
    mount: str = option("/storage:/storage", "Folders seen inside.")
    trainer_image: str | None = option(None, "Image of the trainer.")
    inference_server_image: str | None = option(None, "Image of the servers.")


@dataclass
class RayLauncherConfig:
    """Ray."""

    address: str | None = option(
        None, "Address of the cluster; empty: RAY_ADDRESS, a cluster on this machine, or a new one."
    )
    placement_timeout_s: float = option(300.0, "Longest wait for the machines that the run needs.")


@dataclass
class LauncherConfig:
    """What the launcher gives each process."""

    inference_server_cpus_per_gpu: int = option(4, "Cores per GPU of a server; 0: not asked for.")
    inference_server_mem_per_gpu: int = option(32 * 1024, "MiB per GPU of a server; 0: not asked for.")
    trainer_cpus_per_gpu: int = option(4, "Cores per GPU of a trainer; 0: not asked for.")
    trainer_mem_per_gpu: int = option(32 * 1024, "MiB per GPU of a trainer; 0: not asked for.")
    inference_server_env_vars: str = option("", "Environment of the servers, 'A=1,B=2'.")
    trainer_env_vars: str = option("", "Environment of the trainers, 'A=1,B=2'.")
    slurm: SlurmLauncherConfig = section(SlurmLauncherConfig, "SLURM.")
    ray: RayLauncherConfig = section(RayLauncherConfig, "Ray.")


@dataclass
class SchedulerConfig:
    """What starts the processes of a run."""

    type: str | None = option(
        None,
        "Where processes are started: on this machine, or by Ray or SLURM.",
        (None, "local", "ray", "slurm"),
    )
    endpoint: str = option("", "Its address.")
    deploy_mode: str = option("", "How it is deployed.")
    functioncall_service_domain: str = option("", "Service that runs reward functions.")
    reward_functioncall_config: dict[str, Any] = section(dict, "Options of that service.")
    reward_model_path: str = option("", "Reward model.")
    reward_model_service_url: str = option("", "Service of the reward model.")


@dataclass
class SessionTracerConfig:
    """One line an episode, beside the trace: how long it took, and where."""

    enabled: bool = option(False, "Write them, if the run is traced.")
    flush_threshold: int = option(256, "Episodes held in memory.")


@dataclass
class PerfTracerConfig:
    """A trace of the run, `trace/trace.json` beside its logs: episodes, generation, reward, pushes, stages, staleness."""

    experiment_name: str = option("", "Empty: the experiment's.")
    trial_name: str = option("", "Empty: the experiment's.")
    fileroot: str = option("", "Empty: cluster.fileroot.")
    enabled: bool = option(False, "Write it.")
    save_interval: int = option(1, "Steps between two writes.")
    profile_steps: list[int] | None = option(
        None, "Steps whose training part torch.profiler watches, if the run is traced."
    )
    session_tracer: SessionTracerConfig | None = option(None, "One line an episode.")


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
    dump_every: int = option(1, "Record one step in so many.")
    dump_queue_steps: int = option(
        2, "Steps that may wait for the disk while training goes on; 0: it waits for each."
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
    max_keep: int | None = option(None, "Keep so many recorded steps, the last ones; empty: all.")
    keep_every: int | None = option(None, "Keep steps that this divides, whatever max_keep says.")
    pin_steps: list[int] | None = option(None, "Keep these steps, whatever any limit says.")
    max_size_gb: float | None = option(
        None, "Remove the oldest recorded steps when all take more than so many GB (1e9 bytes)."
    )
    min_free_gb: float = option(
        1.0, "Leave so many GB of the disk free: remove the oldest steps, and fail when that is not enough."
    )
    save_initial_weights: bool = option(False, "Record the weights that the run starts from.")
    anchor_every_steps: int | None = option(
        None,
        "Put a checkpoint into the record before every so many steps, for `goto` and replays to start from.",
    )
    anchor_max_replay_s: float | None = option(
        None, "Put one there as soon as replaying from the last would take so many seconds."
    )
    anchor_max_gb: float | None = option(
        None, "Thin those checkpoints out when all take more than so many GB (1e9 bytes)."
    )


@dataclass
class ConsistencyConfig:
    """Comparing the engine's logprobs with the trainer's while the run trains."""

    every_k_steps: int = option(0, "Compare every k-th step at no further forward; 0: never.")


@dataclass
class BaseExperimentConfig:
    """What every method needs."""

    experiment_name: str = option(REQUIRED, "Name of the experiment; part of every path.")
    trial_name: str = option(REQUIRED, "Name of this attempt; part of every path.")
    cluster: ClusterSpecConfig = section(ClusterSpecConfig, "The machines.")
    allocation_mode: str = option("", "Who runs where, as 'sglang:d4+fsdp:d4'; empty: each engine's backend.")
    seed: int = option(1, "Seed of everything random.")
    deterministic: bool = option(False, "Same inputs, same bits; stops where that cannot be had.")
    device: str = option("auto", "Device of the trainer.", ("auto", "cpu", "cuda"))
    enable_offload: bool = option(False, "Let engines leave device memory while they are idle.")
    total_train_epochs: int = option(1, "Passes over the data.")
    total_train_steps: int | None = option(None, "Stop after so many steps.")
    total_train_n_seqs: int | None = option(None, "Stop after so many sequences.")
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
    dynamic_bs: bool = option(False, "Let rejected groups shrink the batch.")
    consistency: ConsistencyConfig = section(ConsistencyConfig, "Engine logprobs against the trainer's.")


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
