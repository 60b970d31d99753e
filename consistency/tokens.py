"""The tokens to compare: sampled ids, engine logprobs, counts of unusable values by reason.

Nothing is averaged here. A logprob that is not a finite number <= 0 is counted and excluded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from consistency.errors import BadColumn, NothingToCompare

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# SGLang clamps -inf to the smallest float of the dtype, SkyRL and OpenAI write -9999: no vocabulary
# yields such a logprob.
LOWEST_LOGPROB = -9998.0
# With float32 sums, the logprob of a certain token exceeds 0 by up to a few 1e-6.
ROUNDING_ABOVE_ZERO = 1e-5
PER_ROW = frozenset({"prompt_id", "worker", "cached_tokens", "images"})
Images = tuple[tuple[bytes, ...], ...]  # encoded pictures of each row, in the order of the prompt


@dataclass(frozen=True)
class Completion:
    """One reply; excluded and counted if `logprobs` and `output_ids` differ in length."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    logprobs: Sequence[float]
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Sequences:
    """Rows of a batch, packed without padding.

    Per token [tokens]: `input_ids` int64, `sampled` bool (the model chose it), `engine_logprobs`
    float64 (read if sampled), `versions` int64. Per row [rows]: `prompt_id`, `worker`,
    `cached_tokens` int64; `images`, whose placeholders in `input_ids` are expanded: one for each
    vision token. `experts` are those that the engine chose, as in `data.routed_experts`. Columns
    that were not recorded are None, as are images of text. `length_differences` holds logprobs
    minus ids of each excluded reply.
    """

    input_ids: Ints
    cu_seqlens: Ints
    sampled: Bools
    engine_logprobs: Floats
    versions: Ints | None = None
    prompt_id: Ints | None = None
    worker: Ints | None = None
    cached_tokens: Ints | None = None
    length_differences: tuple[int, ...] = ()
    images: Images | None = None
    experts: npt.NDArray[np.int16 | np.int32] | None = None

    def __post_init__(self) -> None:
        num_tokens, num_rows = int(self.cu_seqlens[-1]), len(self.cu_seqlens) - 1
        for field in fields(self):
            column = getattr(self, field.name)
            if field.name in ("cu_seqlens", "length_differences") or column is None:
                continue
            count = num_rows if field.name in PER_ROW else num_tokens
            if len(column) != count:
                raise BadColumn(f"{field.name} has {len(column)} values, expected {count}: give all of them")

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.cu_seqlens) - 1

    def of_tokens(self, at: Ints, cu_seqlens: Ints, **per_row: Any) -> "Sequences":
        """Return rows of these tokens, in this order; `per_row` columns where rows are others."""
        names = ("input_ids", "sampled", "engine_logprobs", "versions", "experts")
        columns: dict[str, Any] = {name: getattr(self, name) for name in names}
        taken: dict[str, Any] = {n: None if column is None else column[at] for n, column in columns.items()}
        return replace(self, cu_seqlens=cu_seqlens, **taken, **per_row)

    def row(self, row: int) -> slice:
        """Return the slice of a row's tokens."""
        return slice(int(self.cu_seqlens[row]), int(self.cu_seqlens[row + 1]))

    @property
    def row_of_token(self) -> Ints:
        """The row of each token, int64 [tokens]."""
        return np.repeat(np.arange(self.num_rows), np.diff(self.cu_seqlens))

    @property
    def scored(self) -> Ints:
        """Indices of sampled tokens that have a predecessor to predict them, int64 [n]."""
        first = np.zeros(len(self.input_ids), bool)
        first[self.cu_seqlens[:-1][np.diff(self.cu_seqlens) > 0]] = True
        return np.flatnonzero(self.sampled & ~first)


def sequences_from_completions(completions: Sequence[Completion]) -> Sequences:
    """Pack replies; exclude and count those with unequal numbers of ids and logprobs."""
    differences = tuple(
        len(c.logprobs) - len(c.output_ids) for c in completions if len(c.logprobs) != len(c.output_ids)
    )
    usable = [c for c in completions if len(c.logprobs) == len(c.output_ids)]
    lengths = [len(c.prompt_ids) + len(c.output_ids) for c in usable]
    ids = [token for c in usable for token in (*c.prompt_ids, *c.output_ids)]
    return Sequences(
        input_ids=np.array(ids, np.int64),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        sampled=np.array(
            [i >= len(c.prompt_ids) for c, n in zip(usable, lengths, strict=True) for i in range(n)], bool
        ),
        engine_logprobs=np.array(
            [lp for c in usable for lp in (*[0.0] * len(c.prompt_ids), *c.logprobs)], np.float64
        ),
        length_differences=differences,
        images=tuple(c.images for c in usable) if any(c.images for c in usable) else None,
    )


