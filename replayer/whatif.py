"""What if: recorded batches with rows left out, edited, or rewarded anew, on their way to the trainer.

record ─> RecordedRollouts ─> filter ─> edit script ─> rewards ─> trainer

Nothing is written into the record. Every edit is a function `(batch, step) -> batch` of this rank's padded batch.
"""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from areal_core.batch import FINISH_REASONS, Batch, select_rows
from areal_core.errors import RewardError
from areal_core.reward import RewardPool
from areal_core.rollout.source import RolloutSource, TrainedWeights
from replayer.errors import WrongEdit
from replayer.expression import ROW_NAMES, Expression, parse_expression

Edit = Callable[[Batch, int], Batch]


class EditedRollouts:
    """A source whose batches go through edits.

    Args:
        maximum: the largest of a count over ranks, a collective: every rank learns that no rank has a row left.
        closing: called at the end.
        share: a batch of the first of the ranks that hold the same rows, on all of them; a collective. An edit may draw numbers.
    """

    def __init__(
        self,
        source: RolloutSource,
        edits: Sequence[Edit],
        maximum: Callable[[int], int] = lambda n: n,
        closing: Sequence[Callable[[], None]] = (),
        share: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        self.source, self.edits, self.maximum, self.closing = source, edits, maximum, closing
        self.share = share

    def next_batch(self, step: int, version: int) -> Batch:
        """The edited batch. Raises WrongEdit when an edit gives no batch, or leaves no row on any rank."""
        batch = self.source.next_batch(step, version)
        for edit in self.edits:
            edited = edit(batch, step)
            check_batch(edited, batch, step)
            batch = edited
        batch = self.share(batch)
        if self.maximum(len(batch["rewards"])) == 0:
            raise WrongEdit(f"step {step}: no row is left to train on; filter less, or leave the step out")
        return batch

    def update_weights(self, engine: TrainedWeights, version: int) -> None:
        """As the source does."""
        self.source.update_weights(engine, version)

    def state_dict(self) -> dict[str, Any]:
        """The source's."""
        return self.source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """To the source."""
        self.source.load_state_dict(state)

    def close(self) -> None:
        """Closes the source, and what the edits hold."""
        self.source.close()
        for close in self.closing:
            close()


def check_batch(edited: object, before: Batch, step: int) -> None:
    """Raises WrongEdit unless `edited` has the keys and dtypes of `before` and one number of rows."""
    if not isinstance(edited, dict) or set(edited) != set(before):
        seen = sorted(edited) if isinstance(edited, dict) else type(edited).__name__
        raise WrongEdit(f"step {step}: an edit must return a batch with {sorted(before)}, not {seen}")
    for key, tensor in edited.items():
        if tensor.dtype != before[key].dtype or tensor.dim() != before[key].dim():
            raise WrongEdit(
                f"step {step}: {key} became {tensor.dtype} {list(tensor.shape)}, it was {before[key].dtype}"
            )
    if len({len(tensor) for tensor in edited.values()}) != 1:
        rows = {key: len(tensor) for key, tensor in edited.items()}
        raise WrongEdit(f"step {step}: tensors of the edited batch have different numbers of rows: {rows}")


def filter_rows(text: str, tokenizer: PreTrainedTokenizerBase) -> Edit:
    """Keeps the rows for which the expression holds. Raises WrongFilter."""
    expression = parse_expression(text, ROW_NAMES)

    def keep(batch: Batch, step: int) -> Batch:
        rows = range(len(batch["rewards"]))
        return select_rows(
            batch,
            [row for row in rows if expression.holds(row_values(expression, batch, row, step, tokenizer))],
        )

    return keep


def row_values(
    expression: Expression, batch: Batch, row: int, step: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """What the expression's names mean for a row."""
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
    """Token ids of the prompt, which ends before the first trained token, and of all that follows."""
    ids = batch["input_ids"][row][batch["attention_mask"][row]].tolist()
    trained = batch["loss_mask"][row].nonzero()
    first = int(trained[0]) if len(trained) else len(ids)
    return ids[:first], ids[first:]


def load_edit(file: str) -> Edit:
    """The function `edit(batch, step)` of a Python file. Raises WrongEdit."""
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


def reward_rows(pool: RewardPool, tokenizer: PreTrainedTokenizerBase) -> Edit:
    """Computes the reward of every row with a reward function, from its prompt and completion alone."""

    def reward(batch: Batch, step: int) -> Batch:
        rows = [split_row(batch, row) for row in range(len(batch["rewards"]))]
        calls = [
            pool.submit(str(tokenizer.decode(prompt)), str(tokenizer.decode(completion)), prompt, completion)
            for prompt, completion in rows
        ]
        try:
            rewards = [call.result() for call in calls]
        except RewardError as error:
            raise WrongEdit(
                f"step {step}: {error}\na record holds prompt, completion and their tokens, no row of a dataset"
            ) from error
        return batch | {"rewards": torch.tensor(rewards, dtype=batch["rewards"].dtype)}

    return reward
