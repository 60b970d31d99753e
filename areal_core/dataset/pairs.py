"""Preference rows as tokens: two answers to one prompt, a chosen and a rejected one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from areal_core.dataset.tokens import Row, chat_ids
from areal_core.errors import DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXPECTED = (
    "chosen and rejected, both texts or both lists of messages, and the prompt or messages before them, "
    "if they do not begin with it"
)


def pair_row(row: Row, tokenizer: "PreTrainedTokenizerBase", where: str) -> dict[str, list[int]]:
    """Return `chosen_ids`, `rejected_ids`, `chosen_loss_mask` and `rejected_loss_mask`.

    A loss mask is 0 on the common prefix of the two. Rows have `chosen` and `rejected`, and
    optionally the `prompt` or `messages` before them. EOS is appended to texts; messages go through
    the chat template, which ends them. Without a prompt, and if the messages start with a system or
    user turn, they are complete conversations.

    Args:
        where: names the row in errors.

    Raises:
        DatasetError: the row has other fields.
    """
    if "chosen" not in row or "rejected" not in row or type(row["chosen"]) is not type(row["rejected"]):
        raise DatasetError(f"{where} has {', '.join(row) or 'no fields'}; expected {EXPECTED}")
    prompt = next((row[name] for name in ("messages", "prompt") if name in row), None)
    chosen, rejected = (answer_ids(prompt, row[side], tokenizer, where) for side in ("chosen", "rejected"))
    shared = num_shared(chosen, rejected)
    return {
        "chosen_ids": chosen,
        "rejected_ids": rejected,
        "chosen_loss_mask": [0] * shared + [1] * (len(chosen) - shared),
        "rejected_loss_mask": [0] * shared + [1] * (len(rejected) - shared),
    }


def answer_ids(prompt: Any, answer: Any, tokenizer: "PreTrainedTokenizerBase", where: str) -> list[int]:
    """Return prompt and answer as tokens; a text is tokenised separately from its prompt."""
    match prompt, answer:
        case _, [{"role": "user" | "system"}, *_]:
            return chat_ids(answer, tokenizer)
        case list(), [_, *_]:
            return chat_ids([*prompt, *answer], tokenizer)
        case str(), [_, *_]:
            turn = {"role": "user", "content": prompt}
            return chat_ids([turn, *answer], tokenizer)
        case list(), str():
            prompt_ids = chat_ids(prompt, tokenizer, add_generation_prompt=True)
        case str(), str():
            prompt_ids = tokenizer.encode(prompt)
        case None, str():
            return [*tokenizer.encode(answer), tokenizer.eos_token_id]
        case _:
            raise DatasetError(f"{where} has no text and no messages to compare; expected {EXPECTED}")
    return [*prompt_ids, *tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]


def num_shared(chosen: Sequence[int], rejected: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    both = enumerate(zip(chosen, rejected, strict=False))
    return next((i for i, (a, b) in both if a != b), min(len(chosen), len(rejected)))


def pair_length(row: dict[str, list[int]]) -> int:
    """Return the number of tokens of the longer side."""
    return max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def is_tie(row: dict[str, list[int]]) -> bool:
    """Return whether both sides are the same tokens: such a pair has no gradient."""
    return row["chosen_ids"] == row["rejected_ids"]
