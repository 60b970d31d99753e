"""Replays a record through the trainer's own loop: the same step, from other batches' place of origin."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from areal_core.config import PPOConfig, config_from_dict
from areal_core.trainer.rl import Observer, PPOTrainer
from recorder import Record, open_record
from replayer.before import step_range
from replayer.source import RecordedRollouts

C = TypeVar("C", bound=PPOConfig)
MakeCheck = Callable[[Record, PPOTrainer, int], Observer]  # the last: the first step to report


def replay_config(record: Record, model: str | None = None) -> PPOConfig:
    """The options of the recorded run, changed so that the replay writes nothing where that run wrote.

    Args:
        model: where the model that the run started from lies now, if it has moved.
    """
    config = config_from_dict(record.header.config, PPOConfig, source=f"the config of {record.path}")
    if model is not None:
        config.actor.path = model
        config.tokenizer_path = config.tokenizer_path and model
    return without_side_effects(config)


def without_side_effects(config: C) -> C:
    """The config with logs of its own and no checkpoints."""
    config.trial_name += "-replay"
    config.saver.freq_steps = None
    return config


def replay_hooks(record_folder: str | Path, make_check: MakeCheck, first_step: int = 0) -> dict[str, Any]:
    """Arguments of PPOTrainer that make it a replay: recorded batches in, each step compared."""
    record = open_record(record_folder)
    return {
        "source": lambda trainer: RecordedRollouts(record, trainer.ranks.rank, trainer.ranks.world_size),
        "observers": [lambda trainer: make_check(record, trainer, first_step)],
        "stop_after": record.steps[-1] if record.steps else None,
    }


def replay(
    record_folder: str | Path,
    make_check: MakeCheck,
    *,
    first_step: int | None = None,
    last_step: int | None = None,
    model: str | None = None,
) -> None:
    """Run recorded steps again on this rank, from the nearest anchor, or from the model that the run started from.

    Raises:
        ReplayError: the steps asked for are not in the record, or there is nothing to start from.
    """
    record = open_record(record_folder)
    first, last = step_range(record, first_step, last_step)
    anchors = [step for step in record.anchors() if step <= first]
    start = anchors[-1] if anchors else 0
    for step in range(start, last + 1):
        record.step(step)  # a gap is an error now, not after an hour
    hooks = replay_hooks(record_folder, make_check, first) | {
        "stop_after": last,
        "checkpoint": record.anchor(start) / "checkpoint" if anchors else None,
        "total_steps": record.step(start).plan(0).details["total_steps"],
        "print_steps": False,
    }
    with PPOTrainer(replay_config(record, model), **hooks) as trainer:
        trainer.train()
