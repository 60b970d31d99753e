"""One step that runs again and again in one process: the model is loaded once.

replay to the step ─> copy of weights, optimizers, schedules ─> rows ─> the trainer's own step ─> numbers
                      restored before each run          <────────────────────────────────────────┘
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_core.data.batch import RAGGED, Batch, pack, select_rows, sequence_lengths
from areal_core.engine.determinism import rng_state, set_rng_state
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.sharding import fsdp_module
from areal_core.telemetry import Stats
from areal_core.trainer.objective import PolicyObjective
from areal_core.trainer.rl import Observer, PPOTrainer, train_steps
from recorder import Record, RecordedStep
from replayer.bug.shrink import Numbers, Row, Rows, Symptom
from replayer.check import GRAD_NORM, LOSS, StepResult
from replayer.errors import ReplayError
from replayer.preconditions import nearest_anchor
from replayer.request import Request
from replayer.run import build_trainer, check_of
from replayer.source import WithoutEngine, recorded_batch

# what a row's tokens get from the models alone, whatever the other rows
OF_ROWS_ALONE = ("prox_logp", "ref_logp", "teacher_logp", "values")


@contextmanager
def trainer_before(record: Record, step: int, model: str | None) -> Iterator[PPOTrainer]:
    """Yield the trainer with the state that it had before a step; a collective.

    Raises:
        ReplayError: a step before it does not replay to the recorded bits, so that the state would
            be another one.
    """
    start = nearest_anchor(record, step)
    request = Request(record.path, record.steps[0] if start is None else start, step, model)
    results: list[StepResult] = []

    def make_check(record: Record, trainer: PPOTrainer, request: Request) -> Observer:
        return check_of(record, trainer, request, on_step=results.append)

    with build_trainer(request, [make_check], stop_before=step) as trainer:
        trainer.train()
        different = next((result.step for result in results if not result.identical), None)
        if different is not None:
            raise ReplayError(
                f"step {different} does not replay to the recorded bits here, so the weights before step {step} cannot "
                "be made: cut on the machine that recorded, or record with an anchor (debug.anchor_every_steps)"
            )
        check_weights(record, trainer, step)
        yield trainer


def check_weights(record: Record, trainer: PPOTrainer, step: int) -> None:
    """Raise ReplayError unless the weights are those after the step before; a collective."""
    if step - 1 not in record.steps or not record.header.recording.has_plans:
        return
    recorded = record.step(step - 1).outcome(trainer.ranks.data_parallel_rank).checksums
    if wrong := sorted({name for name, _ in trainer.checksums().items() ^ recorded.items()}):
        raise ReplayError(
            f"the anchor at step {step} has other weights than step {step - 1} left: {wrong[0]}"
        )


def placeholders_end(batch: Batch) -> list[int]:
    """Return how many tokens at the start of each row stay: those up to its last picture's."""
    if "mm_token_type_ids" not in batch:
        return [1] * len(batch["rewards"])
    of_picture = batch["mm_token_type_ids"] != 0  # [B, T]
    positions = torch.arange(1, of_picture.shape[1] + 1)
    return (of_picture * positions).amax(dim=1).clamp(min=1).tolist()


