"""What-if edits of recorded batches: filter rows, edit them, recompute rewards.

record ─> RecordedRollouts ─> filter ─> edit script ─> rewards ─> trainer

The record is never written. Every edit is a function `(batch, step) -> batch` of this rank's padded
batch.
"""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from areal_core.data.batch import FINISH_REASONS, RAGGED, Batch, select_rows
from areal_core.errors import RewardError
from areal_core.reward import RewardPool
from areal_core.rollout.source import RolloutSource, WrappedRollouts
from replayer.errors import WrongEdit
from replayer.expression import ROW_NAMES, Expression, parse_expression

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
