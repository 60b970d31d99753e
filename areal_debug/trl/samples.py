"""Batches of TRL's trainers as samples of a record, and the samples of a recorded step.

Values per token are float32 in a record, also where TRL computes in bfloat16, which loses nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from recorder import RecordedStep
from recorder.errors import RecordError
from recorder.pictures.kinds import encoded
from recorder.trainers.sample import LENGTH, STOP, Sample

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
