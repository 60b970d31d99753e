"""Turn `config.debug` and two flags into a recorder or a replay: one line in a user's script.

config, hooks = wire(argv, GRPOConfig)         # instead of load_expr_config(argv, GRPOConfig)
with PPOTrainer(config, dataset, **hooks) as trainer: ...
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from areal_core.config import BaseExperimentConfig, PPOConfig, load_expr_config
from areal_core.config.experiment import METHODS, DebugConfig
from areal_core.engine.checksums import gradient_checksums, parameter_checksums
from areal_core.paths import record_folder, run_folder
from areal_core.trainer.observed import Observer
from areal_core.trainer.rl import PPOTrainer
from areal_debug.render import note
from areal_debug.replay.observer import replay_reporter
from areal_debug.train.script import show_mistakes_as_sentences
from areal_debug.train.script_options import split_flags
from consistency.entry.in_loop import InLoop
from hangdoctor import heartbeat
from recorder import Recording, RecordingOptions, RecordWriter, Retention, open_record
from recorder.storage import is_archive_name, staging_folder
from replayer.anchors import AnchorPolicy, AnchorTaker
from replayer.errors import ReplayError
from replayer.preconditions import step_range
from replayer.request import Request, without_side_effects
from replayer.run import replay_hooks

if TYPE_CHECKING:
    from recorder.archive.live_archive import LiveArchive

C = TypeVar("C", bound=BaseExperimentConfig)
GIGABYTE = 1e9


def wire(argv: Sequence[str], config_class: type[C]) -> tuple[C, dict[str, Any]]:
    """Read a config as `load_expr_config` does, and record or replay the run as it says.

    The flags `--dump-rollout [DIR]` and `--replay-rollout DIR` set the options `debug.*`.

    Args:
        argv: as for `load_expr_config`, with these flags anywhere.
        config_class: `GRPOConfig`, `SFTConfig`, `DPOConfig`, `RWConfig`, or a class of the
            script's own that is derived from one of them.

    Returns:
        The config, and keyword arguments of the trainer: `observers`, and of a replay also
        `source`, `stop_after` and others.

    Raises:
        ConfigError: an option is unknown, or options contradict each other.
        RecordError: the record to replay cannot be read.
        ReplayError: it has no step that can be replayed.
    """
    show_mistakes_as_sentences()
    rest, overrides = split_flags(argv)
    # Before the user's own overrides, which take precedence.
    own = next((i for i, argument in enumerate(rest) if "=" in argument and argument[0] != "-"), len(rest))
    config, _ = load_expr_config([*rest[:own], *overrides, *rest[own:]], config_class)
    hooks: dict[str, Any] = {"observers": []}
    if config.debug.replay_rollout_data:
        config = without_side_effects(config)
        record = open_record(config.debug.path)
        if not isinstance(config, method := METHODS[record.header.method or "ppo"]):
            raise ReplayError(
                f"{record.path} is a record of {method.__name__}, and the script trains by {type(config).__name__}: "
                "give the script of that run, or use `areal-debug replay`"
            )
        request = Request(config.debug.path, *step_range(record, None, None))
        hooks = replay_hooks(request, [partial(replay_reporter, make_recorder=recorder_of)])
    elif config.debug.dump_rollout_data:
        hooks["observers"] += [make_recorder, make_seam_check]
    if isinstance(config, PPOConfig) and config.consistency.every_k_steps:
        file, every = run_folder(config, "logs") / "consistency.jsonl", config.consistency.every_k_steps
        hooks["observers"].append(lambda t: InLoop(every, file, t.ranks.gather_leaders, t.ranks.rank))
    if heartbeat.VARIABLE in os.environ:
        hooks["observers"].append(lambda trainer: heartbeat.observe)
    return config, hooks


def make_recorder(trainer: PPOTrainer) -> Observer:
    """Return an observer that records the run by the options of the section `debug`."""
    debug = trainer.config.debug
    options = replace(recording_options(debug), first_step=trainer.first_step)
    if not is_archive_name(debug.path):
        return recorder_of(trainer, record_folder(trainer.config), options)
    from recorder.archive.live_archive import LiveArchive

    staging = staging_folder(debug.path, run_folder(trainer.config, "logs"))
    archive = None
    if trainer.ranks.rank == 0:
        # an archive cannot be continued, and one with the steps before must not be replaced
        overwrite = debug.overwrite and trainer.first_step == 0
        archive = LiveArchive(staging, debug.path, overwrite, options.retention)
    return recorder_of(trainer, staging, options, archive)


def make_seam_check(trainer: PPOTrainer) -> Observer:
    """Return an observer that says at the end of a run that resumed what the resume changed."""
    config, first, is_first_rank = trainer.config, trainer.first_step, trainer.ranks.rank == 0
    is_continued = 0 < first < trainer.total_steps and not is_archive_name(config.debug.path)

    def observe(event: str, **facts: Any) -> None:
        if event == "end" and facts["error"] is None and is_continued and is_first_rank:
            from areal_debug.resume.seam import line_of

            note(line_of(record_folder(config), first))

    return observe


def recorder_of(
    trainer: PPOTrainer,
    folder: Path,
    options: RecordingOptions,
    archive: "LiveArchive | None" = None,
    policy: AnchorPolicy | None = None,
) -> Observer:
    """Return an observer that records the run into a folder or an archive.

    `policy` of the anchors is by default that of the section `debug`.
    """
    ranks = trainer.ranks
    writer = None
    if ranks.is_group_leader:
        row, num_rows = ranks.data_parallel_rank, ranks.data_parallel_size
        writer = RecordWriter(folder, row, num_rows, ranks.gather_rows, options, archive=archive)
    anchors = AnchorTaker(folder, ranks.rank, policy or anchor_policy(trainer.config.debug))
    checksums = {
        "gradients": ("gradients", gradient_checksums),
        "optimizer": ("weights", parameter_checksums),
    }

    def wants(step: int) -> bool:
        # Checksums are collectives of all ranks; only data-parallel leaders know if it ended.
        return ranks.share(writer is not None and writer.wants(step))

    def observe(event: str, **facts: Any) -> None:
        if writer is not None:
            writer(event, **facts)
        if options.recording.scope == "full" and event in checksums and wants(facts["step"]):
            of, compute = checksums[event]
            values = compute(trainer.actor.model, ranks).tensors
            if writer is not None:
                writer("checksums", step=facts["step"], of=of, values=values)
        ended = writer is not None and writer.ended is not None
        if event == "weights":  # all ranks save an anchor, or none
            ended = ranks.share(ended)
        # The folder may be another run's by now. Virtual ranks have no shards of their own to save.
        if not ended and not ranks.is_virtual:
            anchors(event, **facts)

    return observe


def anchor_policy(debug: DebugConfig) -> AnchorPolicy:
    return AnchorPolicy(
        every_steps=debug.anchor_every_steps,
        max_replay_s=debug.anchor_max_replay_s,
        max_bytes=None if debug.anchor_max_gb is None else int(debug.anchor_max_gb * GIGABYTE),
        at_start=debug.save_initial_weights,
    )


def recording_options(debug: DebugConfig) -> RecordingOptions:
    limits = Retention(
        keep_last=debug.max_keep,
        keep_every=debug.keep_every,
        pinned=frozenset(debug.pin_steps or ()),
        max_bytes=None if debug.max_size_gb is None else int(debug.max_size_gb * GIGABYTE),
        min_free_bytes=int(debug.min_free_gb * GIGABYTE),
    )
    steps = None if debug.dump_steps is None else tuple(debug.dump_steps)
    return RecordingOptions(
        Recording(debug.dump_scope, debug.dump_every, steps),
        text=debug.record_text,
        images=debug.dump_images,
        overwrite=debug.overwrite,
        queue_steps=debug.dump_queue_steps,
        when_slow=debug.dump_when_slow,
        when_failing=debug.dump_when_failing,
        retention=limits,
    )
