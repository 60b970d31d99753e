"""Prompts as token ids: rows of text, chats or ids, by the model's tokenizer and chat template."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.dataset.read import read_rows, rl_row
from consistency.errors import BadPrompts

KINDS = "input_ids (numbers), messages (a chat), text (tokenised as it is), question or prompt"


@dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, and the row that it comes from."""

    ids: tuple[int, ...]
    row: dict[str, Any]


def read_prompts(
    source: str, split: str | None, tokenizer: Any, count: int | None = None
) -> tuple[Prompt, ...]:
    """Read the first `count` prompts of a JSONL file, a text file (one per line) or a dataset.

    Raises:
        DatasetError: the source cannot be read.
        BadPrompts: it has no rows, or a row holds no prompt.
    """
    if source.endswith(".txt"):
        lines = Path(source).read_text(encoding="utf-8").splitlines()
        rows: list[dict[str, Any]] = [{"text": line} for line in lines if line.strip()]
    else:
        rows = read_rows(source, split, {})
    prompts = tuple(
        parse_prompt(row, tokenizer, f"{source}, row {number}")
        for number, row in enumerate(itertools.islice(rows, count))
    )
    if not prompts:
        raise BadPrompts(f"{source} holds no prompt: write one JSON object per line with {KINDS}")
    return prompts


def parse_prompt(row: dict[str, Any], tokenizer: Any, where: str) -> Prompt:
    """Tokenise one row: a chat by the chat template, `text` as it is.

    Raises:
        BadPrompts: the row holds no prompt, or the tokenizer has no chat template.
    """
    if "input_ids" in row:
        return Prompt(tuple(int(token) for token in row["input_ids"]), row)
    if "text" in row:
        return Prompt(tuple(tokenizer.encode(row["text"])), row)
    chat = rl_row(row, where)
    try:
        ids = tokenizer.apply_chat_template(chat["messages"], add_generation_prompt=True, return_dict=False)
    except ValueError as error:
        raise BadPrompts(
            f"{where} is a chat, and the model's tokenizer has no chat template: give text instead"
        ) from error
    return Prompt(tuple(ids), chat)
