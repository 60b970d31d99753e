"""Kinds of tokens: faults of masks, embeddings and templates affect kinds, not single ids."""

import functools
import json
from pathlib import Path

import numpy as np

from consistency.tokens import Ints

EOS, BOS, SPECIAL, ADDED, DIGITS, WHITESPACE, BYTES, PUNCTUATION, WORDS = KINDS = (
    "eos",
    "bos",
    "special",
    "added",
    "digits",
    "whitespace",
    "bytes",
    "punctuation",
    "words",
)


def added_tokens(model: str) -> dict[int, bool]:
    """Map ids added to the tokenizer's base vocabulary to whether each is special.

    Empty if the model's folder holds no `tokenizer.json`.
    """
    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        return {}
    entries = json.loads(file.read_text(encoding="utf-8"))["added_tokens"]
    return {entry["id"]: entry["special"] for entry in entries}


def token_kinds(
    token_ids: Ints, model: str, eos_token_id: int | None, bos_token_id: int | None
) -> Ints | None:
    """Return the index into KINDS of each id, int64 [n]; None without a `tokenizer.json`."""
    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    added = added_tokens(model)

    @functools.cache
    def kind(token: int) -> int:
        if token in (eos_token_id, bos_token_id):
            return KINDS.index(EOS if token == eos_token_id else BOS)
        if token in added:
            return KINDS.index(SPECIAL if added[token] else ADDED)
        return KINDS.index(kind_of_text(tokenizer.decode([token], skip_special_tokens=False)))

    return np.array([kind(token) for token in token_ids.tolist()], np.int64)


def kind_of_text(text: str) -> str:
    """Return the kind of an ordinary token; bytes decode to the replacement character."""
    if "\ufffd" in text:
        return BYTES
    if not text.strip():
        return WHITESPACE
    stripped = text.strip()
    if stripped.isdigit():
        return DIGITS
    return WORDS if any(character.isalnum() for character in stripped) else PUNCTUATION
