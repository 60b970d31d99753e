"""Builders of the components that every method has, from sections of the config.

A run starts its process (`start_process`), then builds tokenizer, engine, loader, timers, tracing
and loggers. Builders of further models are in `build_models.py`, of rollouts in
`build_rollouts.py`.
"""

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from areal_core.config import (
    BaseExperimentConfig,
    DPOConfig,
    PPOConfig,
    RWConfig,
    SFTConfig,
    TrainEngineConfig,
    config_to_dict,
    masked_options,
)
from areal_core.config.allocation import Parallel
from areal_core.config.experiment import TimerConfig
from areal_core.config.presets import leaves
from areal_core.config.services import PerfTracerConfig
from areal_core.config.train_engine import FSDPEngineConfig, OptimizerConfig
from areal_core.data import PromptLoader
from areal_core.data.processor import VisionProcessor, load_processor
from areal_core.engine.attention import choose_attention
from areal_core.engine.determinism import enforce_determinism, seed_everything
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.lora import Adapter, add_adapters, trained_parameters
from areal_core.engine.model import apply_liger, checkpoint_names, is_vision, load_model, load_tokenizer_at
from areal_core.engine.offload import step_groups
from areal_core.engine.optimizer import build_optimizer, build_schedule
from areal_core.engine.parity import require_parity
from areal_core.engine.ranks import Ranks, join_ranks
from areal_core.engine.scores import is_score_model
from areal_core.engine.sharding import shard_model
from areal_core.engine.trees.check import share_prefixes
from areal_core.engine.vision_models import freeze_tower, vision_family
from areal_core.errors import ConfigError, load_failure
from areal_core.paths import make_run_folders, run_folder
from areal_core.safety.durable import commit_file
from areal_core.safety.printable import PrintableFormatter
from areal_core.telemetry.loggers import (
    JsonlLogger,
    Logger,
    StatsLogger,
    TensorBoardLogger,
    TrackioLogger,
    WandbLogger,
    without_none,
)
from areal_core.telemetry.stats import Stats
from areal_core.telemetry.trace import Trace
from areal_core.trainer.checkpointing import Frequency
from areal_core.trainer.run_lines import RunLines
from areal_core.trainer.trace_hooks import NO_TRACING, MemoryProfiler, Tracing

UNSAFE_IN_ID = str.maketrans("/\\#?%:", "------")  # Weights & Biases refuses ids with these
AnyConfig = PPOConfig | SFTConfig | RWConfig | DPOConfig  # every config of a run has an `actor`
Dataset = Any  # a sequence of rows
logger = logging.getLogger(__name__)


