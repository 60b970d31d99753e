"""Preference rows as tokens: two answers to one prompt, of which somebody preferred the first."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from areal_core.errors import DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from areal_core.dataset.sources import Row

EXPECTED = (
    "chosen and rejected, both texts or both lists of messages, and the prompt or messages before them, "
    "if they do not begin with it"
)


def pair_row(row: "Row", tokenizer: "PreTrainedTokenizerBase", where: str) -> dict[str, list[int]]:
    """`chosen_ids`, `rejected_ids`, and `chosen_loss_mask`, `rejected_loss_mask`: 0 on the tokens with which both begin.

    Rows hold `chosen` and `rejected`, and before them `prompt` or `messages`. Texts end with EOS; messages go through the chat
    template, which ends them. Without a prompt, and where messages begin with a turn of the user, they are whole conversations.

    Raises:
        DatasetError: the row has other fields; `where` says which it is.
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
    """Prompt and answer as tokens, to the end of the answer. A text is tokenised apart from its prompt, as in a rollout."""
    match prompt, answer:
        case _, [{"role": "user" | "system"}, *_]:
            return tokenizer.apply_chat_template(answer, return_dict=False)
        case list(), [_, *_]:
            return tokenizer.apply_chat_template([*prompt, *answer], return_dict=False)
        case str(), [_, *_]:
            turn = {"role": "user", "content": prompt}
            return tokenizer.apply_chat_template([turn, *answer], return_dict=False)
        case list(), str():
            before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        case str(), str():
            before = tokenizer.encode(prompt)
        case None, str():
            return [*tokenizer.encode(answer), tokenizer.eos_token_id]
        case _:
            raise DatasetError(f"{where} has no text and no messages to compare; expected {EXPECTED}")
    return [*before, *tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]


def num_shared(chosen: Sequence[int], rejected: Sequence[int]) -> int:
    """Tokens with which both begin."""
    both = enumerate(zip(chosen, rejected, strict=False))
    return next((i for i, (a, b) in both if a != b), min(len(chosen), len(rejected)))


def pair_length(row: dict[str, list[int]]) -> int:
    """Tokens of the longer side."""
    return max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def is_tie(row: dict[str, list[int]]) -> bool:
    """Whether both sides are the same tokens, from which nothing can be learned."""
    return row["chosen_ids"] == row["rejected_ids"]
