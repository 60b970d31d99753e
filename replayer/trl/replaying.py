"""Feed the recorded batches through TRL's own loss and optimizer.

TRL runs as it did, but `_generate` returns the recorded tokens and `_calculate_rewards` the
recorded rewards, so that no model samples and no reward function is called. TRL itself pads,
computes advantages, old and reference log-probs, shuffles, splits, and trains; each of these is
compared with the record. SFTTrainer and DPOTrainer draw their batches from their data, which are
compared.
"""

import copy
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import gather, gather_object
from transformers import PrinterCallback, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from areal_core.safety.secrets import masker
from recorder import Record, open_record
from recorder.difference import Difference, find_differences
from recorder.trainers.recorder import plain
from recorder.trainers.sample import Sample
from replayer.errors import CannotReplay
from replayer.preconditions import check_by_trl
from replayer.trl.observing import (
    CURRENT,
    OLD,
    REFERENCE,
    Generators,
    Observer,
    TrainedStep,
    Watcher,
    begin_of,
    count_before,
    known_name,
    replaced,
    samples_of_step,
)

STAGES = (
    *("weights before the step", "prompts", "batch", "rewards", "advantages", "old log-probs"),
    *("reference log-probs", "order", "log-probs", "loss", "gradient norm", "learning rate", "weights"),
)


@dataclass(frozen=True)
class StepDifference:
    """The first difference of a step.

    Attributes:
        step: number in the record.
        optimizer_step: of TRL, counted from 0; the first of the step unless the stage is later.
        row, token: on the rank; None where the value is not that of a row or token.
        name: of the value, such as a reward function or a parameter.
        recorded, replayed: the values; None: there is none.
        rank: which process found it.
    """

    step: int
    optimizer_step: int
    stage: str
    row: int | None = None
    token: int | None = None
    name: str | None = None
    recorded: Any = None
    replayed: Any = None
    rank: int = 0

    def __str__(self) -> str:
        numbers = {"rank": self.rank or None, "row": self.row, "token": self.token}
        places = [f"{name} {number}" for name, number in numbers.items() if number is not None]
        where = ", ".join([f"step {self.step} (optimizer step {self.optimizer_step})", self.stage, *places])
        values = f"{self.recorded} in the record, {self.replayed} here"
        return f"{where}: {values}" if self.name is None else f"{where}: {self.name} is {values}"


class Fact(NamedTuple):
    """A value of a step, and what it is.

    Arrays are int32 or float32 [T], floats are in hexadecimal. `after` are the optimizer steps of
    the step before it.
    """

    stage: str
    value: Any
    name: str | None = None
    row: int | None = None
    after: int = 0


def facts_of(
    samples: Sequence[Sample],
    weights: Mapping[str, str],
    work: Sequence[Mapping[str, Any]],
    details: Mapping[str, Any],
) -> Iterator[Fact]:
    """Yield the values of a step, recorded or replayed, in the order of computation.

    Args:
        weights: checksums before the step.
        work: documents of its micro-batches and optimizer steps.
        details: of the recorded step.
    """
    yield Fact("weights before the step", weights)
    yield Fact("batch", len(samples), "number of rows")
    for row, sample in enumerate(samples):
        yield Fact("batch", sample.tokens, None, row)
        yield Fact("batch", sample.loss_mask, "loss mask", row)
    yield from (Fact("rewards", repr(sample.reward), None, row) for row, sample in enumerate(samples))
    for stage, name in {
        "advantages": "advantages",
        "old log-probs": OLD,
        "reference log-probs": REFERENCE,
    }.items():
        if name != OLD or details["has_old_logps"]:
            yield from (Fact(stage, one.learning.get(name), None, row) for row, one in enumerate(samples))
    after = 0
    for item in work:
        if "lr" in item:
            yield Fact("gradient norm", item["grad_norm"], None, None, after)
            yield Fact("learning rate", item["lr"], None, None, after)
            yield Fact("weights", item["weights"], None, None, after)
            after += 1
            continue
        rows = item["rows"]
        yield Fact("order", rows, "rows of a micro-batch", None, after)
        for row, checksum in zip(rows, item["logps"], strict=False):
            yield Fact("log-probs", checksum, "checksum", row, after)
        yield Fact("loss", item["loss"], f"that of rows {rows}", rows[0] if len(rows) == 1 else None, after)
    if details["is_complete"]:
        yield Fact("order", len(work), "number of micro-batches and optimizer steps", None, after)