@dataclass(frozen=True)
class SavedEngine:
    """The state of an engine, copied."""

    engine: FSDPEngine
    tensors: list[Tensor]
    optimizer: dict[Tensor, dict[str, Any]]
    schedule: dict[str, Any] | None

    @classmethod
    def of(cls, engine: FSDPEngine) -> "SavedEngine":
        """Copy the state of an engine."""
        state = {} if engine.optimizer is None else copied(engine.optimizer.state)
        schedule = None if engine.schedule is None else copy.deepcopy(engine.schedule.state_dict())
        return cls(engine, [tensor.clone() for tensor in live_tensors(engine)], state, schedule)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the engine the copied state."""
        for live, saved in zip(live_tensors(self.engine), self.tensors, strict=True):
            live.copy_(saved)
        if self.engine.optimizer is not None:
            self.engine.optimizer.zero_grad()
            self.engine.optimizer.state.clear()
            self.engine.optimizer.state.update(copied(self.optimizer))
        if self.engine.schedule is not None and self.schedule is not None:
            self.engine.schedule.load_state_dict(copy.deepcopy(self.schedule))
            for group, lr in zip(
                self.engine.schedule.optimizer.param_groups, self.engine.schedule.get_last_lr(), strict=True
            ):
                group["lr"] = lr


def live_tensors(engine: FSDPEngine) -> list[Tensor]:
    engine.wake()
    fsdp_module(engine.model).reshard()
    parameters = [p.to_local() if isinstance(p, DTensor) else p for p in engine.model.parameters()]
    return [tensor.detach() for tensor in (*parameters, *engine.model.buffers())]


def copied(state: Any) -> dict[Tensor, dict[str, Any]]:
    """Copy the state of an optimizer, but not its parameters."""
    return {
        parameter: {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}
        for parameter, values in state.items()
    }


class FixedRows(WithoutEngine):
    """A source of one batch, with the random states that its step had."""

    def __init__(self, batch: Batch, rng: dict[str, str]) -> None:
        self.batch, self.rng = batch, rng

    def next_batch(self, step: int, version: int) -> Batch:
        """Return the batch, and restore the random states."""
        set_rng_state(self.rng)
        return dict(self.batch)


class Bench:
    """A trainer before a recorded step, which it can run on any of its rows.

    Every method is a collective, and returns alike on every rank.
    """

    def __init__(self, trainer: PPOTrainer, record: Record, step: int) -> None:
        self.trainer, self.step, self.version = trainer, step, trainer.version
        self.recorded: RecordedStep = record.step(step)
        self.rank = trainer.ranks.data_parallel_rank
        self.batch = recorded_batch(self.recorded, self.rank)
        self.has_plans = record.header.recording.has_plans
        self.rng = self.recorded.plan(self.rank).rng if self.has_plans else rng_state()
        self.saved = [SavedEngine.of(engine) for engine in trainer.engines.values()]
        self.rows = self.all_rows()
        self.inputs: Batch = {}  # of the last run
        # numbers are not collected into the statistics of the step
        self.objective: PolicyObjective = replace(trainer.objective, stats=Stats())

    def all_rows(self) -> Rows:
        lengths = sequence_lengths(self.batch).tolist()
        names = zip(self.batch["prompt_id"].tolist(), self.batch["sample_id"].tolist(), strict=True)
        fixed = placeholders_end(self.batch)
        own = [
            (
                (prompt, sample),
                Row(self.rank, row, f"{prompt}.{sample}", tuple(range(lengths[row])), fixed[row]),
            )
            for row, (prompt, sample) in enumerate(names)
        ]
        everyone = [pair for of_rank in self.trainer.ranks.gather_leaders(own) for pair in of_rank]
        return tuple(row for _, row in sorted(everyone, key=lambda pair: pair[0]))

    def batch_of(self, rows: Rows) -> Batch:
        """Return the rows of this rank, with the tokens that are left."""
        own = sorted((row for row in rows if row.rank == self.rank), key=lambda row: row.row)
        batch = select_rows(self.batch, [row.row for row in own])
        if all(row.tokens == self.rows_by_place[row.rank, row.row].tokens for row in own):
            return batch
        width = max(len(row.tokens) for row in own)
        per_token = {key for key, tensor in batch.items() if tensor.dim() == 2 and key not in RAGGED}
        shorter = {key: t.new_zeros(len(own), width) if key in per_token else t for key, t in batch.items()}
        for number, row in enumerate(own):
            for key, tensor in batch.items():
                if key in per_token:
                    shorter[key][number, : len(row.tokens)] = tensor[number, list(row.tokens)]
        return shorter

    @cached_property
    def rows_by_place(self) -> dict[tuple[int, int], Row]:
        return {(row.rank, row.row): row for row in self.rows}

    def restore(self) -> None:
        """Return to the state before the step."""
        for engine in self.saved:
            engine.restore()
        trainer = self.trainer
        trainer.version, trainer.first_step, trainer.end_step = self.version, self.step, self.step + 1
        trainer.stats.export()  # of a run that failed

    def run(self, rows: Rows, symptom: Symptom | None = None) -> Numbers:
        """Run the step on rows, and return its numbers: those that the symptom uses.

        On one rank an error is a number, too; on several, the others would wait for that rank.
        """
        if {row.rank for row in rows} != {row.rank for row in self.rows}:
            return Numbers(error="a rank has no rows")  # which the trainer cannot compute
        batch = self.batch_of(rows)
        collector = Collector(self, rows, symptom)
        num_trained = sum(self.trainer.ranks.gather_leaders(int(batch["loss_mask"].sum())))
        if num_trained == 0 and len(rows) < len(self.rows):
            return Numbers(error="nothing to train on")
        self.restore()
        self.trainer.observers = [collector]
        try:
            train_steps(self.trainer, FixedRows(batch, self.rng), None, lambda step: None)
        except Exception as error:
            if self.trainer.ranks.world_size > 1:
                raise
            collector.error = " ".join(f"{type(error).__name__}: {error}".split())
        self.inputs = collector.inputs
        return collector.numbers(batch)

    def inputs_of_all(self) -> Batch:
        """Return the inputs to the loss of this rank's rows of the complete step."""
        self.run(self.rows)
        return self.inputs

    def record(self, rows: Rows, recorder: Observer) -> None:
        """Run the step on rows as a run of its own, which a recorder observes."""
        self.restore()
        self.trainer.observers = [recorder]
        self.trainer.source = FixedRows(self.batch_of(rows), self.rng)
        self.trainer.train()
        self.restore()


