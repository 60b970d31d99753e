"""Rows of datasets, their JSON, and supervised rows as tokens with a loss mask."""

import base64
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from areal_core.errors import DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]  # one example of a dataset, by field


BYTES = "__bytes__"  # key of an object that stands for bytes, such as a picture


def rows_to_json(value: Any) -> str:
    """Return JSON of rows for another process; `rows_from_json` gives the same value.

    Raises TypeError for a value that is neither of JSON nor bytes.
    """
    return json.dumps(value, default=_bytes_to_json)


def rows_from_json(text: str | bytes) -> Any:
    return json.loads(text, object_hook=_bytes_from_json)


def _bytes_to_json(value: Any) -> dict[str, str]:
    if isinstance(value, bytes):
        return {BYTES: base64.b64encode(value).decode()}
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _bytes_from_json(found: dict[str, Any]) -> Any:
    return base64.b64decode(found[BYTES]) if found.keys() == {BYTES} else found


def chat_ids(
    messages: list[Row], tokenizer: "PreTrainedTokenizerBase", add_generation_prompt: bool = False
) -> list[int]:
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    return cast("list[int]", ids)  # one conversation and no dict: a list


def sft_row(row: Row, tokenizer: "PreTrainedTokenizerBase") -> dict[str, list[int]]:
    """Return `input_ids` and `loss_mask` (0 on the prompt, 1 on completion and EOS).

    Prompt and completion are tokenised separately, as in a rollout, where the completion starts
    after a finished prompt. Rows have `prompt` and `completion`, or `question` and `answer`, or
    `messages` (through the chat template) and `answer`.

    Raises:
        DatasetError: the row has other fields.
    """
    if "messages" in row and "answer" in row:
        prompt = chat_ids(row["messages"], tokenizer, add_generation_prompt=True)
        completion = row["answer"]
    elif "prompt" in row and "completion" in row:
        prompt, completion = tokenizer.encode(row["prompt"]), row["completion"]
    elif "question" in row and "answer" in row:
        prompt, completion = tokenizer.encode(row["question"] + "\n"), row["answer"]
    else:
        raise DatasetError(
            f"a supervised row has {', '.join(row) or 'no fields'}; "
            "expected prompt and completion, question and answer, or messages and answer"
        )
    completion_ids = [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id]
    return {
        "input_ids": [*prompt, *completion_ids],
        "loss_mask": [0] * len(prompt) + [1] * len(completion_ids),
    }


def num_shared(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return the number of items that two sequences begin with in common."""
    low, high = 0, min(len(left), len(right))
    while low < high:  # they agree on `low` items, and not on more than `high`
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
