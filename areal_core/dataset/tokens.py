"""Supervised rows as tokens: the prompt is read, the completion and its EOS are learned."""

from typing import TYPE_CHECKING, Any

from areal_core.errors import DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sft_row(row: dict[str, Any], tokenizer: "PreTrainedTokenizerBase") -> dict[str, list[int]]:
    """`input_ids` and `loss_mask` (0 on the prompt, 1 on completion and EOS) of equal length. Raises DatasetError.

    Prompt and completion are tokenised apart, as in a rollout, where the completion begins after a finished prompt. Rows
    hold `prompt` and `completion`, or `question` and `answer`, or `messages` (through the chat template) and `answer`.
    """
    if "messages" in row and "answer" in row:
        prompt = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
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
    learned = [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id]
    return {"input_ids": [*prompt, *learned], "loss_mask": [0] * len(prompt) + [1] * len(learned)}
