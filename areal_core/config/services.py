# ruff: noqa: RUF009  (option() and section() return dataclass fields)
"""Options of services: loggers, service discovery, machines, launchers, traces."""

from dataclasses import dataclass
from typing import Any

from areal_core.config.option import ABOVE_0, AT_LEAST_0, AT_LEAST_1, option, section
from areal_core.safety.private import default_names_root, default_root


@dataclass
class WandBConfig:
    """Weights & Biases."""

    mode: str = option("disabled", "Whether runs are sent.", ("disabled", "online", "offline", "shared"))
    wandb_base_url: str = option("", "Server.")
    wandb_api_key: str = option("", "Key; better set in the environment.")
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
    api_key: str | None = option(None, "Key; better set in the environment.")


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
    """Destinations of statistics. The JSONL file is always written."""

    experiment_name: str = option("", "Empty: the experiment's.")
    trial_name: str = option("", "Empty: the experiment's.")
    fileroot: str = option("", "Empty: cluster.fileroot.")
    wandb: WandBConfig = section(WandBConfig, "Weights & Biases.")
    swanlab: SwanlabConfig = section(SwanlabConfig, "SwanLab.")
    tensorboard: TensorBoardConfig = section(TensorBoardConfig, "TensorBoard.")
    trackio: TrackioConfig = section(TrackioConfig, "Trackio.")


@dataclass
class NameResolveConfig:
    """Service discovery between processes."""

    type: str = option("nfs", "Kind of store.", ("nfs", "etcd3", "ray"))
    nfs_record_root: str = section(default_names_root, "Folder of all processes, by default this user's.")
    etcd3_addr: str = option("localhost:2379", "Address of etcd.")
    ray_actor_name: str = option("ray_kv_store", "Name of the Ray actor.")


@dataclass
class ClusterSpecConfig:
    """The machines."""

    name_resolve: NameResolveConfig = section(NameResolveConfig, "Service discovery between processes.")
    cluster_name: str = option("local", "Name of the cluster.")
    fileroot: str = section(
        default_root,
        "Root of logs, checkpoints and records, shared by all machines; by default a folder of this user.",
    )
    n_nodes: int = option(32, "Number of machines.", limits=AT_LEAST_1)
    n_gpus_per_node: int = option(8, "GPUs per machine.", limits=AT_LEAST_0)


@dataclass
class SlurmLauncherConfig:
    """SLURM and the container that jobs run in."""

    srun_additional_args: str = option("--mpi=pmi2 -K --chdir $PWD", "More arguments of srun.")
    additional_bash_cmds: list[str] | None = option(None, "Commands before the job.")
    container_type: str = option("apptainer", "Container runtime.", ("apptainer", "none"))
    mount: str = option("/storage:/storage", "Folders mounted in the container.")
    trainer_image: str | None = option(None, "Image of the trainer.")
    inference_server_image: str | None = option(None, "Image of the servers.")


@dataclass
class RayLauncherConfig:
    """Ray."""

    address: str | None = option(None, "Of the cluster; empty: RAY_ADDRESS, this machine's, or a new one.")
    placement_timeout_s: float = option(300.0, "Seconds to wait for the machines.", limits=ABOVE_0)


@dataclass
class LauncherConfig:
    """Resources and environment of each process."""

    inference_server_cpus_per_gpu: int = option(4, "Cores per GPU of a server; 0: not requested.")
    inference_server_mem_per_gpu: int = option(32 * 1024, "MiB per GPU of a server; 0: not requested.")
    trainer_cpus_per_gpu: int = option(4, "Cores per GPU of a trainer; 0: not requested.")
    trainer_mem_per_gpu: int = option(32 * 1024, "MiB per GPU of a trainer; 0: not requested.")
    inference_server_env_vars: str = option("", "Environment of the servers, 'A=1,B=2'.")
    trainer_env_vars: str = option("", "Environment of the trainers, 'A=1,B=2'.")
    slurm: SlurmLauncherConfig = section(SlurmLauncherConfig, "SLURM.")
    ray: RayLauncherConfig = section(RayLauncherConfig, "Ray.")


REWARD_SERVICE = "http://localhost:30000/classify"


@dataclass
class SchedulerConfig:
    """The scheduler that starts the processes of a run."""

    type: str | None = option(None, "This machine, Ray or SLURM.", (None, "local", "ray", "slurm"))
    endpoint: str = option("", "Its address.")
    deploy_mode: str = option("", "How it is deployed.")
    functioncall_service_domain: str = option("", "Service that runs reward functions.")
    reward_functioncall_config: dict[str, Any] = section(dict, "Options of that service.")
    reward_model_path: str = option("", "Model on a server that gives rewards; its tokenizer is read.")
    reward_model_service_url: str = option(REWARD_SERVICE, "Its server: SGLang's /classify.")


@dataclass
class SessionTracerConfig:
    """One line per episode, next to the trace: its duration by stage."""

    enabled: bool = option(False, "Write them, if the run is traced.")
    flush_threshold: int = option(256, "Episodes buffered in memory.")


@dataclass
class MemoryProfilerConfig:
    """Allocations of the training part of some steps, in `memory_snapshots` next to its logs."""

    profile_steps: list[int] = section(lambda: [0, 1], "Steps to record.")
    max_entries: int = option(100_000, "Newest allocations that a GPU's history keeps.", limits=AT_LEAST_1)


@dataclass
class PerfTracerConfig:
    """A trace of the run, `trace/trace.json` next to its logs.

    It shows episodes, generation, reward, weight updates, stages and staleness.
    """

    experiment_name: str = option("", "Empty: the experiment's.")
    trial_name: str = option("", "Empty: the experiment's.")
    fileroot: str = option("", "Empty: cluster.fileroot.")
    enabled: bool = option(False, "Write it.")
    save_interval: int = option(1, "Steps between two writes.")
    profile_steps: list[int] | None = option(None, "Steps that torch.profiler profiles, if traced.")
    session_tracer: SessionTracerConfig | None = option(None, "One line per episode.")
