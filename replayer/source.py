"""Recorded rollouts as the trainer's source: the same batches, bit for bit, no engine.

With the recorded number of ranks, each gets its own batches. With another number, the groups of all
ranks are redistributed as the prompt loader distributes prompts: group i of the step goes to rank i
modulo their number.
"""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from areal_core.data.batch import (
    FINISH_REASONS,
    RAGGED,
    Batch,
    pad_and_concat,
    scatter_tokens,
    select_rows,
    sort_canonical,
)
from areal_core.engine.determinism import set_rng_state
from areal_core.errors import RewardError
from areal_core.reward import RewardPool
from areal_core.rollout.source import RolloutSource, WithoutEngine, WrappedRollouts
from recorder import Record, RecordedStep
from recorder.format import BATCH_KEYS, IMAGE_DATA, IMAGE_KEYS, TensorEntry
from replayer.errors import WrongEdit
from replayer.expression import ROW_NAMES, Expression, parse_expression

# NumPy lacks these types; the recorder returns their bits
TORCH_ONLY = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


class RecordedRollouts(WithoutEngine):
    """A source of the recorded rows of one data-parallel rank."""

    def __init__(self, record: Record, data_parallel_rank: int, data_parallel_size: int) -> None:
        self.record, self.rank, self.size = record, data_parallel_rank, data_parallel_size

    def next_batch(self, step: int, version: int) -> Batch:
        """Return the padded batch of a step, on the CPU; also restores recorded RNG states.

        `version` is the trainer's and changes nothing.

        Raises StepNotRecorded, and DamagedRecord with file and tensor if bytes differ from those
        written.
        """
        recorded = self.record.step(step)
        num_recorded = recorded.manifest.num_ranks
        if self.record.header.recording.has_plans:
            # With more ranks than recorded, some share an RNG state; only dropout uses it.
            set_rng_state(recorded.plan(self.rank % num_recorded).rng)
        if self.size == num_recorded:
            return recorded_batch(recorded, self.rank)
        return redistribute(
            [recorded_batch(recorded, rank) for rank in range(num_recorded)], self.rank, self.size
        )


def recorded_batch(recorded: RecordedStep, rank: int) -> Batch:
    """Return the batch of a rank in a step, padded as it was.

    Pictures are their bytes again. Of another trainer's batch it has the keys that every batch has,
    and those of pictures; a token whose version is unknown counts as sampled by the weights of the
    step.
    """
    _, entry = recorded.batch_entry(rank)
    arrays = recorded.batch(rank)
    lengths = np.diff(arrays.pop("cu_seqlens"))
    if "unknown" in arrays:
        kept = (*BATCH_KEYS, *IMAGE_KEYS, "mm_token_type_ids")
        arrays = {key: arrays[key] for key in kept if key in arrays}
        guessed = ~np.repeat(recorded.known(rank, "versions"), lengths) & arrays["loss_mask"].astype(bool)
        arrays["versions"][guessed] = recorded.manifest.version - 1
        arrays["logprobs"][arrays["loss_mask"] == 0] = 0  # as in our batches; it may be NaN
    mask = torch.from_numpy(np.arange(entry.padded_length) < lengths[:, None])
    pictures = {}
    if arrays.pop("image_sha256", None) is not None:
        pictures[IMAGE_DATA] = torch.from_numpy(recorded.image_data(rank))
    tensors = {key: as_tensor(array, entry.tensors[key]) for key, array in arrays.items()}
    return (
        {"attention_mask": mask}
        | {
            key: scatter_tokens(tensor, mask) if entry.tensors[key].axis == "token" else tensor
            for key, tensor in tensors.items()
        }
        | pictures
    )


def redistribute(batches: list[Batch], rank: int, size: int) -> Batch:
    """Return this rank's groups of a step that other ranks recorded, in canonical order."""
    batch = sort_canonical(pad_and_concat(batches))
    group = torch.unique(batch["prompt_id"], return_inverse=True)[1]  # [B], ascending
    return select_rows(batch, (group % size == rank).nonzero()[:, 0].tolist())


def as_tensor(array: np.ndarray, entry: TensorEntry) -> torch.Tensor:
    """Convert the array to a tensor of the trainer's dtype."""
    tensor = torch.from_numpy(array)
    return tensor.view(TORCH_ONLY[entry.dtype]) if entry.dtype in TORCH_ONLY else tensor


Edit = Callable[[Batch, int], Batch]