def first_difference(
    samples: Sequence[Sample], details: Mapping[str, Any], step: TrainedStep, rank: int
) -> StepDifference | None:
    recorded = facts_of(samples, details["weights_before"] or {}, details["work"], details)
    work = [item.document() for item in step.work]
    for left, right in zip(
        recorded, facts_of(step.samples, step.weights_before or {}, work, details), strict=False
    ):
        found = difference_of(left, right)
        if found is None:
            continue
        name, token, values = found
        if left.stage == "log-probs" and left.row is not None:
            # values were kept of the first pass of a row only
            pair = [side[left.row].learning for side in (samples, step.samples)]
            known = CURRENT if CURRENT in pair[0] else OLD
            facts = [Fact("log-probs", values.get(known)) for values in pair]
            name, token, values = difference_of(*facts) or found
        number = step.optimizer_step + left.after
        stage = left.stage if left.name == right.name else "order"
        return StepDifference(step.number, number, stage, left.row, token, name, *values, rank)
    return None


def difference_of(left: Fact, right: Fact) -> tuple[str | None, int | None, tuple[Any, Any]] | None:
    """Return name, token and values of the difference of two facts, None for equal bits."""
    a, b = left.value, right.value
    if (left.stage, left.name, left.row) != (right.stage, right.name, right.row):
        return "what follows", None, (left.name or left.stage, right.name or right.stage)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if len(a) != len(b):
            return "number of tokens", None, (len(a), len(b))
        different = a.view(np.int32) != b.view(np.int32)
        token = int(different.argmax()) if different.any() else None
        return None if token is None else (left.name, token, (a[token].item(), b[token].item()))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
        if not (a and b and names):  # of one that was not taken nothing is known
            return None
        what = f"checksum of {names[0]} ({len(names)} of {len(a)} parameters differ)"
        return what, None, (a.get(names[0]), b.get(names[0]))
    if a is None or b is None:
        known = ("absent" if a is None else "present", "absent" if b is None else "present")
        return None if a is b else (left.name, None, known)
    return None if a == b else (left.name, None, (shown(left.stage, a), shown(left.stage, b)))


def shown(stage: str, value: Any) -> Any:
    if stage in ("loss", "gradient norm"):
        return float.fromhex(value)
    if stage == "learning rate":  # of the parameter groups, each once
        return ", ".join(str(float.fromhex(text)) for text in dict.fromkeys(value))
    return value


# options that name places, not numbers of the training
PLACES = (
    *("output_dir", "run_name", "report_to", "hub_", "push_to_hub", "logging_", "save_", "eval_", "log_"),
    *("do_", "disable_tqdm", "project", "trackio_", "train_dataset_rows", "reward_funcs"),
)