class Collector:
    """An observer that collects the numbers of a step."""

    def __init__(self, bench: Bench, rows: Rows, symptom: Symptom | None) -> None:
        self.bench, self.rows = bench, rows
        self.wants = (lambda name: False) if symptom is None else symptom.uses
        self.of_tokens: dict[str, list[float]] = {"advantages": [], "logprobs": [], "row_losses": []}
        self.stats: dict[str, float] = {}
        self.difference = 0.0
        self.error = ""
        self.inputs: Batch = {}

    def __call__(self, event: str, **facts: Any) -> None:
        """Handle an event (ARCHITECTURE.md)."""
        if event == "advantages":
            self.inputs = inputs = facts["inputs"]
            if self.wants("advantages"):
                self.of_tokens["advantages"] = inputs["advantages"][inputs["loss_mask"].bool()].tolist()
            if self.wants("row_losses"):
                self.of_tokens["row_losses"] = self.row_losses(inputs)
            if self.wants("difference"):
                self.difference = self.largest_difference(inputs)
        elif event == "loss" and facts["flat"] and self.wants("logprobs"):
            trained = facts["flat"]["loss_mask"].bool()
            self.of_tokens["logprobs"] += facts["logprobs"].detach()[trained].tolist()
        elif event == "step":
            self.stats = facts["stats"]

    @torch.no_grad()
    def row_losses(self, inputs: Batch) -> list[float]:
        """Compute the loss of each row alone, 0 without a token in the loss mask; a collective."""
        actor, objective = self.bench.trainer.actor, self.bench.objective
        logprobs, entropy = actor.score(inputs)
        losses = []
        for row in range(len(logprobs)):
            one = select_rows(inputs | {"own": logprobs, "own_entropy": entropy}, [row])
            flat = {key: tensor.to(actor.ranks.device) for key, tensor in pack(one).items()}
            weight = float(objective.denominator(one))
            total = float(objective.loss(flat.pop("own"), flat.pop("own_entropy"), flat))
            losses.append(total / weight if weight else 0.0)
        return losses

    def largest_difference(self, inputs: Batch) -> float:
        """Return the largest difference of a token's log-prob or value from its recorded one."""
        bench = self.bench
        recorded = bench.recorded.learning(bench.rank)
        edges, largest = recorded["cu_seqlens"], 0.0
        own = sorted((row for row in self.rows if row.rank == bench.rank), key=lambda row: row.row)
        for key in (key for key in OF_ROWS_ALONE if key in inputs and key in recorded):
            for number, row in enumerate(own):
                before = recorded[key][edges[row.row] : edges[row.row + 1]]
                after = inputs[key][number, : len(before)].cpu().numpy()
                with np.errstate(invalid="ignore"):
                    apart = np.where(after.view(np.int32) == before.view(np.int32), 0, np.abs(after - before))
                largest = max(largest, float(np.nan_to_num(apart, nan=math.inf).max(initial=0)))
        return largest

    def numbers(self, batch: Batch) -> Numbers:
        """Return the numbers of all ranks; a collective."""
        own: dict[str, Any] = {
            **self.of_tokens,
            "rewards": batch["rewards"].tolist(),
            "lengths": batch["loss_mask"].sum(1).tolist(),
            "difference": self.difference,
            "num_tokens": int(batch["attention_mask"].sum()),
        }
        ranks = self.bench.trainer.ranks.gather_leaders(own)
        lists = ("advantages", "logprobs", "row_losses", "rewards", "lengths")
        return Numbers(
            loss=self.stats.get(LOSS, math.nan),
            grad_norm=self.stats.get(GRAD_NORM, math.nan),
            stats=self.stats,
            **{name: [value for one in ranks for value in one[name]] for name in lists},
            num_rows=len(self.rows),
            num_tokens=sum(one["num_tokens"] for one in ranks),
            difference=max(one["difference"] for one in ranks),
            error=self.error,
        )
