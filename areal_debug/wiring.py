"""Turns `config.debug` and two flags into a recorder or a replay, so that a user's own script needs one line.

config, hooks = wire(argv, GRPOConfig)         # instead of load_expr_config(argv, GRPOConfig)
with PPOTrainer(config, dataset, **hooks) as trainer: ...
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from areal_core.config import PPOConfig, load_expr_config
from areal_core.paths import record_folder, run_folder
from areal_core.trainer.rl import Observer, PPOTrainer
from areal_debug.flags import take_flags
from areal_debug.replay_output import print_and_report
from consistency.in_loop import InLoop
from hangdoctor import heartbeat
from recorder import Record, RecordWriter, commit_anchor
from replayer.check import ReplayCheck
from replayer.run import replay_hooks, without_side_effects

C = TypeVar("C", bound=PPOConfig)


def wire(argv: Sequence[str], config_class: type[C]) -> tuple[C, dict[str, Any]]:
    """Read a config as `load_expr_config` does, and what `--dump-rollout [DIR]` or `--replay-rollout DIR` ask for.

    Returns:
        The config, and keyword arguments for the trainer.

    Raises:
        ConfigError, RecordError, ReplayError: with what to do next.
    """
    rest, overrides = take_flags(argv)
    # Before the user's own overrides, which may say otherwise.
    config, _ = load_expr_config([*rest[:1], *overrides, *rest[1:]], config_class)
    hooks: dict[str, Any] = {"observers": []}
    if config.debug.replay_rollout_data:
        config = without_side_effects(config)
        hooks = replay_hooks(config.debug.path, make_check) | {"print_steps": False}
    elif config.debug.dump_rollout_data:
        hooks["observers"].append(make_recorder)
    if config.consistency.every_k_steps:
        hooks["observers"].append(make_consistency_check)
    if heartbeat.VARIABLE in os.environ:
        hooks["observers"].append(lambda trainer: heartbeat.observe)
    return config, hooks


def make_recorder(trainer: PPOTrainer) -> Observer:
    """An observer that records the run, and the weights that it starts from if asked to."""
    debug, ranks = trainer.config.debug, trainer.ranks
    folder = record_folder(trainer.config)
    writer = RecordWriter(
        folder, ranks.rank, ranks.world_size, ranks.barrier, debug.overwrite, debug.record_text
    )

    def observe(event: str, **facts: Any) -> None:
        writer(event, **facts)
        if event == "start" and debug.save_initial_weights:
            write_anchor(folder, trainer.first_step, ranks.rank, facts["save_checkpoint"])

    return observe


def make_consistency_check(trainer: PPOTrainer) -> Observer:
    """An observer that compares the engine's logprobs with the trainer's while the run trains."""
    file = run_folder(trainer.config, "logs") / "consistency.jsonl"
    return InLoop(
        trainer.config.consistency.every_k_steps, file, trainer.ranks.gather_objects, trainer.ranks.rank
    )


def write_anchor(record: Path, step: int, rank: int, save_checkpoint: Any) -> None:
    """Put a checkpoint into the record that replays of `step` and later can start from; a collective."""
    folder = record / "anchors" / f"{step:06d}"
    save_checkpoint(folder / "checkpoint", step)
    if rank == 0:
        commit_anchor(folder, step)


def make_check(record: Record, trainer: PPOTrainer, first_step: int) -> Observer:
    """An observer that compares each step with the record and prints what it finds on rank 0."""
    check = ReplayCheck(record, trainer.ranks.rank, trainer.ranks.gather_objects, first_step)
    return print_and_report(check) if trainer.ranks.rank == 0 else check