class ReplayEnded(Exception):
    """Ends TRL's training: the record has no further step, or a difference was found."""


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Attributes:
        identical: whether every value that was compared has the recorded bits.
        num_steps: steps that were compared, of `num_recorded`.
        difference: the first one.
        options: options of the trainer that are not those of the record.
    """

    identical: bool
    num_steps: int
    num_recorded: int
    difference: StepDifference | None
    options: tuple[Difference, ...]

    @property
    def step(self) -> int | None:
        """Step of the first difference."""
        return None if self.difference is None else self.difference.step

    @property
    def stage(self) -> str | None:
        """Stage of the first difference."""
        return None if self.difference is None else self.difference.stage

    @property
    def row(self) -> int | None:
        """Row of the first difference; None if it is not one of a row."""
        return None if self.difference is None else self.difference.row

    def __str__(self) -> str:
        steps = f"{self.num_steps} of {self.num_recorded} recorded steps"
        lines = [f"Identical: TRL computed the same bits in {steps}."]
        if self.difference is not None:
            lines = [f"Different: {self.difference}.", f"Steps that were compared: {steps}."]
        for option in self.options:
            lines.append(f"Option {option.where}: {option.recorded} in the record, {option.current} here.")
        return "\n".join(lines)


def replay(
    trainer: Any, folder: str | os.PathLike[str], *, prompts: bool = True, resume_from_checkpoint: Any = None
) -> Replay:
    """Train on the recorded batches, compare everything with the record, and print the result.

    The trainer is trained up to the first difference. Nothing is saved or reported.

    Args:
        trainer: built as for the run.
        folder: of a record that `record` wrote.
        prompts: also compare the prompts that its dataset and chat template give.
        resume_from_checkpoint: as for `trainer.train`: where the recorded run began.

    Returns:
        Whether all is identical, else the first difference: its step, stage and row.

    Raises:
        UnknownTrainer: as `record`.
        CannotReplay: record and trainer do not belong together, or the run had images.
        RecordError: the record cannot be read.
    """
    known_name(trainer)
    replaying = Replaying(trainer, open_record(folder), prompts)
    train_on(trainer, replaying, resume_from_checkpoint=resume_from_checkpoint)
    result = replaying.result()
    if trainer.accelerator.is_main_process:
        print(result, file=sys.stdout, flush=True)
    return result


def train_on(trainer: Any, replaying: "Replaying", checksums: bool = True, **given: Any) -> None:
    """Train on recorded batches, to the end of the training or to what ends it before."""
    observer = Observer(trainer, replaying, checksums)
    with replaced(trainer, replaying.methods()), quiet(trainer), observer.observing(), suppress(ReplayEnded):
        trainer.train(**given)
        observer.finish()


@contextmanager
def quiet(trainer: Any) -> Iterator[None]:
    """Save, evaluate, log and report nothing until the end of the block."""

    class Quiet(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = control.should_evaluate = control.should_log = False

        on_epoch_end = on_step_end

    handler = trainer.callback_handler
    before = handler.callbacks
    reporters = (PrinterCallback, *INTEGRATION_TO_CALLBACK.values())
    handler.callbacks = [callback for callback in before if not isinstance(callback, reporters)]
    handler.add_callback(Quiet())
    try:
        with replaced(trainer.args, {"eval_on_start": False}):
            yield
    finally:
        handler.callbacks = before


class Replaying(Watcher):
    """A Watcher that compares the steps of a trainer with those of a record."""

    def __init__(self, trainer: Any, record: Record, prompts: bool) -> None:
        self.trainer, self.record = trainer, record
        self.generates = known_name(trainer) == "GRPOTrainer"
        # a rollout function and environments make prompts of their own
        self.compares_prompts = (
            prompts and self.generates and not (trainer.rollout_func or trainer.environment_factories)
        )
        self.rank = trainer.accelerator.process_index
        self.generators = Generators(trainer.accelerator.device)
        self.num_steps, self.next_step = 0, 0
        self.end: int | None = None  # optimizer step at which the next recorded step begins
        self.difference: StepDifference | None = None
        self.samples: list[Sample] = []
        self.details: Mapping[str, Any] = {}
        self.check()

    def check(self) -> None:
        """Raise CannotReplay unless this is a record of such a trainer."""
        path, header, name = self.record.path, self.record.header, known_name(self.trainer)
        num_processes = self.trainer.accelerator.num_processes
        check_by_trl(self.record)
        if header.num_ranks != num_processes:
            raise CannotReplay(
                f"{path} is of {header.num_ranks} processes, not {num_processes}: launch as many"
            )
        self.load(self.record.steps[0])
        if self.details["trainer"] != name:
            raise CannotReplay(f"{path} is of a {self.details['trainer']}, and the trainer is a {name}")
        if self.details["not_recorded"] or self.details.get("has_images"):
            raise CannotReplay(f"{path} is of a run with images, which a replay does not give to TRL")

    def load(self, number: int) -> None:
        """Read a step of this rank. Raises ReplayEnded if it was not recorded."""
        if number not in self.record.steps:
            raise ReplayEnded
        step = self.record.step(number)
        self.samples, self.details = samples_of_step(step, self.rank), step.plan(self.rank).details
        after = self.record.steps[self.record.steps.index(number) + 1 :]
        self.end = begin_of(self.record, self.rank, after[0]) if after else None
        updates = [at for at, item in enumerate(self.details["work"], 1) if "lr" in item]
        if self.end is not None and len(updates) > (count := self.end - self.details["optimizer_step"]) > 0:
            # the run resumed before the last of them, and generated again
            work = self.details["work"][: updates[count - 1]]
            self.details = {**self.details, "work": work, "is_complete": False}

    def methods(self) -> dict[str, Any]:
        """Return what replaces methods and attributes of the trainer."""
        if not self.generates:
            return {}
        return {
            "_generate": self.generate,
            "_calculate_rewards": self.calculate_rewards,
            "use_vllm": self.details["use_vllm"],  # for the corrections of its log-probs
            "log_completions": False,
            "environments": None,
            "environment_factories": None,
        }

    def generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Return what was sampled, in place of TRL's `_generate`."""
        if len(prompts) != len(self.samples):
            raise CannotReplay(
                f"{self.record.path} has {len(self.samples)} samples in step {self.next_step - 1}, and the "
                f"trainer wants {len(prompts)}: give it the batch size and steps_per_generation of the run"
            )
        split = [(sample, sample.prompt_length or 0) for sample in self.samples]
        prompt_ids = [tokens_of(sample)[:size].tolist() for sample, size in split]
        completion_ids = [tokens_of(sample)[size:].tolist() for sample, size in split]
        if self.compares_prompts:
            self.compare_prompts(prompt_ids, self.trainer._tokenize_prompts(copy.deepcopy(prompts))[0])
        masks = [sample.extras["tool_mask"][size:].tolist() for sample, size in split if sample.extras]
        logprobs = [sample.logprobs[size:].tolist() for sample, size in split if sample.logprobs is not None]
        completions = [""] * len(prompts)  # for reward functions only
        return prompt_ids, completion_ids, masks or None, completions, logprobs or None, {}, None, []

    def compare_prompts(self, recorded: list[list[int]], own: list[list[int]]) -> None:
        """Compare the prompts that the trainer would have sampled from with the recorded ones."""
        for row, pair in enumerate(zip(recorded, own, strict=True)):
            if pair[0] != pair[1] and self.difference is None:
                self.difference = StepDifference(
                    step=self.next_step - 1,
                    optimizer_step=self.details["optimizer_step"],
                    stage="prompts",
                    row=row,
                    name="text",
                    recorded=repr(self.trainer.processing_class.decode(pair[0])),
                    replayed=repr(self.trainer.processing_class.decode(pair[1])),
                    rank=self.rank,
                )

    def calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        functions = self.details["functions"]
        if len(functions) != len(self.trainer.reward_funcs):
            raise CannotReplay(
                f"{self.record.path} is of a run with the reward functions {', '.join(functions)}, and the "
                f"trainer has {len(self.trainer.reward_funcs)}: give it as many, which are not called"
            )
        rewards = [[sample.scores[name] for name in functions] for sample in self.samples]
        return gather(torch.tensor(rewards, dtype=torch.float32, device=self.trainer.accelerator.device))

    # what a Watcher does

    def begin(self, optimizer_step: int, number: int) -> int:
        """Check that the record has the step at which the trainer stands."""
        rest = self.record.steps[count_before(self.record, self.rank, optimizer_step) :]
        if not rest or begin_of(self.record, self.rank, rest[0]) != optimizer_step:
            at = begin_of(self.record, self.rank, self.record.steps[0])
            raise CannotReplay(
                f"{self.record.path} begins with optimizer step {at}, and the trainer stands before another: "
                "give resume_from_checkpoint=, the checkpoint that the run started from"
            )
        self.next_step = rest[0]
        return self.next_step

    def leaves(self, optimizer_step: int) -> bool:
        """Return whether the next recorded step begins here, also in the middle of a generation."""
        return optimizer_step == self.end and not self.details["is_complete"]

    def started(self, step: TrainedStep) -> None:
        """Read the step from the record."""
        self.load(step.number)
        self.next_step = step.number + 1

    def at(self, step: TrainedStep, place: str) -> None:
        """Set the random generators to the recorded states."""
        self.generators.restore(self.details["rng"].get(place, {}))

    def finished(self, step: TrainedStep) -> None:
        """Compare a step; end the training on all ranks if one of them found a difference."""
        self.difference = self.difference or first_difference(self.samples, self.details, step, self.rank)
        self.num_steps += 1
        found = [difference for difference in gather_object([self.difference]) if difference is not None]
        if found:
            self.difference = min(found, key=lambda difference: STAGES.index(difference.stage))
            raise ReplayEnded

    def result(self) -> Replay:
        """Return the result. Raises CannotReplay if nothing was compared."""
        if not self.num_steps:
            raise CannotReplay(f"{self.record.path}: the trainer ended before the first recorded step did")
        current = masker().tree(plain(self.trainer.args.to_dict()))
        options = find_differences(self.record.header.config, current)
        return Replay(
            self.difference is None,
            self.num_steps,
            len(self.record.steps),
            self.difference,
            tuple(option for option in options if not option.where.startswith(PLACES)),
        )


def tokens_of(sample: Sample) -> np.ndarray:
    """Return the tokens, which every sample of this adapter has."""
    assert sample.tokens is not None
    return sample.tokens