@dataclass(frozen=True)
class Excluded:
    """Number of excluded tokens (replies for `length_differs`) by reason."""

    engine_nan: int = 0
    engine_minus_infinity: int = 0
    engine_above_zero: int = 0
    trainer_not_finite: int = 0
    no_predecessor: int = 0
    length_differs: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of all excluded tokens."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "length_differs")


@dataclass(frozen=True)
class TokenTable:
    """One row per compared token, all [n]; logprobs float64, the rest int64.

    `position` counts from the start of the sequence; `response_position` counts the earlier sampled
    tokens, `turn` the earlier spans of sampled tokens, `turn_position` the earlier tokens of its
    own span. `index` is the index among all scored tokens.
    """

    engine: Floats
    trainer: Floats
    index: Ints
    sequence: Ints
    position: Ints
    response_position: Ints
    turn: Ints
    turn_position: Ints
    token_id: Ints
    version: Ints | None
    worker: Ints | None
    cached_tokens: Ints | None
    excluded: Excluded

    @property
    def difference(self) -> Floats:
        """D = trainer - engine, the log of the importance ratio."""
        return self.trainer - self.engine


def is_minus_infinity(logprobs: Floats) -> Bools:
    return logprobs <= LOWEST_LOGPROB


def compare_tokens(sequences: Sequences, trainer_logprobs: Floats) -> TokenTable:
    """Tabulate the sampled tokens with a usable logprob on both sides.

    `trainer_logprobs`, float [n], has one per index of `sequences.scored`.

    Raises:
        BadColumn: the number of logprobs differs.
        NothingToCompare: no token is left; the message counts the excluded ones.
    """
    scored = sequences.scored
    if len(trainer_logprobs) != len(scored):
        raise BadColumn(
            f"{len(trainer_logprobs)} trainer logprobs for {len(scored)} sampled tokens: score the same batch"
        )
    engine, trainer = sequences.engine_logprobs[scored], np.asarray(trainer_logprobs, np.float64)
    nan, minus, above = np.isnan(engine), is_minus_infinity(engine), engine > ROUNDING_ABOVE_ZERO
    trainer_bad = ~np.isfinite(trainer) & ~(nan | minus | above)
    excluded = Excluded(
        engine_nan=int(nan.sum()),
        engine_minus_infinity=int(minus.sum()),
        engine_above_zero=int(above.sum()),
        trainer_not_finite=int(trainer_bad.sum()),
        no_predecessor=int(sequences.sampled.sum()) - len(scored),
        length_differs=len(sequences.length_differences),
    )
    kept = np.flatnonzero(~(nan | minus | above | trainer_bad))
    if not len(kept):
        raise NothingToCompare(f"no token has a usable logprob on both sides; excluded: {excluded}")
    return build_table(sequences, scored[kept], kept, engine[kept], trainer[kept], excluded)


def build_table(
    sequences: Sequences, tokens: Ints, index: Ints, engine: Floats, trainer: Floats, excluded: Excluded
) -> TokenTable:
    row = sequences.row_of_token
    begin = sequences.cu_seqlens[:-1][row]
    sampled = sequences.sampled.astype(np.int64)
    before = np.cumsum(sampled) - sampled  # sampled tokens before this one, over all rows
    starts = np.flatnonzero(
        sequences.sampled & ~np.roll(sequences.sampled, 1)
        | (np.arange(len(row)) == begin) & sequences.sampled
    )
    span = np.searchsorted(starts, np.arange(len(row)), side="right") - 1
    span_of_row = np.searchsorted(starts, begin, side="left")

    def per_row(column: Ints | None) -> Ints | None:
        return None if column is None else column[row[tokens]]

    return TokenTable(
        engine=engine,
        trainer=trainer,
        index=index,
        sequence=row[tokens],
        position=tokens - begin[tokens],
        response_position=before[tokens] - before[begin[tokens]],
        turn=span[tokens] - span_of_row[tokens],
        turn_position=tokens - starts[span[tokens]],
        token_id=sequences.input_ids[tokens],
        version=None if sequences.versions is None else sequences.versions[tokens],
        worker=per_row(sequences.worker),
        cached_tokens=per_row(sequences.cached_tokens),
        excluded=excluded,
    )
