"""Recorded rows for display: token by token, with text if there is a tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from recorder.reader import RecordedStep

# a UTF-8 character has at most four bytes, and a byte-level token at least one
MAX_TOKENS_PER_CHARACTER = 4


@dataclass(frozen=True)
class Token:
    """`logprob` and `version` are defined for tokens in the loss mask only.

    `text` may be empty: the token continues a character.
    """

    id: int
    text: str
    trained: bool
    logprob: float
    version: int


@dataclass(frozen=True)
class Branch:
    """The place of a row in the episode of an agent; `branch` and `failure` as in FORMAT.md.

    `turns` are the calls whose tokens the row has, `parent_turn` the one that it continues, or -1.
    """

    episode: int
    turns: tuple[int, ...]
    parent_turn: int
    branch: int
    failure: int


@dataclass(frozen=True)
class Sample:
    """A row of a step on a rank; `place` is None unless an agent's calls were recorded."""

    step: int
    rank: int
    row: int
    prompt_id: int
    sample_id: int
    reward: float
    finish_reason: int
    tokens: tuple[Token, ...]
    place: Branch | None = None


def read_samples(
    step: RecordedStep, rank: int, rows: list[int], decode: Callable[[list[int]], str] | None
) -> list[Sample]:
    """Read rows of a rank, token by token; without `decode`, texts are ids in angle brackets."""
    arrays = step.batch(rank)
    bounds = arrays["cu_seqlens"]
    samples = []
    for row in rows:
        step.check_row(rank, row)
        part = slice(bounds[row], bounds[row + 1])
        ids = arrays["input_ids"][part].tolist()
        columns = zip(
            ids,
            token_texts(ids, decode),
            arrays["loss_mask"][part].astype(bool).tolist(),
            arrays["logprobs"][part].tolist(),
            arrays["versions"][part].tolist(),
            strict=True,
        )
        samples.append(
            Sample(
                step=step.manifest.step,
                rank=rank,
                row=row,
                prompt_id=int(arrays["prompt_id"][row]),
                sample_id=int(arrays["sample_id"][row]),
                reward=float(arrays["rewards"][row]),
                finish_reason=int(arrays["finish_reason"][row]),
                tokens=tuple(Token(*column) for column in columns),
                place=place_of(arrays, row) if "branch" in arrays else None,
            )
        )
    return samples


def place_of(arrays: dict[str, np.ndarray], row: int) -> Branch:
    """Return a row's place in its episode from the arrays of a batch."""
    begin, end = arrays["cu_seqlens"][row : row + 2]
    numbers = np.unique(arrays["turns"][begin:end])  # 1 + the number of the call; 0 is none
    names = ("episode", "parent_turn", "branch", "failure")
    return Branch(
        turns=tuple((numbers[numbers > 0] - 1).tolist()), **{name: int(arrays[name][row]) for name in names}
    )


def rows_of_prompt(step: RecordedStep, rank: int, prompt_id: int) -> list[int]:
    """Rows of a rank that answer the prompt."""
    return np.flatnonzero(step.batch(rank, ["prompt_id"])["prompt_id"] == prompt_id).tolist()


def token_texts(ids: list[int], decode: Callable[[list[int]], str] | None) -> list[str]:
    """Return one text per token; joined they are the decoded sequence.

    Each token is decoded together with its predecessor, which keeps leading spaces; tokens that
    share a character are decoded together, and the last of them gets the text.
    """
    if decode is None:
        return [f"<{token}>" for token in ids]
    texts: list[str] = []
    begin = 0
    for end in range(1, len(ids) + 1):
        before = decode(ids[max(0, begin - 1) : begin]) if begin else ""
        text = decode(ids[max(0, begin - 1) : end])[len(before) :]
        if text.endswith("\ufffd") and end - begin < MAX_TOKENS_PER_CHARACTER and end < len(ids):
            texts.append("")
            continue
        texts.append(text)
        begin = end
    return texts