class EditedRollouts(WrappedRollouts):
    """A source that applies edits to its batches.

    Args:
        maximum: the largest of a count over ranks, a collective: all ranks learn if no rank has a
            row left.
        closing: functions to call at the end.
        share: broadcast a batch from the first of the ranks that share rows, a collective: an edit
            may be random.
    """

    def __init__(
        self,
        source: RolloutSource,
        edits: Sequence[Edit],
        maximum: Callable[[int], int] = lambda n: n,
        closing: Sequence[Callable[[], None]] = (),
        share: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        super().__init__(source)
        self.edits, self.maximum, self.closing = edits, maximum, closing
        self.share = share

    def next_batch(self, step: int, version: int) -> Batch:
        """Return the edited batch.

        Raises WrongEdit if an edit returns no batch, or leaves no row on any rank.
        """
        batch = self.sampled.next_batch(step, version)
        for edit in self.edits:
            edited = edit(batch, step)
            check_batch(edited, batch, step)
            batch = edited
        batch = self.share(batch)
        if self.maximum(len(batch["rewards"])) == 0:
            raise WrongEdit(f"step {step}: no row is left to train on; filter less, or leave the step out")
        return batch

    def close(self) -> None:
        """Close the source, and the resources of the edits."""
        super().close()
        for close in self.closing:
            close()


def check_batch(edited: object, before: Batch, step: int) -> None:
    """Raise WrongEdit unless keys, dtypes and dimensions are those of `before`."""
    if not isinstance(edited, dict) or set(edited) != set(before):
        seen = sorted(edited) if isinstance(edited, dict) else type(edited).__name__
        raise WrongEdit(f"step {step}: an edit must return a batch with {sorted(before)}, not {seen}")
    for key, tensor in edited.items():
        if tensor.dtype != before[key].dtype or tensor.dim() != before[key].dim():
            raise WrongEdit(
                f"step {step}: {key} became {tensor.dtype} {list(tensor.shape)}, it was {before[key].dtype}"
            )
    rows = {key: len(tensor) for key, tensor in edited.items() if key not in RAGGED}
    if len(set(rows.values())) != 1:
        raise WrongEdit(f"step {step}: tensors of the edited batch have different numbers of rows: {rows}")


def filter_rows(text: str, tokenizer: PreTrainedTokenizerBase) -> Edit:
    """Return an edit that keeps the rows for which the expression is true. Raises WrongFilter."""
    expression = parse_expression(text, ROW_NAMES)

    def keep(batch: Batch, step: int) -> Batch:
        rows = range(len(batch["rewards"]))
        return select_rows(
            batch,
            [row for row in rows if expression.matches(row_values(expression, batch, row, step, tokenizer))],
        )

    return keep


def row_values(
    expression: Expression, batch: Batch, row: int, step: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    prompt, completion = split_row(batch, row)
    trained = batch["loss_mask"][row].bool()
    values: dict[str, Any] = {
        "reward": float(batch["rewards"][row]),
        "prompt": prompt,
        "completion": completion,
        "finish_reason": FINISH_REASONS[int(batch["finish_reason"][row])],
        "logprobs": batch["logprobs"][row][trained].tolist(),
        "versions": batch["versions"][row][trained].tolist(),
        "prompt_id": int(batch["prompt_id"][row]),
        "sample_id": int(batch["sample_id"][row]),
        "step": step,
    }
    if "_text" in expression.text:
        values |= {"prompt_text": tokenizer.decode(prompt), "completion_text": tokenizer.decode(completion)}
    return values


def split_row(batch: Batch, row: int) -> tuple[list[int], list[int]]:
    ids = batch["input_ids"][row][batch["attention_mask"][row]].tolist()
    trained = batch["loss_mask"][row].nonzero()
    first = int(trained[0]) if len(trained) else len(ids)
    return ids[:first], ids[first:]


def load_edit(file: str) -> Edit:
    """Load the function `edit(batch, step)` of a Python file. Raises WrongEdit."""
    if not Path(file).is_file():
        raise WrongEdit(
            f"there is no edit script {file}: give a Python file with a function edit(batch, step)"
        )
    spec = importlib.util.spec_from_file_location("replay_edit", file)
    if spec is None or spec.loader is None:
        raise WrongEdit(f"{file} cannot be imported: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(edit := vars(module).get("edit")):
        raise WrongEdit(f"{file} has no function edit(batch, step) that returns the batch to train on")
    return edit


def reward_rows(pool: RewardPool, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> Edit:
    """Return an edit that computes rewards from prompt and completion alone.

    Args:
        skip_special_tokens: leave them out of completions, as the run's `gconfig` says.
    """

    def reward(batch: Batch, step: int) -> Batch:
        rows = [split_row(batch, row) for row in range(len(batch["rewards"]))]
        calls = [
            pool.submit(
                str(tokenizer.decode(prompt)),
                str(tokenizer.decode(completion, skip_special_tokens=skip_special_tokens)),
                prompt,
                completion,
            )
            for prompt, completion in rows
        ]
        try:
            rewards = [call.result() for call in calls]
        except RewardError as error:
            raise WrongEdit(
                f"step {step}: {error}\na record has prompt, completion and their tokens, but no dataset row"
            ) from error
        return batch | {"rewards": torch.tensor(rewards, dtype=batch["rewards"].dtype)}

    return reward
