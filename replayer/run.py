"""Replay a record through the trainer's own loop: only the source of the batches differs."""

from collections.abc import Callable, Sequence
from typing import Any

from areal_core.config import BaseExperimentConfig, DPOConfig, RWConfig, SFTConfig
from areal_core.engine.ranks import Ranks, leave_ranks
from areal_core.reward import RewardPool
from areal_core.trainer.build import start_process
from areal_core.trainer.dpo import DPOTrainer
from areal_core.trainer.observed import Observer
from areal_core.trainer.reward_model import RWTrainer
from areal_core.trainer.rl import PPOTrainer
from areal_core.trainer.sft import SFTTrainer
from recorder import Record, open_record
from replayer.anchors import CHECKPOINT
from replayer.check import ReplayCheck, ReplayReport
from replayer.errors import ReplayError
from replayer.preconditions import check_model, check_steps_present, nearest_anchor, step_range
from replayer.request import Request, replay_config
from replayer.source import Edit, EditedRollouts, RecordedRollouts, filter_rows, load_edit, reward_rows
from replayer.virtual_ranks import run_as_ranks

MakeObserver = Callable[[Record, Any, Request], Observer]
SUPERVISED: dict[type[BaseExperimentConfig], type[Any]] = {
    SFTConfig: SFTTrainer,
    DPOConfig: DPOTrainer,
    RWConfig: RWTrainer,
}


def replay_hooks(request: Request, make_observers: Sequence[MakeObserver]) -> dict[str, Any]:
    """Return arguments of a trainer for a replay: recorded batches, observed steps."""
    record = open_record(request.record)
    return {
        "source": lambda trainer: make_source(record, trainer, request),
        "observers": [lambda trainer, make=make: make(record, trainer, request) for make in make_observers],
        "stop_after": request.last,
        "print_steps": False,
        "stops_at_nonfinite": False,
    }


def make_source(record: Record, trainer: PPOTrainer, request: Request) -> RecordedRollouts | EditedRollouts:
    source = RecordedRollouts(record, trainer.ranks.data_parallel_rank, trainer.ranks.data_parallel_size)
    edits: list[Edit] = []
    closing: list[Callable[[], None]] = []
    if request.row_filter is not None:
        edits.append(filter_rows(request.row_filter, trainer.tokenizer))
    if request.edit is not None:
        edits.append(load_edit(request.edit))
    if request.reward is not None:
        pool = RewardPool(request.reward, num_workers=1)
        closing.append(pool.close)
        edits.append(reward_rows(pool, trainer.tokenizer, trainer.config.gconfig.skip_special_tokens))
    ranks = trainer.ranks
    return EditedRollouts(source, edits, ranks.maximum, closing, ranks.share) if edits else source


def replay(request: Request, make_observers: Sequence[MakeObserver]) -> None:
    """Run recorded steps again on this rank, from the nearest anchor or from the run's first model.

    A collective of all ranks of the replay.

    Args:
        request: record, steps, and what is changed.
        make_observers: called with record, trainer and request; each returns an observer.

    Raises:
        ReplayError: the requested steps are not in the record, or there is nothing to start from
            (WrongModel: the model at its path is another one).
        RecordError: the record cannot be read.
        ConfigError: a changed option is unknown, or contradicts another one.
    """

    def replay_as(join: Callable[[Any], Ranks]) -> None:
        with build_trainer(request, make_observers, join=join) as trainer:
            trainer.train()

    if not request.virtual:
        replay_as(start_process)
        return
    try:
        size = open_record(request.record).header.world_size
        run_as_ranks(size, start_process, replay_as, as_gloo=request.virtual == "gloo")
    finally:
        leave_ranks()


def build_trainer(
    request: Request,
    make_observers: Sequence[MakeObserver],
    stop_before: int | None = None,
    join: Callable[[Any], Ranks] = start_process,
) -> Any:
    """Build the trainer of a replay, a `PPOTrainer` or that of a supervised method.

    Args:
        stop_before: the step before which `train` ends, if not after the last one of the request.
        join: sets this process up as a rank.

    Raises as `replay` does.
    """
    record = open_record(request.record)
    first, _ = step_range(record, request.first, request.last)
    config = replay_config(record, request.model, request.settings, request.config)
    check_model(record, config.actor.path, first)
    anchor = nearest_anchor(record, first)
    start = 0 if anchor is None else anchor
    check_steps_present(record, first, request.last)
    hooks = replay_hooks(request, make_observers) | {
        "checkpoint": None if anchor is None else record.anchor(anchor) / CHECKPOINT,
        "total_steps": total_steps(record, config, start, request.last),
        "join": join,
    }
    if stop_before is not None:
        hooks["stop_after"] = stop_before - 1
    return SUPERVISED.get(type(config), PPOTrainer)(config, **hooks)


def total_steps(record: Record, config: BaseExperimentConfig, start: int, last: int | None) -> int:
    """Return the length of the learning-rate schedule; of rollouts alone, recorded steps.

    Raises:
        ReplayError: a resumed run had another length, and its learning rate depends on it.
    """
    end = record.steps[-1] if last is None else last
    if not record.header.recording.has_plans:
        return record.steps[-1] + 1
    before, after = (int(record.step(step).plan(0).details["total_steps"]) for step in (start, end))
    optimizers = [engine.optimizer for engine in (config.actor, getattr(config, "critic", None)) if engine]
    for of in filter(None, optimizers) if before != after else ():
        if of.lr_scheduler_type != "constant" or int(of.warmup_steps_proportion * max(before, after)):
            raise ReplayError(
                f"{record.path}: the run was resumed with another length, {after} steps and not {before}, and its learning rate "
                "depends on it: replay the steps before and after it apart, with --to-step and --from-step"
            )
    return max(before, after)


def replay_and_compare(request: Request, make_observers: Sequence[MakeObserver] = ()) -> ReplayReport:
    """Replay on this rank and compare every step with the record; a collective.

    Args:
        request: record, steps, and what is changed.
        make_observers: further observers, called after the comparison.

    Returns:
        The report, without a verdict (`replayer.replay_and_judge` adds it).

    Raises:
        StoppedAtDifference: a step differs, and the request is to stop there.
        Exception: as `replay`.
    """
    checks: list[ReplayCheck] = []

    def make_check(record: Record, trainer: PPOTrainer, request: Request) -> Observer:
        checks.append(check_of(record, trainer, request))  # of each virtual rank of this process
        return checks[-1]

    replay(request, [make_check, *make_observers])
    return checks[0].report


def check_of(record: Record, trainer: PPOTrainer, request: Request, **callbacks: Any) -> ReplayCheck:
    """Build the comparison of a request on this rank; `callbacks` are those of ReplayCheck."""
    return ReplayCheck(
        record,
        trainer.ranks.data_parallel_rank,
        trainer.ranks.gather_leaders,
        request.first,
        request.edits,
        request.stop_at_difference,
        **callbacks,
    )
