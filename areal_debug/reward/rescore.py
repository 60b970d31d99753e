"""Score the samples of a record again with another reward function, and list where they disagree.

    step ──> prompts and completions as text ──> reward function ──> above the middle, or not
                     └ the data's row with the same prompt            recorded: above it, or not

Steps are read one at a time. The second function is taken for the reference: a sample that only the
recorded reward pays for is a false positive. No model is needed.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from areal_core.data.read import BOXED_INSTRUCTION
from areal_core.reward import RewardPool
from areal_core.reward.reward_pool import Call
from areal_debug.record.decode import load_decoder
from areal_debug.reward.answers import question_of
from areal_debug.reward.pairing import Pairing, find_pairings
from recorder import Record, RecordedStep

KEY = 24  # characters of a prompt by which its row is looked up
MOST_LISTED = 1000
CHUNK = 256  # calls in one message: a round trip for each takes four times as long
TIMEOUT_S = 15.0  # of a call, as in training
SPECIAL = re.compile(r"<\|[^|<>]{1,40}\|>")


@dataclass(frozen=True)
class Disagreement:
    """One sample on which the rewards differ; `kind` is "false positive" or "false negative"."""

    step: int
    prompt: int
    sample: int
    kind: str
    recorded: float
    rescored: float
    text: str


@dataclass(frozen=True)
class StepCounts:
    """Counts of one step; `failed` are calls without a reward, `unmatched` rows without data."""

    step: int
    rows: int
    agree: int
    false_positives: int
    false_negatives: int
    failed: int
    unmatched: int


@dataclass(frozen=True)
class RescoreReport:
    """Both rewards of a record compared. `middle` divides paid from unpaid ones.

    `pairings` are steps whose rewards are those of other rows, which explains the disagreements.
    `every_recorded` is the one reward that all rows have, None if they differ. `other_values` counts
    the samples of which the rewards are not the same float32.
    """

    record: str
    function: str
    middle: float
    steps: tuple[StepCounts, ...]
    pairings: tuple[Pairing, ...]
    disagreements: tuple[Disagreement, ...]
    failure: str
    other_values: int
    every_recorded: float | None

    def total(self, name: str) -> int:
        """Return a count over all steps."""
        return sum(getattr(step, name) for step in self.steps)

    @property
    def num_compared(self) -> int:
        """Rows with both rewards."""
        return self.total("agree") + self.total("false_positives") + self.total("false_negatives")

    @property
    def verdict(self) -> Literal["agree", "disagree", "unknown"]:
        """Return "unknown" if more samples could not be compared than were, and none differs."""
        if self.disagreements:
            return "disagree"
        compared = self.num_compared
        return "agree" if compared and 2 * compared >= self.total("rows") else "unknown"


@dataclass(frozen=True)
class Scored:
    """A row with its recorded reward and, or, what the second function returned."""

    step: int
    prompt: int
    sample: int
    recorded: float
    outcome: float | str | None  # None: no row of the data has its prompt
    text: str


class DataRows:
    """The rows of a data set by the text of their prompts."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.by_key: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        self.short: dict[str, dict[str, Any]] = {}
        for row in rows:
            question = question_of(row, None)
            text = SPECIAL.sub("", question.prompt).removesuffix(BOXED_INSTRUCTION).strip()
            if len(text) < KEY:
                self.short[text] = question.row
            else:
                self.by_key.setdefault(text[:KEY], []).append((text, question.row))

    def find(self, prompt: str) -> dict[str, Any] | None:
        """Return the row with the longest prompt inside a prompt's text; None if none is."""
        if prompt in self.short:
            return self.short[prompt]
        found: list[tuple[int, dict[str, Any]]] = []
        for at in range(max(0, len(prompt) - KEY + 1)):
            for text, row in self.by_key.get(prompt[at : at + KEY], ()):
                if prompt.startswith(text, at):
                    found.append((len(text), row))
        if not found:
            found = [
                (len(text), row)
                for text, row in self.short.items()
                if re.search(rf"(?<!\w){re.escape(text)}", prompt)
            ]
        return max(found, key=lambda item: item[0])[1] if found else None


def rescore(
    record: Record,
    function: str,
    data: Sequence[dict[str, Any]] | None,
    steps: Sequence[int],
    timeout_s: float,
) -> RescoreReport:
    """Score steps again. Raises ValueError if the record has no text and no tokenizer."""
    rows_of = None if data is None else DataRows(data)
    decode = load_decoder(record, skip_special_tokens=True)
    with RewardPool(function, timeout_s, max_retries=0, timeout_reward=None) as pool:
        scored = [
            row
            for step in map(record.step, steps)
            for rank in step.ranks
            for row in score_rank(step, rank, decode, rows_of, pool)
        ]
    return report_of(record, function, scored)


