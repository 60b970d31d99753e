"""Observe a trainer of TRL while it trains, in the same way for a recording and for its replay.

    GRPO: a step is a generation batch    _generate ─> _calculate_rewards ─> shuffle ─> split
    SFT, DPO: an optimizer step                                                │
                                     compute_loss of each micro-batch ─> clip ─> optimizer ─> on_log

The samples of a GRPO step may be trained by several optimizer steps, and an optimizer step may take
several generations, so losses and updates are kept in the order in which they happened. TRL
shuffles the rows of a generation; a tensor with their numbers is shuffled along. A step is complete
when the next one begins: TRL logs its statistics after `on_step_end`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import TrainerCallback

from areal_core.engine.checksums import local_checksums
from areal_debug.trl.known import GENERATED, known_name, replaced, unknown_version
from areal_debug.trl.samples import (
    CURRENT,
    OLD,
    Generated,
    Rewards,
    in_loss,
    rewards_of,
    samples_of_batch,
    samples_of_generation,
    to_numpy,
)
from recorder.checksum_json import checksum
from recorder.trainers.sample import LEARNING, Sample

ROWS = "areal_debug_rows"  # among TRL's inputs to the loss: rows of the generation batch
ENTROPY = LEARNING["entropies"]


@dataclass
class LossCall:
    """A micro-batch in the loss, [rows] of the step's samples.

    `logps` and `entropies` are those of the pass, [rows, tokens], the first one of token `begin`
    of a row; None: the trainer's model returned none. `checksums` are those of each row's `logps`.
    """

    rows: list[int]
    width: int | None = None  # last tokens whose log-probs are kept; None: all
    loss: Tensor | None = None
    logps: Tensor | None = None
    entropies: Tensor | None = None
    checksums: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        assert self.loss is not None
        return {"rows": self.rows, "loss": float(self.loss).hex(), "logps": self.checksums}


@dataclass
class Update:
    """An optimizer step; `weights` are checksums of the parameters after it."""

    lr: list[float]
    grad_norm: float
    weights: dict[str, str]

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "lr": [rate.hex() for rate in self.lr],
            "grad_norm": self.grad_norm.hex(),
            "weights": self.weights,
        }


@dataclass
class TrainedStep:
    """What a trainer did in a step.

    Attributes:
        number: of the step in the record.
        optimizer_step: those before it.
        functions: names of the reward functions.
        has_old_logps: TRL computed the old log-probs in a pass of their own.
        has_images: prompts or completions have images.
        rng: states of generators by where they were seen.
        weights_before: checksums before the first step of a run.
    """

    number: int
    optimizer_step: int
    samples: list[Sample] = field(default_factory=list)
    functions: tuple[str, ...] = ()
    has_old_logps: bool = False
    has_images: bool = False
    rng: dict[str, dict[str, str]] = field(default_factory=dict)
    work: list[LossCall | Update] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)
    weights_before: dict[str, str] | None = None
    is_complete: bool = False

    @property
    def updates(self) -> list[Update]:
        """Its optimizer steps."""
        return [item for item in self.work if isinstance(item, Update)]

    def num_losses(self) -> int:
        return len(self.work) - len(self.updates)


class Watcher(Protocol):
    """What a recording and a replay do while a trainer trains."""

    def begin(self, first_step: int) -> None:
        """Training begins; `first_step` is not 0 after a resume."""

    def started(self, step: TrainedStep) -> None:
        """A step begins."""

    def at(self, step: TrainedStep, place: str) -> None:
        """Random numbers are drawn next: "generated", "rewards", or "loss K" of micro-batch K."""

    def left(self) -> None:
        """A pass that may draw random numbers has ended."""

    def finished(self, step: TrainedStep) -> None:
        """A step has ended."""


class Observer(TrainerCallback):
    """Observes one `train()` of a trainer.

    `takes_checksums`: of the weights, after each optimizer step, on rank 0.
    """

    def __init__(self, trainer: Any, watcher: Watcher, takes_checksums: bool) -> None:
        self.trainer, self.watcher = trainer, watcher
        self.generates = known_name(trainer) == "GRPOTrainer"
        # shards of FSDP and DeepSpeed are no whole parameters
        is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        self.takes_checksums = takes_checksums and trainer.accelerator.process_index == 0 and not is_sharded
        self.next_step = 0
        self.current: TrainedStep | None = None
        self.call: LossCall | None = None  # while its loss is computed
        self.generated: Generated | None = None
        self.rewards: Rewards | None = None
        self.weights_before: dict[str, str] | None = None
        self.lr: list[float] = []
        self.grad_norm = float("nan")

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Replace the trainer's methods, and add this callback, until the end of the block."""
        trainer = self.trainer
        methods = {"compute_loss": self.compute_loss, "_get_grad_norm": self.get_grad_norm}
        if self.generates:
            methods |= {
                "_generate": self.generate,
                "_calculate_rewards": self.calculate_rewards,
                "_generate_and_score_completions": self.generate_and_score,
            }
        self.original = {name: getattr(trainer, name) for name in methods}
        hook = trainer.model.register_forward_hook(self.keep_logps)
        trainer.add_callback(self)
        try:
            with replaced(trainer, methods):
                yield
        finally:
            trainer.remove_callback(self)
            hook.remove()

    # the trainer's methods

    def generate(self, prompts: list[Any]) -> Any:
        """Keep the lists of tokens that were sampled."""
        result = self.original["_generate"](prompts)
        if self.current is None or not self.trainer.model.training:
            return result
        if len(result) != GENERATED:
            raise unknown_version(f"_generate returned {len(result)} values, {GENERATED} expected")
        prompt_ids, completion_ids, tool_mask, _, logprobs, _, images, _ = result
        self.generated = Generated(prompt_ids, completion_ids, tool_mask, logprobs, images)
        self.current.has_images = images is not None
        self.watcher.at(self.current, "generated")
        return result

    def calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        """Keep the rewards of all functions."""
        self.watcher.left()
        gathered = self.original["_calculate_rewards"](inputs, prompts, completions, completion_ids_list)
        if self.current is not None and self.trainer.model.training:
            self.rewards = rewards_of(self.trainer, gathered, len(prompts))
            self.watcher.at(self.current, "rewards")
        return gathered

    def generate_and_score(self, inputs: Any) -> Any:
        if not self.trainer.model.training:
            return self.original["_generate_and_score_completions"](inputs)
        step = self.begin()
        output = self.original["_generate_and_score_completions"](inputs)
        assert self.generated is not None
        assert self.rewards is not None
        step.samples = samples_of_generation(self.trainer, self.generated, output, self.rewards)
        step.functions = self.rewards.functions
        step.has_old_logps = "old_per_token_logps" in output
        return output | {ROWS: torch.arange(len(step.samples))}

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        if not self.trainer.model.training:
            return self.original["compute_loss"](model, inputs, *args, **options)
        step = self.current or self.begin()
        if self.generates:
            call = LossCall(inputs[ROWS].tolist(), inputs["completion_ids"].size(1))
        else:
            first = len(step.samples)
            samples, order = samples_of_batch(inputs, first)
            step.samples += samples
            # the log-probs of concatenated sequences are not taken apart
            width = None if "attention_mask" in inputs else 0
            call = LossCall([first + row for row in order], width)
        if step.work or not self.generates:  # else TRL's own shuffling came last
            self.watcher.at(step, f"loss {step.num_losses()}")
        self.call = call
        result = self.original["compute_loss"](model, inputs, *args, **options)
        self.call = None
        call.loss = (result[0] if isinstance(result, tuple) else result).detach().clone()
        step.work.append(call)
        self.watcher.left()
        return result

    def get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = self.original["_get_grad_norm"](model, grad_norm=grad_norm)
        self.grad_norm = float("nan") if norm is None else float(norm)
        return norm

    def keep_logps(self, _module: Any, _inputs: Any, output: Any) -> None:
        """Keep the log-probs of a pass in the loss; the first is that of the trained model."""
        call, logps = self.call, getattr(output, "log_probs", None)
        if call is not None and call.logps is None and logps is not None and call.width != 0:
            entropies = getattr(output, "entropy", None)
            width = 0 if call.width is None else -call.width  # of [rows, tokens - 1]
            call.logps = logps.detach()[:, width:]
            call.entropies = None if entropies is None else entropies.detach()[:, width:]

    # steps

    def begin(self) -> TrainedStep:
        """End the current step and begin another."""
        self.finish()
        step = TrainedStep(self.next_step, self.trainer.state.global_step)
        step.weights_before, self.weights_before = self.weights_before, None
        self.current, self.next_step = step, self.next_step + 1
        self.watcher.started(step)
        return step

    def finish(self, failed: bool = False) -> None:
        """End the current step, if there is one; `failed`: it lacks what would have followed."""
        step, self.current = self.current, None
        if step is None or not step.samples:
            return
        for call in step.work:
            if isinstance(call, LossCall) and call.logps is not None:
                self.add_learning(step, call)
        step.is_complete = not failed and self.is_complete(step)
        self.watcher.finished(step)

    def is_complete(self, step: TrainedStep) -> bool:
        """Return whether all losses and updates of a step have happened."""
        if not self.generates:
            return bool(step.updates)
        expected = self.trainer.args.steps_per_generation * self.trainer.num_iterations
        return step.num_losses() == expected

    def add_learning(self, step: TrainedStep, call: LossCall) -> None:
        assert call.logps is not None
        # without a pass for old log-probs TRL's loss takes those of its own
        columns = {CURRENT if step.has_old_logps else OLD: to_numpy(call.logps)}
        if call.entropies is not None:
            columns[ENTROPY] = to_numpy(call.entropies)
        for place, row in enumerate(call.rows):
            sample = step.samples[row]
            assert sample.loss_mask is not None
            begin = (sample.prompt_length or 0) if self.generates else 1
            values = {
                name: in_loss(sample.loss_mask, begin, column[place]) for name, column in columns.items()
            }
            call.checksums.append(checksum(next(iter(values.values())).tobytes()))
            step.samples[row] = replace(sample, learning={**values, **sample.learning})

    def checksums(self) -> dict[str, str]:
        """Return the checksums of the trained parameters; {} if none are taken."""
        return local_checksums(self.trainer.model) if self.takes_checksums else {}

    # events of Transformers' trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        losses = self.trainer.num_iterations * args.steps_per_generation if self.generates else 0
        self.next_step = (
            state.global_step * args.gradient_accumulation_steps // losses if losses else state.global_step
        )
        self.watcher.begin(self.next_step)
        self.weights_before = self.checksums()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a step whose work is done; its statistics have been logged."""
        if self.current is not None and self.is_complete(self.current):
            self.finish()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.lr = [float(group["lr"]) for group in self.trainer.optimizer.param_groups]

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep the update."""
        if self.current is not None:
            self.current.work.append(Update(self.lr, self.grad_norm, self.checksums()))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep TRL's statistics; those of the whole run, at its end, belong to no step."""
        if self.current is not None and logs and "train_runtime" not in logs:
            self.current.stats |= {
                name: value for name, value in logs.items() if isinstance(value, int | float)
            }
