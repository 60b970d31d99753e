"""Observe a trainer of TRL while it trains, in the same way for a recording and for its replay.

    GRPO: a step is a generation batch    _generate ─> _calculate_rewards ─> shuffle ─> split
    SFT, DPO: an optimizer step                                                │
                                     compute_loss of each micro-batch ─> clip ─> optimizer ─> on_log

The samples of a GRPO step may be trained by several optimizer steps, and an optimizer step may take
several generations, so losses and updates are kept in the order in which they happened. TRL
shuffles the rows of a generation; a tensor with their numbers is shuffled along. A step is complete
when the next one begins: TRL logs its statistics after `on_step_end`.
"""

import base64
import inspect
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback

from areal_core.engine.checksums import local_checksums
from recorder import Record, RecordedStep
from recorder.documents import checksum
from recorder.errors import RecordError
from recorder.pictures.kinds import encoded
from recorder.trainers.sample import LEARNING, LENGTH, STOP, Sample

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
        assert self.loss is not None
        return {"rows": self.rows, "loss": float(self.loss).hex(), "logps": self.checksums}


@dataclass
class Update:
    """An optimizer step; `weights` are checksums of the parameters after it."""

    lr: list[float]
    grad_norm: float
    weights: dict[str, str]

    def document(self) -> dict[str, Any]:
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
        losses: what each micro-batch adds to the loss of its optimizer step.
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
    losses: list[Tensor] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)
    weights_before: dict[str, str] | None = None
    is_complete: bool = False

    @property
    def updates(self) -> list[Update]:
        """Its optimizer steps."""
        return [item for item in self.work if isinstance(item, Update)]

    def num_losses(self) -> int:
        return len(self.work) - len(self.updates)