class RowText(NamedTuple):
    """A row's prompt and completion, as text and as ids."""

    row: int
    prompt: str
    completion: str
    prompt_ids: list[int]
    completion_ids: list[int]


def row_texts(
    step: RecordedStep, rank: int, decode: Callable[[list[int]], str] | None, rows: Iterable[int]
) -> Iterator[RowText]:
    """Yield some rows of a rank. Raises ValueError where there is neither text nor a tokenizer."""
    arrays = step.batch(rank, ["input_ids", "loss_mask", "cu_seqlens"])
    known = step.known(rank, "input_ids") & step.known(rank, "loss_mask")
    texts = step.text(rank) if decode is None or not known.all() else None
    for row in rows:
        here = slice(*arrays["cu_seqlens"][row : row + 2])
        ids, trained = arrays["input_ids"][here], arrays["loss_mask"][here].nonzero()[0]
        first = int(trained[0]) if len(trained) else len(ids)
        prompt_ids, completion_ids = ids[:first].tolist(), ids[first:].tolist()
        if decode is not None and known[row]:
            prompt, completion = decode(prompt_ids), decode(completion_ids)
        elif texts is not None:
            prompt, completion = (SPECIAL.sub("", texts[row][name]) for name in ("prompt", "completion"))
        else:
            raise ValueError(f"step {step.manifest.step} has no text, and the record's tokenizer is not here")
        yield RowText(row, prompt, completion, prompt_ids, completion_ids)


def score_rank(
    step: RecordedStep,
    rank: int,
    decode: Callable[[list[int]], str] | None,
    rows_of: DataRows | None,
    pool: RewardPool,
) -> list[Scored]:
    arrays = step.batch(rank, ["rewards", "prompt_id", "sample_id"])
    rows = step.known(rank, "rewards").nonzero()[0].tolist()
    found: list[tuple[int, str, bool]] = []
    calls: list[Call] = []
    for row, prompt, completion, prompt_ids, completion_ids in row_texts(step, rank, decode, rows):
        data = {} if rows_of is None else rows_of.find(prompt)
        calls += [] if data is None else [((prompt, completion, prompt_ids, completion_ids), data)]
        found.append((row, completion, data is not None))
    chunks = [pool.submit_many(calls[at : at + CHUNK]) for at in range(0, len(calls), CHUNK)]
    outcomes = (x if isinstance(x, float) else str(x).splitlines()[0] for of in chunks for x in of.result())
    return [
        Scored(
            step.manifest.step,
            int(arrays["prompt_id"][row]),
            int(arrays["sample_id"][row]),
            float(arrays["rewards"][row]),
            next(outcomes) if has_data else None,
            completion[-200:],
        )
        for row, completion, has_data in found
    ]


def report_of(record: Record, function: str, scored: Sequence[Scored]) -> RescoreReport:
    """Compare the rewards around the middle between the smallest and the largest of both."""
    both = [row for row in scored if isinstance(row.outcome, float)]
    values = [value for row in both for value in (row.recorded, row.outcome) if isinstance(value, float)]
    finite = [value for value in values if math.isfinite(value)]
    middle = (min(finite) + max(finite)) / 2 if finite else 0.5
    counts: dict[int, dict[str, int]] = {}
    disagreements = []
    failures = []
    for row in scored:
        of_step = counts.setdefault(row.step, dict.fromkeys(COUNTED, 0))
        of_step["rows"] += 1
        if not isinstance(row.outcome, float):
            of_step["unmatched" if row.outcome is None else "failed"] += 1
            failures += [row.outcome] if row.outcome else []
        elif (row.recorded > middle) == (row.outcome > middle):
            of_step["agree"] += 1
        else:
            kind = "false positive" if row.recorded > middle else "false negative"
            of_step[kind.replace(" ", "_") + "s"] += 1
            disagreements.append(
                Disagreement(row.step, row.prompt, row.sample, kind, row.recorded, row.outcome, row.text)
            )
    steps = tuple(StepCounts(step, **of_step) for step, of_step in counts.items())
    return RescoreReport(
        record.path,
        function,
        middle,
        steps,
        find_pairings([(row.step, row.prompt, row.recorded, float(row.outcome or 0.0)) for row in both])
        if disagreements
        else (),
        tuple(disagreements[:MOST_LISTED]),
        failures[0] if failures else "",
        sum(not np.array_equal(row.recorded, np.float32(row.outcome), equal_nan=True) for row in both),
        both[0].recorded if len({row.recorded for row in both}) == 1 < len(both) else None,
    )


COUNTED = ("rows", "agree", "false_positives", "false_negatives", "failed", "unmatched")