def start_process(config: AnyConfig) -> Ranks:
    """Set up determinism, threads, the process group and seeds, in this order; a collective."""
    if config.deterministic:
        enforce_determinism(config.device)
    with suppress(OSError):  # a replay or a check may run where the run's folder cannot be created
        make_run_folders(config)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or torch.get_num_threads())
    transformers_logging.set_verbosity(logging.ERROR)
    sizes = trainer_sizes(config)
    ranks = join_ranks(
        config.device,
        sequence_parallel=sizes.context,
        tensor_parallel=sizes.tensor,
        fixed_order=config.debug.reduction == "fixed",
    )
    output = logging.StreamHandler()
    output.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(level=logging.INFO if ranks.rank == 0 else logging.WARNING, handlers=[output])
    # Tensor-parallel ranks compute the same tokens: their dropout must be the same.
    seed_everything(config.seed, ranks.rank // ranks.tensor_parallel_size)
    return ranks


def trainer_sizes(config: AnyConfig) -> Parallel:
    """Return the trainer's parallel sizes.

    Without an allocation, in a config that a script built, ranks are data parallel only.
    """
    has_allocation = config.allocation_mode or config.actor.backend
    return (config.allocation.train if has_allocation else None) or Parallel()


def load_tokenizer(config: AnyConfig) -> PreTrainedTokenizerBase:
    """Load the run's tokenizer, at `tokenizer_path` or else `actor.path`. Raises ModelError."""
    return load_tokenizer_at(config.tokenizer_path or config.actor.path)


def load_processor_of(config: AnyConfig) -> VisionProcessor | None:
    """Load the processor of the actor's checkpoint; None for a text model or a tokenizer alone."""
    folder = Path(config.actor.path)
    if folder.is_dir() and not (folder / "config.json").is_file():
        return None
    try:
        options = AutoConfig.from_pretrained(config.actor.path)
    except Exception as error:  # of any type, see `load_model`
        raise load_failure(config.actor.path, error) from error
    return load_processor(config.actor.path) if is_vision(options) else None


def count_steps(config: BaseExperimentConfig, num_rows: int) -> int:
    """Return the training steps of a run over `num_rows` rows.

    These are all epochs, limited by `total_train_steps` and `total_train_n_seqs`.

    Raises:
        ConfigError: there would be no step.
    """
    batch_size = config.train_dataset.batch_size
    steps = config.total_train_epochs * (num_rows // batch_size)
    if steps == 0:
        raise ConfigError(
            f"the run would have 0 steps: the dataset has {num_rows} rows and "
            f"train_dataset.batch_size is {batch_size}"
        )
    if config.total_train_n_seqs is not None:
        num_seqs = batch_size * (config.gconfig.n_samples if isinstance(config, PPOConfig) else 1)
        if config.total_train_n_seqs < num_seqs:
            raise ConfigError(
                f"the run would have 0 steps: total_train_n_seqs is {config.total_train_n_seqs} "
                f"and a step has {num_seqs} sequences"
            )
        steps = min(steps, config.total_train_n_seqs // num_seqs)
    return min(steps, config.total_train_steps or steps)


def build_engine(
    options: TrainEngineConfig,
    ranks: Ranks,
    total_steps: int,
    load: Callable[..., PreTrainedModel] = load_model,
) -> FSDPEngine:
    """Build a sharded model, read by `load`, and check its log-probs; a collective.

    It can train only if `options.optimizer` is set.

    Raises:
        ModelError: the model cannot be loaded or sharded, or its log-probs are not its own.
    """
    if ranks.is_virtual:
        engine = ranks.once(lambda: build_engine(options, ranks.process, total_steps, load))
        return replace(engine, ranks=ranks, sleeps=False)
    engine = shard_engine(options, ranks, load)
    if options.parity_check:
        require_parity(engine, options.path)
    elif ranks.rank == 0:
        logger.warning(
            "%s: actor.parity_check is false: nothing checks that training computes the model's own log-probs",
            options.path,
        )
    if options.optimizer is not None:
        add_optimizer(engine, options.optimizer, options.fsdp, total_steps)
    if options.enable_tree_training:
        share_prefixes(engine, options.path)
    if options.optimizer is None:
        engine.sleep()  # until it scores the first batch
    return engine


def shard_engine(
    options: TrainEngineConfig, ranks: Ranks, load: Callable[..., PreTrainedModel] = load_model
) -> FSDPEngine:
    """Load and shard a model, without optimizer and without a check; a collective.

    Raises:
        ModelError: the model cannot be loaded or sharded.
    """
    dtype = getattr(torch, options.dtype)
    policy = options.fsdp.wrap_policy
    class_names = policy.transformer_layer_cls_to_wrap if policy else None
    layer_classes = tuple(class_names) if class_names else None
    attention = choose_attention(options.attn_impl, ranks.device.type, dtype)
    logger.debug("%s: attention is %s", options.path, attention.reason)
    fsdp = options.fsdp
    from_rank_0 = fsdp.memory_efficient_load
    if from_rank_0 is None:
        from_rank_0 = ranks.world_size > 1 and ranks.tensor_parallel_size == 1
    model = load(
        options.path,
        attn_implementation=attention.implementation,
        init_from_scratch=options.init_from_scratch,
        disable_dropout=options.disable_dropout,
        without_weights=from_rank_0 and ranks.rank > 0,
    )
    names = checkpoint_names(model)
    if options.freeze_vision_tower:
        freeze_tower(model)
    if options.use_liger:
        apply_liger(model, ranks.device.type)
    adapter = adapt_model(model, options, ranks) if options.use_lora else None
    model = shard_model(
        model,
        ranks,
        dtype=dtype,
        grad_reduce_dtype=getattr(torch, options.grad_reduce_dtype),
        gradient_checkpointing=options.gradient_checkpointing,
        layer_classes=layer_classes,
        compiles=fsdp.compile,
        offloads=fsdp.offload_params,
        from_rank_0=from_rank_0,
        shard_size=fsdp.shard_size,
    )
    return FSDPEngine(
        model,
        ranks,
        dtype,
        temperature=options.temperature,
        max_tokens_per_mb=options.mb_spec.max_tokens_per_mb,
        min_micro_batches=options.mb_spec.n_mbs or 1,
        packing=options.mb_spec.packing_algorithm,
        micro_batches_divisor=options.mb_spec.n_mbs_divisor,
        syncs_every_micro_batch=fsdp.sync_every_micro_batch,
        adapter=adapter,
        sleeps=options.offload and not fsdp.offload_params,
        processor=None if vision_family(model) is None else load_processor(options.path),
        names=names,
    )


def add_optimizer(
    engine: FSDPEngine, options: OptimizerConfig, fsdp: FSDPEngineConfig, total_steps: int
) -> None:
    engine.optimizer = build_optimizer(
        trained_parameters(engine.model).values(),
        kind=options.type,
        lr=options.lr,
        weight_decay=options.weight_decay,
        beta1=options.beta1,
        beta2=options.beta2,
        eps=options.eps,
    )
    engine.schedule = build_schedule(
        engine.optimizer,
        kind=options.lr_scheduler_type,
        total_steps=total_steps,
        warmup_proportion=options.warmup_steps_proportion,
        min_lr_ratio=options.min_lr_ratio,
    )
    engine.gradient_clipping = options.gradient_clipping
    if (options.offload or fsdp.per_layer_optim_step) and not fsdp.offload_params:
        engine.step_groups = step_groups(engine.model, is_per_layer=fsdp.per_layer_optim_step)


def adapt_model(model: PreTrainedModel, options: TrainEngineConfig, ranks: Ranks) -> Adapter:
    """Freeze a model before it is sharded and add the adapters of the section; a collective."""
    adapter = Adapter(options.lora_rank, options.lora_alpha, options.path, is_score_model(model))
    seed = ranks.gather_objects(torch.initial_seed())[0]  # rank 0's, because seeds differ by rank
    dtype = getattr(torch, options.dtype)
    add_adapters(model, adapter, options.target_modules, dtype=dtype, seed=seed)
    return adapter


def build_loader(config: BaseExperimentConfig, ranks: Ranks, dataset: Dataset) -> PromptLoader:
    """Build the loader of this rank's share of the training rows, in the run's order."""
    options = config.train_dataset
    return PromptLoader(
        dataset,
        options.batch_size,
        ranks.data_parallel_rank,
        ranks.data_parallel_size,
        options.shuffle,
        config.seed,
        options.drop_last,
    )


def build_frequency(timer: TimerConfig, ranks: Ranks, steps_per_epoch: int) -> Frequency:
    """Build the timer of a section with `freq_epochs`, `freq_steps` and `freq_secs`.

    All ranks agree on when it is due.
    """
    return Frequency(timer.freq_epochs, timer.freq_steps, timer.freq_secs, steps_per_epoch, ranks.maximum)


def build_tracing(
    config: BaseExperimentConfig, ranks: Ranks | None, stats: Stats, continued: bool = False
) -> Tracing:
    """Build the tracing of this run, or of rollouts without a trainer if `ranks` is None.

    Without `perf_tracer.enabled` or `rollout.enable_rollout_tracing` nothing is traced; without
    `memory_profiler` no memory is recorded.
    """
    options = config.perf_tracer or PerfTracerConfig()
    rollout = config.rollout if isinstance(config, PPOConfig) else None
    memory = None
    if (snapshots := config.memory_profiler) is not None and ranks is not None:
        folder = run_folder(config, "logs") / "memory_snapshots"
        steps = frozenset(snapshots.profile_steps)
        memory = MemoryProfiler(folder, ranks.rank, ranks.device, steps, snapshots.max_entries)
    if not (options.enabled or (rollout is not None and rollout.enable_rollout_tracing)):
        return NO_TRACING if memory is None else Tracing(memory=memory)
    advice: dict[str, Any] = {"batch_size": config.train_dataset.batch_size}
    if isinstance(config, PPOConfig):
        advice |= {
            "max_head_offpolicyness": config.rollout.max_head_offpolicyness,
            "max_concurrent_rollouts": config.rollout.max_concurrent_rollouts,
            "n_samples": config.gconfig.n_samples,
            "max_new_tokens": config.gconfig.max_new_tokens,
            "weight_update_mode": config.actor.weight_update_mode,
        }
    rank, size, name = (0, 1, "rollout_trace") if ranks is None else (ranks.rank, ranks.world_size, "trace")
    trace = Trace(run_folder(config, "logs") / name, rank, size, advice, continued)
    stats.timing_listeners.append(trace.stage)
    sessions = options.session_tracer
    return Tracing(
        trace,
        options.save_interval,
        options.profile_steps or (),
        sessions.flush_threshold if sessions and sessions.enabled else None,
        memory,
    )


@contextmanager
def build_loggers(
    config: BaseExperimentConfig, ranks: Ranks, steps: tuple[int, int], print_steps: bool = True
) -> Iterator[StatsLogger]:
    """Open the loggers of rank 0: stats.jsonl with its config, services, and the printed lines.

    On every rank, signals end what runs inside in order (`RunLines`).

    Args:
        steps: the first one and the one after the last.
    """
    prints = print_steps and ranks.rank == 0
    with RunLines(config, *steps, prints) as lines:
        if ranks.rank != 0:
            yield StatsLogger()
            return
        folder = run_folder(config, "logs")
        if steps[0] == 0:
            set_aside_statistics(folder)
        loggers = [JsonlLogger(folder / "stats.jsonl"), *build_services(config, folder, steps[0])]
        shown = json.dumps(masked_options(config_to_dict(config)), indent=2, default=str)
        if steps[0] and (changed := options_changed(folder / "config.json", json.loads(shown))):
            logger.info("continued with other options: %s", "; ".join(changed))
        commit_file(folder / "config.json", shown)
        with StatsLogger(loggers, printers=[lines]) as stats_logger:
            yield stats_logger


def options_changed(file: Path, options: dict[str, Any]) -> list[str]:
    """Return how options differ from those in a file, without those of recording."""
    with suppress(OSError, ValueError):
        before = dict(leaves(json.loads(file.read_text())))
        return [
            f"{name} changed from {before[name]} to {value}"
            for name, value in leaves(options)
            if before.get(name, value) != value and not name.startswith("debug.")
        ]
    return []


def set_aside_statistics(folder: Path) -> None:
    """Move what an earlier run of this name has logged to the folder `before-N`, next to it."""
    if not (folder / "stats.jsonl").exists():
        return
    aside = folder / f"before-{len(list(folder.glob('before-*'))) + 1}"
    aside.mkdir()
    # By another name, `doctor FOLDER` does not find a second run.
    for name, kept in (("config.json",) * 2, ("consistency.jsonl",) * 2, ("stats.jsonl", "metrics.jsonl")):
        with suppress(FileNotFoundError):
            (folder / name).rename(aside / kept)
    logger.info("an earlier run of this name is not continued: its statistics are in %s", aside)


def build_services(config: BaseExperimentConfig, folder: Path, first_step: int = 0) -> list[Logger]:
    """Build one logger per service; local files are stored under `folder`.

    Args:
        first_step: above 0, the services continue their earlier runs there.

    Raises:
        ConfigError: the package of a configured service is not installed.
    """
    options, built = config.stats_logger, list[Logger]()
    if options.tensorboard.path:
        built.append(TensorBoardLogger(options.tensorboard.path, first_step))
    if options.wandb.mode != "disabled":
        built.append(WandbLogger(dir=str(folder), **wandb_arguments(config)))
    if options.trackio.mode != "disabled":
        trackio = options.trackio
        built.append(
            TrackioLogger(
                trackio.mode,
                trackio.space_id,
                project=trackio.project or config.experiment_name,
                name=trackio.name or config.trial_name,
                config=masked_options(config_to_dict(config)),
            )
        )
    return built


def wandb_arguments(config: BaseExperimentConfig) -> dict[str, Any]:
    """Return the arguments of `wandb.init`.

    The id is that of experiment and trial, so that a continued run stays one run there.
    """
    options = config.stats_logger.wandb
    trial = f"{config.experiment_name}_{config.trial_name}"
    account = without_none(
        {"base_url": options.wandb_base_url or None, "api_key": options.wandb_api_key or None}
    )
    return {
        "mode": options.mode,
        "entity": options.entity,
        "project": options.project or config.experiment_name,
        "name": options.name or config.trial_name,
        "id": "_".join([trial, *([options.id_suffix] if options.id_suffix else [])]).translate(UNSAFE_IN_ID),
        "group": options.group or trial,
        "job_type": options.job_type,
        "notes": options.notes,
        "tags": options.tags,
        "config": masked_options(options.config or config_to_dict(config)),
        "settings": account or None,
    }