class Watcher:
    """What a recording and a replay do while a trainer trains: nothing, unless they say so."""

    def begin(self, optimizer_step: int, number: int) -> int:
        """Training begins, after a resume not at 0. Return the number of its first step: by default `number`."""
        return number

    def leaves(self, optimizer_step: int) -> bool:
        """Return whether TRL shall generate at an optimizer step, as after a resume."""
        return False

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
        methods = {
            "compute_loss": self.compute_loss,
            "training_step": self.training_step,
            "_get_grad_norm": self.get_grad_norm,
        }
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

    def training_step(self, *args: Any, **options: Any) -> Any:
        """Keep what a micro-batch adds to the loss: of some trainers, compute_loss gives the mean of it alone."""
        loss = self.original["training_step"](*args, **options)
        if self.current is not None:
            self.current.losses.append(loss.detach())
        return loss

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
        number = state.global_step
        if self.generates:
            losses = self.trainer.num_iterations * args.steps_per_generation
            number = -(-number * args.gradient_accumulation_steps // losses)
        self.next_step = self.watcher.begin(state.global_step, number)
        self.weights_before = self.checksums()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a step whose work is done; its statistics have been logged."""
        if self.current is not None and self.watcher.leaves(state.global_step):
            self.trainer._buffered_inputs, self.trainer._step = None, 0
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


READ = "1.16"  # the version of TRL whose source these are from
LOSS = {
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "_get_grad_norm": ("model", "grad_norm"),
}
GENERATION = {
    "_generate": ("prompts",),
    "_tokenize_prompts": ("prompts",),
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_generate_and_score_completions": ("inputs",),
}
METHODS = {"GRPOTrainer": LOSS | GENERATION, "SFTTrainer": LOSS, "DPOTrainer": LOSS}
GENERATED = 8  # values that `_generate` returns


class UnknownTrainer(ValueError):
    """The trainer is none that the adapter knows, or of another version of TRL."""


def known_name(trainer: Any) -> str:
    """Return which of TRL's trainers this is, or is derived from. Raises UnknownTrainer."""
    names = [cls.__name__ for cls in type(trainer).__mro__]
    found = next((name for name in names if name in METHODS), None)
    if found is None:
        raise UnknownTrainer(
            f"a {names[0]} is not a trainer that areal_debug.trl knows ({', '.join(METHODS)}): "
            "use areal_debug.Recorder in its loop"
        )
    for method, expected in METHODS[found].items():
        function = getattr(type(trainer), method, None)
        has = "no such method" if function is None else tuple(inspect.signature(function).parameters)[1:]
        if has != expected:
            raise unknown_version(f"{names[0]}.{method} has {has}, {expected} expected")
    return found


def unknown_version(what: str) -> UnknownTrainer:
    """Return the error for a version of TRL in which something is not as expected."""
    return UnknownTrainer(
        f"TRL {version('trl')} is not known to areal_debug.trl, which was written for TRL {READ}: {what}; "
        "use areal_debug.Recorder in the loop, or that version"
    )


@contextmanager
def replaced(trainer: Any, methods: dict[str, Any]) -> Iterator[None]:
    """Replace methods and attributes of this instance until the end of the block."""
    before = {name: vars(trainer)[name] for name in methods if name in vars(trainer)}
    vars(trainer).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(trainer)[name]
        vars(trainer).update(before)


class Generators:
    """The generators of a process whose model is on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.left: dict[str, Tensor] = {}

    def read(self) -> dict[str, Tensor]:
        """Return the states by name."""
        states = {"torch": torch.get_rng_state()}
        if self.device.type != "cpu":
            states[self.device.type] = torch.get_device_module(self.device).get_rng_state(self.device)
        return states

    def leave(self) -> None:
        """Remember the states after a pass."""
        self.left = self.read()

    def changes(self) -> dict[str, str]:
        """Return the states that are not those that `leave` remembered, as texts of FORMAT.md."""
        states = self.read()
        return {
            name: base64.b64encode(state.numpy().tobytes()).decode()
            for name, state in states.items()
            if name not in self.left or not torch.equal(state, self.left[name])
        }

    def restore(self, texts: Mapping[str, str]) -> None:
        """Set states from their texts."""
        for name, text in texts.items():
            state = torch.from_numpy(np.frombuffer(base64.b64decode(text), np.uint8).copy())
            if name == "torch":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(self.device).set_rng_state(state, self.device)


# log-probs in a record: those that the loss takes as old ones, of the reference, and of the first
# pass in the loss where these are not the old ones
OLD, REFERENCE, CURRENT = "prox_logp", "ref_logp", "current_logp"
LEARNING = {"old_per_token_logps": OLD, "ref_per_token_logps": REFERENCE}  # by TRL's names
IGNORED = -100  # label of a token that is not in the loss


@dataclass(frozen=True)
class Generated:
    """What TRL sampled on this process, a list a row; `tool_mask` is 0 on a tool's tokens."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]] | None
    logprobs: list[list[float | None]] | None
    images: list[list[Any] | None] | None = None  # of the prompt, then of tools


@dataclass(frozen=True)
class Rewards:
    """Rewards of this process' rows [rows, functions], and their weighted sum; NaN: none."""

    functions: tuple[str, ...]
    by_function: np.ndarray
    total: np.ndarray


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's values, float32 if they are floats."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()


def along(num_tokens: int, begin: int, values: Any, dtype: type) -> np.ndarray:
    """Return [T]: 0 before `begin`, then the values, of which there may be more, or one for all."""
    array: np.ndarray = np.zeros(num_tokens, dtype)
    values = np.asarray(values, dtype)
    array[begin:] = values[: num_tokens - begin] if values.ndim else values
    return array


def in_loss(mask: np.ndarray, begin: int, values: Any) -> np.ndarray:
    """Return float32 [T]: the values from `begin` on, 0 where the mask is 0."""
    return np.where(mask, along(len(mask), begin, values, np.float32), np.float32(0))


def unique(names: Sequence[str]) -> tuple[str, ...]:
    """Return names, numbered where they occur again, such as those of two lambdas."""
    return tuple(name if name not in names[:place] else f"{name}.{place}" for place, name in enumerate(names))


def rewards_of(trainer: Any, gathered: torch.Tensor, num_rows: int) -> Rewards:
    """Return this process' rewards from those of all processes, summed as GRPOTrainer sums them."""
    total = (gathered * trainer.reward_weights.to(gathered.device)).nansum(dim=1)
    total[gathered.isnan().all(dim=1)] = torch.nan
    first = trainer.accelerator.process_index * num_rows
    own = slice(first, first + num_rows)
    return Rewards(unique(trainer.reward_func_names), to_numpy(gathered[own]), to_numpy(total[own]))


def samples_of_generation(
    trainer: Any, generated: Generated, output: Mapping[str, Any], rewards: Rewards
) -> list[Sample]:
    """Return the samples of a generation batch, from the inputs to the loss that TRL made of it.

    Groups follow each other in the rows of all processes.
    """
    masks = to_numpy(output["completion_mask"] * output.get("tool_mask", 1))
    columns = {name: to_numpy(output[key]) for key, name in LEARNING.items() if key in output}
    columns["advantages"] = to_numpy(output["advantages"])
    pictures = pictures_of(generated.images)
    ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
    first = trainer.accelerator.process_index * len(generated.prompt_ids)
    samples = []
    for row, prompt in enumerate(generated.prompt_ids):
        completion, total = generated.completion_ids[row], float(rewards.total[row])
        place = len(prompt) + len(completion), len(prompt)
        mask = along(*place, masks[row], np.int32)
        logprobs, tool_mask = generated.logprobs, generated.tool_mask
        samples.append(
            Sample(
                tokens=np.array([*prompt, *completion], np.int32),
                loss_mask=mask,
                logprobs=None if logprobs is None else along(*place, logprobs[row], np.float32),
                reward=None if np.isnan(total) else total,
                group=(first + row) // trainer.num_generations,
                finish_reason=STOP if completion[-1] in ends else LENGTH,
                versions=np.full(place[0], trainer.state.global_step, np.int32),
                prompt_length=len(prompt),
                learning={name: in_loss(mask, len(prompt), column[row]) for name, column in columns.items()},
                extras={} if tool_mask is None else {"tool_mask": along(*place, tool_mask[row], np.uint8)},
                scores=dict(zip(rewards.functions, rewards.by_function[row].tolist(), strict=True)),
                images=pictures[row] if pictures else (),
            )
        )
    return samples


def pictures_of(images: Sequence[Sequence[Any] | None] | None) -> list[tuple[bytes, ...]] | None:
    """Return the files of each row's images, PNG of those that are decoded.

    None without images, and if one is of a kind that no file can be made of.
    """
    each: dict[int, bytes] = {}  # by object: the rows of a group share their images
    try:
        for image in (image for row in images or () for image in row or ()):
            if id(image) not in each:
                each[id(image)] = encoded(image, "an image")
    except (RecordError, OSError):  # Pillow raises OSError for a mode that PNG has not
        return None
    return None if images is None else [tuple(each[id(image)] for image in row or ()) for row in images]


def samples_of_batch(inputs: Mapping[str, Any], first: int) -> tuple[list[Sample], list[int]]:
    """Return the samples of a micro-batch of SFTTrainer or DPOTrainer, and the sample of each row.

    DPO's rows are the chosen ones, then the rejected ones: each pair is a group of two samples, the
    chosen one first. Without padding SFT has one row of sequences that begin at position 0.
    """
    tokens = to_numpy(inputs["input_ids"])
    is_pairs = "completion_mask" in inputs
    trained = to_numpy(inputs["completion_mask"] if is_pairs else inputs["labels"] != IGNORED)
    if "attention_mask" in inputs:
        real = to_numpy(inputs["attention_mask"]).astype(bool)
        rows = [(ids[keep], mask[keep]) for ids, mask, keep in zip(tokens, trained, real, strict=True)]
    else:
        starts = np.flatnonzero(to_numpy(inputs["position_ids"])[0] == 0)[1:]
        rows = list(zip(np.split(tokens[0], starts), np.split(trained[0], starts), strict=True))
    pairs = len(rows) // 2 if is_pairs else 0
    order = [row % pairs * 2 + row // pairs for row in range(len(rows))] if pairs else list(range(len(rows)))
    samples = {
        place: Sample(
            tokens=ids.astype(np.int32),
            loss_mask=mask.astype(np.int32),
            group=first + place // 2 if pairs else None,
            prompt_length=int(mask.argmax()) if mask.any() else len(mask),
        )
        for place, (ids, mask) in zip(order, rows, strict=True)
    }
    return [samples[place] for place in range(len(rows))], order


def count_before(record: Record, rank: int, optimizer_step: int) -> int:
    """Return how many recorded steps began before an optimizer step of TRL."""
    return bisect_left(record.steps, optimizer_step, key=lambda number: begin_of(record, rank, number))


def begin_of(record: Record, rank: int, number: int) -> int:
    """Return the optimizer step of TRL at which a recorded step began."""
    begin: int = record.step(number).plan(rank).details["optimizer_step"]
    return begin


def samples_of_step(step: RecordedStep, rank: int) -> list[Sample]:
    """Return a rank's samples of a recorded step; groups are not read back."""
    batch = step.batch(rank)
    bounds = batch.pop("cu_seqlens")
    scores = {name.removeprefix("scores."): batch[name] for name in batch if name.startswith("scores.")}
    known = {key: step.known(rank, key) for key in ("logprobs", "rewards", "finish_reason", "prompt_length")}
    has_learning = step.rank_name("learning", rank, "safetensors") in step.manifest.batches
    learning = step.learning(rank) if has_learning else {}
    learning.pop("cu_seqlens", None)
    return [
        Sample(
            tokens=batch["input_ids"][begin:end],
            loss_mask=batch["loss_mask"][begin:end],
            logprobs=batch["logprobs"][begin:end] if known["logprobs"][row] else None,
            reward=float(batch["rewards"][row]) if known["rewards"][row] else None,
            finish_reason=int(batch["finish_reason"][row]) if known["finish_reason"][row] else None,
            prompt_length=int(batch["prompt_length"][row]) if known["prompt_length"][row] else None,
            # position t of a row belongs to token t + 1
            learning={
                name: np.concatenate([np.zeros(1, np.float32), values[begin : end - 1]])
                for name, values in learning.items()
            },
            extras={name: batch[name][begin:end] for name in ("tool_mask",) if name in batch},
            scores={name: float(values[row]) for name, values in scores.items()},
        )
        for row, (begin, end) in enumerate(pairwise(bounds))
    ]
