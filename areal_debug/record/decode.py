"""Decode recorded token ids with the tokenizer that the record names."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_debug.installation import install_hint
from areal_debug.render import console, note, styled

if TYPE_CHECKING:
    from recorder import Record


def load_decoder(record: "Record", skip_special_tokens: bool = False) -> Callable[[list[int]], str] | None:
    """Load the decoder of the recorded tokenizer; None if `load_tokenizer` has none."""
    tokenizer = load_tokenizer(record)
    if tokenizer is None:
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def special_texts(record: "Record") -> frozenset[str]:
    """Return the special tokens of the recorded tokenizer; none if they are not known."""
    tokenizer = load_tokenizer(record)
    added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
    return frozenset(token.content for token in added.values() if token.special)


def load_tokenizer(record: "Record") -> Any:
    """Load the recorded tokenizer.

    None if its file is missing or has changed, or tokenizers is not installed.
    """
    identity = record.header.tokenizer or record.header.model
    file = Path(identity["path"]) / "tokenizer.json"
    # isfile: no error for a path that no file can have
    if not os.path.isfile(file) or "tokenizer.json" not in identity["files"]:
        return None
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        note(f"showing ids, not text: {install_hint(error)}")
        return None

    from recorder.environment import file_identity

    if file_identity(file) != identity["files"]["tokenizer.json"]:
        console(stderr=True).print(
            styled("[yellow]{} differs from the recorded one: showing ids[/yellow]", file)
        )
        return None
    return Tokenizer.from_file(str(file))
