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
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather, gather_object
from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from areal_core.safety.secrets import masker
from recorder import Record, open_record
from recorder.difference import Difference, find_differences
from recorder.trainers.recorder import plain
from recorder.trainers.sample import Sample
from replayer.trl.observing import (
    CURRENT,
    OLD,
    REFERENCE,
    Generators,
    LossCall,
    Observer,
    TrainedStep,
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


@dataclass(frozen=True)
class Found:
    """A difference without its step: `values` are the recorded and the replayed one.

    `after` are the optimizer steps of the step before it.
    """

    stage: str
    values: tuple[Any, Any]
    name: str | None = None
    row: int | None = None
    token: int | None = None
    after: int = 0


def first_difference(
    samples: Sequence[Sample], details: Mapping[str, Any], step: TrainedStep, rank: int
) -> StepDifference | None:
    """Return the first difference of a step from its recorded samples and details."""
    found = next(differences(samples, details, step), None)
    if found is None:
        return None
    number = step.optimizer_step + found.after
    place = (found.row, found.token, found.name)
    return StepDifference(step.number, number, found.stage, *place, *found.values, rank)


def differences(samples: Sequence[Sample], details: Mapping[str, Any], step: TrainedStep) -> Iterator[Found]:
    """Yield the differences of a step."""
    if details["weights_before"] and step.weights_before:
        yield from of_weights("weights before the step", details["weights_before"], step.weights_before)
    if len(samples) != len(step.samples):
        yield Found("batch", (len(samples), len(step.samples)), "number of rows")
    rows = list(enumerate(zip(samples, step.samples, strict=False)))
    for row, (left, right) in rows:
        yield from of_tokens("batch", row, left.tokens, right.tokens)
        yield from of_tokens("batch", row, left.loss_mask, right.loss_mask, "loss mask")
    for row, (left, right) in rows:
        if repr(left.reward) != repr(right.reward):
            yield Found("rewards", (left.reward, right.reward), row=row)
    stages = {"advantages": "advantages", "old log-probs": OLD, "reference log-probs": REFERENCE}
    for stage, name in stages.items():
        if name != OLD or details["has_old_logps"]:
            for row, (left, right) in rows:
                yield from of_tokens(stage, row, left.learning.get(name), right.learning.get(name))
    yield from of_work(samples, details["work"], step, details["is_complete"])


def of_tokens(
    stage: str,
    row: int,
    left: np.ndarray | None,
    right: np.ndarray | None,
    name: str | None = None,
    after: int = 0,
) -> Iterator[Found]:
    """Yield the first token whose values, int32 or float32 [T], differ in their bits."""
    if left is None or right is None:
        if left is not right:
            known = ("absent" if left is None else "present", "absent" if right is None else "present")
            yield Found(stage, known, name, row, None, after)
        return
    if len(left) != len(right):
        yield Found(stage, (len(left), len(right)), "number of tokens", row, None, after)
    size = min(len(left), len(right))
    different = left[:size].view(np.int32) != right[:size].view(np.int32)
    if different.any():
        token = int(different.argmax())
        yield Found(stage, (left[token].item(), right[token].item()), name, row, token, after)


def of_weights(
    stage: str, left: Mapping[str, str], right: Mapping[str, str], after: int = 0
) -> Iterator[Found]:
    """Yield the first parameter whose checksums differ."""
    different = [name for name in {**left, **right} if left.get(name) != right.get(name)]
    for name in different[:1]:
        what = f"checksum of {name} ({len(different)} of {len(left)} parameters differ)"
        yield Found(stage, (left.get(name), right.get(name)), what, after=after)


def of_work(
    samples: Sequence[Sample], recorded: Sequence[Mapping[str, Any]], step: TrainedStep, is_complete: bool
) -> Iterator[Found]:
    after = 0
    for left, item in zip(recorded, step.work, strict=False):
        right = item.document()
        if left.keys() != right.keys():
            kinds = ("an optimizer step", "a micro-batch")
            yield Found("order", kinds if "lr" in left else kinds[::-1], "what follows", after=after)
            return
        if isinstance(item, LossCall):
            yield from of_loss(samples, step, left, right, after)
        else:
            yield from of_update(left, right, after)
            after += 1
    if is_complete and len(recorded) != len(step.work):
        name = "number of micro-batches and optimizer steps"
        yield Found("order", (len(recorded), len(step.work)), name, after=after)


def of_loss(
    samples: Sequence[Sample],
    step: TrainedStep,
    left: Mapping[str, Any],
    right: Mapping[str, Any],
    after: int,
) -> Iterator[Found]:
    """Yield the differences of a micro-batch in the loss, from the documents of both."""
    rows = left["rows"]
    if rows != right["rows"]:
        yield Found("order", (rows, right["rows"]), "rows of a micro-batch", after=after)
    for row, recorded, replayed in zip(rows, left["logps"], right["logps"], strict=False):
        if recorded != replayed:
            # values were kept of the first pass of a row only
            pair = samples[row].learning, step.samples[row].learning
            name = CURRENT if CURRENT in pair[0] else OLD
            yield from of_tokens("log-probs", row, pair[0].get(name), pair[1].get(name), None, after)
            yield Found("log-probs", (recorded, replayed), "checksum", row, None, after)
    if left["loss"] != right["loss"]:
        losses = (float.fromhex(left["loss"]), float.fromhex(right["loss"]))
        yield Found("loss", losses, f"that of rows {rows}", rows[0] if len(rows) == 1 else None, None, after)


def of_update(left: Mapping[str, Any], right: Mapping[str, Any], after: int) -> Iterator[Found]:
    if left["grad_norm"] != right["grad_norm"]:
        norms = (float.fromhex(left["grad_norm"]), float.fromhex(right["grad_norm"]))
        yield Found("gradient norm", norms, after=after)
    if left["lr"] != right["lr"]:
        yield Found("learning rate", (rates(left["lr"]), rates(right["lr"])), after=after)
    if left["weights"] and right["weights"]:
        yield from of_weights("weights", left["weights"], right["weights"], after)


def rates(texts: Sequence[str]) -> str:
    """Return the learning rates of the parameter groups, each once."""
    return ", ".join(str(float.fromhex(text)) for text in dict.fromkeys(texts))


# options that name places, not numbers of the training
PLACES = (
    *("output_dir", "run_name", "report_to", "hub_", "push_to_hub", "logging_", "save_", "eval_", "log_"),
    *("do_", "disable_tqdm", "project", "trackio_"),
)


class CannotReplay(ValueError):
    """The record and the trainer do not belong together."""


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
    observer = Observer(trainer, replaying, True)
    with replaced(trainer, replaying.methods()), quiet(trainer), observer.observing():
        try:
            trainer.train(resume_from_checkpoint=resume_from_checkpoint)
            observer.finish()
        except ReplayEnded:
            pass
    result = replaying.result()
    if trainer.accelerator.is_main_process:
        print(result, file=sys.stdout, flush=True)
    return result


@contextmanager
def quiet(trainer: Any) -> Iterator[None]:
    """Save, evaluate, log and report nothing until the end of the block."""

    class Quiet(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = control.should_evaluate = control.should_log = False

        on_epoch_end = on_step_end

    handler = trainer.callback_handler
    before = handler.callbacks
    reporters = tuple(INTEGRATION_TO_CALLBACK.values())
    handler.callbacks = [callback for callback in before if not isinstance(callback, reporters)]
    handler.add_callback(Quiet())
    try:
        with replaced(trainer.args, {"eval_on_start": False}):
            yield
    finally:
        handler.callbacks = before


class Replaying:
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
        self.difference: StepDifference | None = None
        self.samples: list[Sample] = []
        self.details: Mapping[str, Any] = {}
        self.check()

    def check(self) -> None:
        """Raise CannotReplay unless this is a record of such a trainer."""
        path, header, name = self.record.path, self.record.header, known_name(self.trainer)
        num_processes = self.trainer.accelerator.num_processes
        if header.trainer != "trl" or "imported" in header.environment:
            raise CannotReplay(
                f"{path} was not recorded by areal_debug.trl.record: it is of {header.trainer or 'our trainer'}"
            )
        if not self.record.steps:
            raise CannotReplay(f"{path} holds no steps: there is nothing to replay")
        first = self.record.step(self.record.steps[0])
        if first.rank_name("plan", 0, "json") not in first.manifest.files:
            raise CannotReplay(f"{path} has no plan of TRL's training: record with areal_debug.trl.record")
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

    def begin(self, first_step: int) -> None:
        """Check that the record has the step at which the trainer stands."""
        if first_step not in self.record.steps:
            at = self.record.step(self.record.steps[0]).plan(self.rank).details["optimizer_step"]
            raise CannotReplay(
                f"{self.record.path} begins with optimizer step {at}, and the trainer stands before another: "
                "give resume_from_checkpoint=, the checkpoint that the run started from"
            )
        self.next_step = first_step

    def started(self, step: TrainedStep) -> None:
        """Read the step from the record."""
        self.load(step.number)
        self.next_step = step.number + 1

    def at(self, step: TrainedStep, place: str) -> None:
        """Set the random generators to the recorded states."""
        self.generators.restore(self.details["rng"].get(place, {}))

    def left(self) -> None:
        """Do nothing: only a recording keeps states."""

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
