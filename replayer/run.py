"""Replays a record through the trainer's own loop: the same step, from other batches' place of origin."""

from collections.abc import Callable, Sequence
from typing import Any

from areal_core.reward import RewardPool
from areal_core.trainer.rl import Observer, PPOTrainer
from recorder import Record, open_record
from replayer.before import check_model, check_way, nearest_anchor, step_range
from replayer.check import ReplayCheck, ReplayReport
from replayer.options import replay_config
from replayer.request import Request
from replayer.source import RecordedRollouts
from replayer.whatif import Edit, EditedRollouts, filter_rows, load_edit, reward_rows

MakeObserver = Callable[[Record, PPOTrainer, Request], Observer]


def replay_hooks(request: Request, make_observers: Sequence[MakeObserver]) -> dict[str, Any]:
    """Arguments of PPOTrainer that make it a replay: recorded batches in, each step observed."""
    record = open_record(request.record)
    return {
        "source": lambda trainer: make_source(record, trainer, request),
        "observers": [lambda trainer, make=make: make(record, trainer, request) for make in make_observers],
        "stop_after": request.last,
        "print_steps": False,
    }


def make_source(record: Record, trainer: PPOTrainer, request: Request) -> RecordedRollouts | EditedRollouts:
    """The recorded batches of this rank, edited as asked."""
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
        edits.append(reward_rows(pool, trainer.tokenizer))
    ranks = trainer.ranks
    return EditedRollouts(source, edits, ranks.maximum, closing, ranks.share) if edits else source


def replay(request: Request, make_observers: Sequence[MakeObserver]) -> None:
    """Run recorded steps again on this rank, from the nearest anchor, or from the model that the run started from.

    Raises:
        ReplayError: the steps asked for are not in the record, or there is nothing to start from.
    """
    record = open_record(request.record)
    first, _ = step_range(record, request.first, request.last)
    config = replay_config(record, request.model, request.settings)
    check_model(record, config.actor.path, first)
    anchor = nearest_anchor(record, first)
    start = 0 if anchor is None else anchor
    check_way(record, first, request.last)
    hooks = replay_hooks(request, make_observers) | {
        "checkpoint": None if anchor is None else record.anchor(anchor) / "checkpoint",
        "total_steps": total_steps(record, start),
    }
    with PPOTrainer(config, **hooks) as trainer:
        trainer.train()


def total_steps(record: Record, step: int) -> int:
    """Steps of the recorded run, which the learning-rate schedule spans; of rollouts alone, those that are recorded."""
    if record.header.recording.scope == "rollout":
        return record.steps[-1] + 1
    steps: int = record.step(step).plan(0).details["total_steps"]
    return steps


def replay_here(request: Request) -> ReplayReport:
    """Replay on this rank and compare every step; the report is not judged yet (`replayer.rerun`)."""
    checks: list[ReplayCheck] = []

    def make_check(record: Record, trainer: PPOTrainer, request: Request) -> Observer:
        checks.append(check_of(record, trainer, request))
        return checks[0]

    replay(request, [make_check])
    return checks[0].report


def check_of(record: Record, trainer: PPOTrainer, request: Request, **told: Any) -> ReplayCheck:
    """The comparison that a request asks for, on this rank of the trainer; `told` are its callbacks."""
    return ReplayCheck(
        record,
        trainer.ranks.data_parallel_rank,
        trainer.ranks.gather_heads,
        request.first,
        request.edits,
        request.stop_at_difference,
        **told,
    )
