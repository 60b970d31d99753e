"""Compute a recorded step of GRPO in other layouts, by TRL's own trainer.

    replay up to the step ─> weights before it ─> a trainer for each number of micro-batches ─> its first update

What TRL itself computes by micro-batch is the answer where no number changes without it.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

import torch
from datasets import Dataset
from transformers.utils.logging import disable_progress_bar
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from areal_core.safety.private import fresh_folder
from recorder import Record, open_record
from replayer.crosscheck.layouts import TOLERANCE
from replayer.errors import CannotReplay
from replayer.invariance import ACCUMULATION, OF_16_BITS, StepLayouts, counts_of, differing, find_variants
from replayer.preconditions import check_by_trl, step_range
from replayer.trl.observing import TrainedStep, Update
from replayer.trl.replaying import PLACES, ReplayEnded, Replaying, train_on

# option -> its value that does not depend on micro-batches, and what TRL does with others
BY_MICRO_BATCH: dict[str, tuple[Any, str]] = {
    "loss_type": ("dapo", "TRL documents that it divides by the tokens of each micro-batch"),
    "entropy_coef": (0.0, "TRL's bonus is a mean over the tokens of each micro-batch"),
    "top_entropy_quantile": (1.0, "TRL selects from the tokens of each micro-batch"),
}


class OneStep(Replaying):
    """A Watcher of one step: the last one of a replay, or alone, from the weights `before` it."""

    def __init__(self, trainer: Any, record: Record, number: int, before: Sequence[Any] = ()) -> None:
        super().__init__(trainer, record, prompts=False)
        self.number, self.before, self.is_alone = number, before, bool(before)
        self.numbers: dict[str, float] = {}  # of the first update

    def begin(self, optimizer_step: int, number: int) -> int:
        """Check that the record begins where the trainer stands, or take the weights."""
        for model, weights in zip(models_of(self.trainer), self.before, strict=False):
            model.load_state_dict(weights)
        return number if self.is_alone else super().begin(optimizer_step, number)

    def started(self, step: TrainedStep) -> None:
        """Read the step from the record, and keep the weights before it."""
        super().started(replace(step, number=self.number) if self.is_alone else step)
        if self.next_step > self.number and not self.before:
            states = [model.state_dict() for model in models_of(self.trainer)]
            self.before = [{name: value.clone() for name, value in state.items()} for state in states]

    def finished(self, step: TrainedStep) -> None:
        """Take the numbers of the step and end; compare a replayed one with the record."""
        if self.before:
            first = next(at for at, item in enumerate(step.work) if isinstance(item, Update))
            loss = self.trainer.accelerator.gather(torch.stack(step.losses[:first]).sum()[None]).mean()
            self.numbers = {"loss": float(loss), "grad_norm": step.updates[0].grad_norm}
        if not self.is_alone:
            super().finished(step)
        if self.before:
            raise ReplayEnded


def models_of(trainer: Any) -> list[Any]:
    """Return the trained model, and the reference if it is another one."""
    return [trainer.accelerator.unwrap_model(trainer.model), *filter(None, [trainer.ref_model])]


def run_layouts(build: Callable[..., Any], folder: str, step: int) -> StepLayouts:
    """Replay up to a step, and compute its first update with 1, 2 and 4 micro-batches.

    Args:
        build: returns a trainer as for the run, with the options of GRPOConfig that it is given.
        folder: of a record that `record` wrote.
        step: number in the record.

    Raises:
        CannotReplay: record and trainer do not belong together, the replay differs before the step,
            or its rows cannot be divided.
        ReplayError, RecordError: the record has no such step, or cannot be read.
    """
    record = open_record(folder)
    step_range(record, step, step)
    check_by_trl(record, "GRPOTrainer")
    trainer = build()
    args, accumulated = trainer.args, trainer.args.gradient_accumulation_steps
    rows = args.per_device_train_batch_size * accumulated
    layouts = [name for name, count in ACCUMULATION.items() if rows % count == 0]
    if args.steps_per_generation % accumulated or len(layouts) == 1:
        raise CannotReplay(
            f"{folder} has {rows} rows in an update and {args.steps_per_generation} micro-batches in a generation, "
            f"{accumulated} in an update: they cannot be divided in another way"
        )
    reached = OneStep(trainer, record, step)
    train_on(trainer, reached)
    if not reached.numbers:
        raise CannotReplay(
            f"{folder} cannot be replayed up to step {step}: {reached.difference or 'the trainer ended before'}; give "
            "areal_debug.trl.layouts a function that builds the trainer of the run"
        )

    @cache
    def compute(count: int, **changed: Any) -> dict[str, float]:
        sizes = {"per_device_train_batch_size": rows // count, "gradient_accumulation_steps": count}
        sizes["steps_per_generation"] = args.steps_per_generation // accumulated * count
        one = build(**sizes, **changed)
        if wrong := [name for name, value in sizes.items() if getattr(one.args, name) != value]:
            raise CannotReplay(
                f"the trainer was built without the given {', '.join(wrong)}: pass them to its GRPOConfig"
            )
        taking = OneStep(one, record, step, reached.before)
        train_on(one, taking, checksums=False)
        return taking.numbers

    batch = {"input_ids": torch.zeros(rows, 1), "prompt_id": torch.arange(rows) // args.num_generations}
    is_exact = next(trainer.model.parameters()).dtype == torch.float32 and not (args.bf16 or args.fp16)
    tolerance = TOLERANCE if is_exact else OF_16_BITS
    counts = counts_of([batch]), counts_of([batch]) | {"micro-batches": accumulated}
    variants = differing("as trained", compute(1), reached.numbers, counts, tolerance)
    variants += find_variants(lambda parts: compute(len(parts)), batch, layouts, tolerance)
    named = [name for name, (usual, _) in BY_MICRO_BATCH.items() if getattr(args, name) != usual]
    if "loss_type" in named and args.loss_type != "bnpo":  # of other losses TRL says no such thing
        named.remove("loss_type")
    usual = {name: BY_MICRO_BATCH[name][0] for name in named}
    alike = partial(find_variants, lambda parts: compute(len(parts), **usual), batch, layouts, tolerance)
    if variants and named and not alike():
        why = "; ".join(f"{name}={getattr(args, name)}: {BY_MICRO_BATCH[name][1]}" for name in named)
        variants = [replace(one, named=why) for one in variants]
    return StepLayouts(
        folder, step, tuple(layouts), [(0, one) for one in variants], reached.difference is None
    )


def trainer_of(record: Record, model: str | None, step: int, **changed: Any) -> Any:
    """Build the GRPOTrainer of a record, with some options changed; prompts and rewards are not used."""
    disable_progress_bar()
    details = record.step(record.steps[0]).plan(0).details
    known = {one.name for one in fields(GRPOConfig) if one.init}
    options = {n: v for n, v in record.header.config.items() if n in known and not n.startswith(PLACES)}
    options |= {"output_dir": fresh_folder(), "report_to": "none", "disable_tqdm": True}
    options |= {"use_vllm": False, "generation_batch_size": None} | changed
    args: Any = GRPOConfig(**options)
    prompts = Dataset.from_list([{"prompt": "."}] * (args.generation_batch_size * (step + 2)))
    rewards: list[Any] = [lambda **_: []] * len(details["functions"])
    return GRPOTrainer(model or record.header.model["path"], rewards, args, train_dataset=prompts)
