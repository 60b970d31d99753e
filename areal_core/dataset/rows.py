"""Rows of datasets, and supervised rows as tokens with a loss mask."""

from typing import TYPE_CHECKING, Any, cast

from areal_core.errors import DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]  # one example of a dataset, by field


def chat_ids(
    messages: list[Row], tokenizer: "PreTrainedTokenizerBase", add_generation_prompt: bool = False
) -> list[int]:
    """Return the token ids of a conversation in the tokenizer's chat template."""
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
