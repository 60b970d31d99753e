"""Recorded rows for display: token by token, with text if there is a tokenizer.

What the trainer did not know is None.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recorder.format import UNKNOWN_BITS
from recorder.pictures.kinds import kind_of
from recorder.reader import RecordedStep

# a UTF-8 character has at most four bytes, and a byte-level token at least one
MAX_TOKENS_PER_CHARACTER = 4
UNKNOWN = "?"
SCORES = "scores."


@dataclass(frozen=True)
class Token:
    """`logprob` and `version` are defined for tokens in the loss mask only, `trained`.

    `text` may be empty: the token continues a character.
    """

    id: int | None
    text: str
    trained: bool | None
    logprob: float | None
    version: int | None


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
class Picture:
    """A picture of a row by the sha256 of its file, which `images/SHA256` of the record has.

    `kind` is its format and size in pixels, as its header has them.
    """

    sha256: str
    size_bytes: int
    kind: str


@dataclass(frozen=True)
class Sample:
    """A row of a step on a rank; `place` is None unless an agent's calls were recorded.

    Where token ids are unknown, `text` has prompt and completion, and `tokens` is None unless their
    number is known. `images` are its pictures, in the order of the prompt. `scores` are further
    numbers of another trainer, such as terms of the reward.
    """

    step: int
    rank: int
    row: int
    prompt_id: int | None
    sample_id: int
    reward: float | None
    finish_reason: int | None
    tokens: tuple[Token, ...] | None
    place: Branch | None = None
    text: tuple[str, str] | None = None
    scores: dict[str, float | None] = field(default_factory=dict)
    images: tuple[Picture, ...] = ()


def read_samples(
    step: RecordedStep, rank: int, rows: list[int], decode: Callable[[list[int]], str] | None
) -> list[Sample]:
    """Read rows of a rank, token by token; without `decode`, texts are ids in angle brackets."""
    arrays = step.batch(rank)
    known = {key: step.known(rank, key) for key in UNKNOWN_BITS}
    texts = None if known["input_ids"].all() else step.text(rank)
    pictures = step.pictures_of_rows(rank)

    def value(key: str, row: int) -> Any:
        return arrays[key][row].item() if known[key][row] else None

    samples = []
    for row in rows:
        step.check_row(rank, row)
        begin, end = arrays["cu_seqlens"][row : row + 2]
        line = None if texts is None or known["input_ids"][row] else texts[row]
        samples.append(
            Sample(
                step=step.manifest.step,
                rank=rank,
                row=row,
                prompt_id=value("prompt_id", row),
                sample_id=int(arrays["sample_id"][row]),
                reward=value("rewards", row),
                finish_reason=value("finish_reason", row),
                tokens=tokens_of(arrays, known, row, decode) if line is None or end > begin else None,
                place=place_of(arrays, row) if "branch" in arrays else None,
                text=None if line is None else (line["prompt"], line["completion"]),
                scores={
                    key.removeprefix(SCORES): None if math.isnan(column[row]) else float(column[row])
                    for key, column in arrays.items()
                    if key.startswith(SCORES)
                },
                images=tuple(picture_of(step, *named) for named in pictures[row]),
            )
        )
    return samples


def picture_of(step: RecordedStep, name: str, size_bytes: int) -> Picture:
    """Return a picture of a step. Raises DamagedRecord."""
    return Picture(name, size_bytes, str(kind_of(step.picture(name, size_bytes))))


def tokens_of(
    arrays: dict[str, np.ndarray],
    known: dict[str, np.ndarray],
    row: int,
    decode: Callable[[list[int]], str] | None,
) -> tuple[Token, ...]:
    """Return the tokens of a row; a log-prob that is NaN is not known."""
    here = slice(*arrays["cu_seqlens"][row : row + 2])

    def column(key: str, kind: type) -> list[Any]:
        with np.errstate(invalid="ignore"):  # NumPy warns of a signalling NaN
            values = arrays[key][here].astype(kind).tolist()
        return values if known[key][row] else [None] * len(values)

    logprobs = [None if x is None or math.isnan(x) else x for x in column("logprobs", np.float64)]
    ids = column("input_ids", int)
    texts = token_texts(ids, decode) if known["input_ids"][row] else [UNKNOWN] * len(ids)
    if decode is not None and "mm_token_type_ids" in arrays:
        texts = with_images_named(texts, arrays["mm_token_type_ids"][here])
    columns = texts, column("loss_mask", bool), logprobs, column("versions", int)
    return tuple(Token(*values) for values in zip(ids, *columns, strict=True))


def with_images_named(texts: list[str], types: np.ndarray) -> list[str]:
    """Replace the text of each run of placeholders, whose type is not 0, by one phrase."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], types != 0, [0]])))
    named = list(texts)
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        named[begin:end] = [f"[image: {end - begin} tokens]", *[""] * (end - begin - 1)]
    return named


def place_of(arrays: dict[str, np.ndarray], row: int) -> Branch:
    """Return a row's place in its episode from the arrays of a batch."""
    begin, end = arrays["cu_seqlens"][row : row + 2]
    numbers = np.unique(arrays["turns"][begin:end])  # 1 + the number of the call; 0 is none
    names = ("episode", "parent_turn", "branch", "failure")
    return Branch(
        turns=tuple((numbers[numbers > 0] - 1).tolist()), **{name: int(arrays[name][row]) for name in names}
    )


def rows_of_prompt(step: RecordedStep, rank: int, prompt_id: int) -> list[int]:
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
