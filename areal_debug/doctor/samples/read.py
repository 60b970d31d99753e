"""The rows of a record that the rules over samples read, as flat columns.

A large record is sampled: evenly spaced steps, and of each whole groups, up to `MOST_TOKENS` tokens
in the loss mask in all. Memory and time are those of that many tokens, for a record of any length.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from areal_debug.doctor.rows import LENGTH, STOP, recomputed
from areal_debug.record.decode import load_decoder
from recorder import Record, RecordedStep
from recorder.reader import Damage

MOST_TOKENS, MOST_STEPS = 2_000_000, 128
WORD = re.compile(r"\s*\S+")
FIRST_WORD = 1 << 30  # ids of words, in the place of tokens that are not known
HIGH_ENDS = (5, 95)  # percentiles between which a reward is high or low


@dataclass(frozen=True)
class Rows:
    """Columns of n rows, in the order of steps; NaN where a value is not known.

    Attributes:
        group: [n] number of the group, the rows of one prompt in one step; -1 if it is not known.
        content: [n] hash of the prompt's tokens, 0 if there are none.
        stopped: [n] bool: the end reason is known to be "stop".
        last: [n] the last token of the row, -1 if it is not in the loss mask.
        first: [n] position of the first token in the loss mask; `prompt_length`: [n], -1 unknown.
        skipped: [n] the first token of the completion where only the next one is in the loss mask;
            `unended`: the last token of the row where only the one before it is; `doubled`: the
            token that a row begins with twice. -1 where there is none.
        unsampled: [n] bool: log-probs of the engine are of tokens outside of the loss mask alone.
        bounds: [n + 1]; the tokens in the loss mask of row i are `ids[bounds[i]:bounds[i + 1]]`.
        logprobs: of the engine; `difference`: trainer minus engine. `ends`: the token is the last
            one of a turn.
        steps_in_record: of which those in `step` were read.
    """

    record: Record
    step: np.ndarray
    prompt: np.ndarray
    sample: np.ndarray
    group: np.ndarray
    content: np.ndarray
    reward: np.ndarray
    truncated: np.ndarray
    stopped: np.ndarray
    last: np.ndarray
    first: np.ndarray
    prompt_length: np.ndarray
    rank: np.ndarray
    skipped: np.ndarray
    unended: np.ndarray
    doubled: np.ndarray
    unsampled: np.ndarray
    advantage: np.ndarray
    apart: np.ndarray
    bounds: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray
    difference: np.ndarray
    ends: np.ndarray
    words: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.step)

    @cached_property
    def lengths(self) -> np.ndarray:
        """[n] tokens in the loss mask."""
        return np.diff(self.bounds)

    @cached_property
    def row_of_token(self) -> np.ndarray:
        """[tokens] the row of each token."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @cached_property
    def prompts(self) -> np.ndarray:
        """[n] a number for each distinct prompt: by content, else by group."""
        return np.unique(np.where(self.content != 0, self.content, self.group), return_inverse=True)[1]

    @cached_property
    def ended(self) -> np.ndarray:
        """[n] bool: not known to be truncated."""
        return ~(self.truncated == 1)

    @cached_property
    def high(self) -> np.ndarray:
        """[n] bool: the reward is in the upper half of its range; False where it is not known."""
        known = self.reward[np.isfinite(self.reward)]
        if not len(known):
            return np.zeros(len(self), bool)
        low, top = np.percentile(known, HIGH_ENDS)
        if low == top:
            low, top = known.min(), known.max()
        with np.errstate(invalid="ignore"):
            return (self.reward > (low + top) / 2) & (low < top)

    @cached_property
    def is_binary(self) -> bool:
        """Whether nine tenths of the rewards are two values."""
        known = self.reward[np.isfinite(self.reward)]
        counts = np.sort(np.unique(known, return_counts=True)[1])
        return len(counts) > 1 and counts[-2:].sum() >= 0.9 * len(known)

    @cached_property
    def early(self) -> np.ndarray:
        """[n] bool: in the first third of the steps that were read."""
        steps = np.unique(self.step)
        return self.step <= steps[max(1, len(steps) // 3) - 1]

    @cached_property
    def late(self) -> np.ndarray:
        """[n] bool: in the last third of the steps that were read."""
        steps = np.unique(self.step)
        return self.step >= steps[-max(1, len(steps) // 3)]

    @cached_property
    def decode(self) -> Callable[[list[int]], str]:
        """Return the text of tokens; their ids in angle brackets without a tokenizer."""
        decode = load_decoder(self.record)

        def text(ids: list[int]) -> str:
            if ids and ids[0] >= FIRST_WORD:
                return "".join(self.words[i - FIRST_WORD] for i in ids)
            return "".join(f"<{i}>" for i in ids) if decode is None else decode(ids)

        return text

    @cached_property
    def has_text(self) -> bool:
        return bool(self.words) or load_decoder(self.record) is not None

    @cached_property
    def is_data(self) -> np.ndarray:
        """[n] bool: of a data set, as neither a reward nor a log-prob of an engine is known."""
        is_sampled = np.bincount(self.row_of_token, np.isfinite(self.logprobs), len(self)) > 0
        return ~is_sampled & ~np.isfinite(self.reward)

    def among(self, kept: np.ndarray) -> "Rows":
        """Return some rows [n] bool."""
        tokens = kept[self.row_of_token]
        columns = {name: getattr(self, name)[tokens] for name in OF_TOKENS}
        others = {"record", "bounds", "words", *OF_TOKENS}
        columns |= {one.name: getattr(self, one.name)[kept] for one in fields(self) if one.name not in others}
        return replace(self, bounds=np.append(0, np.cumsum(self.lengths[kept])), **columns)

    def groups(self, among: np.ndarray) -> list[np.ndarray]:
        """Return the rows of each group, of some rows [n] bool."""
        order = np.flatnonzero(among & (self.group >= 0))
        order = order[np.argsort(self.group[order], kind="stable")]
        split = np.split(order, np.flatnonzero(np.diff(self.group[order])) + 1)
        return [members for members in split if len(members)]

    def by_group(self, among: np.ndarray, judge: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return what a judge says of the rows of each group, [n] bool; False of other rows."""
        found = np.zeros(len(self), bool)
        for members in self.groups(among):
            found[members] = judge(members)
        return found

    def tokens(self, row: int) -> np.ndarray:
        """Return a row's tokens in the loss mask."""
        return self.ids[self.bounds[row] : self.bounds[row + 1]]

    def text(self, row: int) -> str:
        """Return a row's completion."""
        return self.decode(self.tokens(row).tolist())

    @property
    def extent(self) -> str:
        """Describe what was read."""
        num_steps, total = len(np.unique(self.step)), len(self.record.steps)
        sampled = f"{num_steps} of {total} steps, sampled" if num_steps < total else f"{total} steps"
        return f"{len(self):,} rows of {sampled}"


def read_rows(record: Record, damage: Damage) -> Rows | None:
    """Read the rows of a record, or a sample of them. None if no row has a completion.

    A step of which a file is damaged goes into `damage`.
    """
    steps, most_tokens = steps_to_read(record)
    words: dict[str, int] = {}  # ids of the words of texts whose tokens are not known
    rows: list[dict[str, Any]] = []
    for number in steps:
        with damage.left_out():
            rows += rows_of_step(record.step(number), most_tokens, words)
    if not rows:
        return None
    names = [name for name in rows[0] if name not in OF_TOKENS]
    columns: dict[str, Any] = {name: np.array([row[name] for row in rows]) for name in names}
    columns |= {name: np.concatenate([row[name] for row in rows]) for name in OF_TOKENS}
    keys = np.stack([columns["step"], columns["prompt"]])
    group = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
    known = columns.pop("has_prompt")
    return Rows(
        record=record,
        group=np.where(known, group, -1),
        bounds=np.append(0, np.cumsum([len(row["ids"]) for row in rows])),
        words=tuple(words),
        **columns,
    )


OF_TOKENS = ("ids", "logprobs", "difference", "ends")
INPUTS = ("advantages", "prox_logp", "ref_logp", "current_logp")
UNKNOWN = np.full(1, np.nan)
EDGES = ("skipped", "unended", "doubled")


def steps_to_read(record: Record) -> tuple[list[int], int]:
    steps = list(record.steps)
    if not steps:
        return [], 0
    shown = [record.step(step).manifest for step in {steps[0], steps[len(steps) // 2], steps[-1]}]
    tokens = max(
        sum(entry.num_tokens for name, entry in manifest.batches.items() if name.startswith("batch-"))
        for manifest in shown
    )
    count = int(np.clip(MOST_TOKENS // max(1, tokens), MOST_STEPS // 4, len(steps)))
    count = min(count, MOST_STEPS, len(steps))
    chosen = np.unique(np.linspace(0, len(steps) - 1, count).round().astype(int))
    return [steps[at] for at in chosen], MOST_TOKENS // len(chosen)


def rows_of_step(step: RecordedStep, most_tokens: int, words: dict[str, int]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    num_tokens, most = 0, max(1, most_tokens // step.manifest.num_ranks)
    for rank in step.ranks:
        num_tokens = 0
        for row in rows_of_rank(step, rank, words):
            is_new_group = not rows or row["prompt"] != rows[-1]["prompt"] or not row["has_prompt"]
            if num_tokens >= most and is_new_group:
                break
            num_tokens += len(row["ids"])
            rows.append(row)
    return rows


def inputs_of(step: RecordedStep, rank: int) -> dict[str, np.ndarray]:
    """Return the inputs to a rank's loss that rules read, float64 [tokens], aligned to the token."""
    entry = step.manifest.batches.get(step.rank_name("learning", rank, "safetensors"))
    names = [name for name in INPUTS if entry is not None and name in entry.tensors]
    found = step.learning(rank, names) if names else {}
    return {name: np.roll(values.astype(np.float64), 1) for name, values in found.items()}


def rows_of_rank(step: RecordedStep, rank: int, words: dict[str, int]) -> list[dict[str, Any]]:
    """Return the rows of a rank with a completion."""
    arrays = step.batch(rank)
    known = {
        key: step.known(rank, key)
        for key in ("input_ids", "loss_mask", "rewards", "finish_reason", "prompt_id", "logprobs")
    }
    texts = None if known["input_ids"].all() else step.text(rank)
    trainer = recomputed(step, rank)
    computed = inputs_of(step, rank)
    lengths = arrays.get("prompt_length")
    lengths_known = step.known(rank, "prompt_length")
    rows = []
    for row in range(step.num_rows(rank)):
        here = slice(*arrays["cu_seqlens"][row : row + 2])
        trained = np.flatnonzero(arrays["loss_mask"][here])
        facts: dict[str, Any] = {
            "step": step.manifest.step,
            "prompt": int(arrays["prompt_id"][row]),
            "has_prompt": bool(known["prompt_id"][row]),
            "sample": int(arrays["sample_id"][row]),
            "reward": float(arrays["rewards"][row]) if known["rewards"][row] else np.nan,
            "truncated": float(arrays["finish_reason"][row] == LENGTH)
            if known["finish_reason"][row]
            else np.nan,
            "stopped": bool(known["finish_reason"][row] and arrays["finish_reason"][row] == STOP),
            "last": int(arrays["input_ids"][here][-1])
            if len(trained) and known["input_ids"][row] and trained[-1] == here.stop - here.start - 1
            else -1,
            "first": int(trained[0]) if len(trained) else 0,
            "prompt_length": int(lengths[row]) if lengths is not None and lengths_known[row] else -1,
            "rank": rank,
        } | {**dict.fromkeys(EDGES, -1), "unsampled": False}
        inputs = {name: values[here][trained] for name, values in computed.items()}
        given = inputs.get("advantages", UNKNOWN)
        facts["advantage"] = float(given[0]) if len(given) and np.ptp(given) == 0 else np.nan
        # of data, which nothing sampled, the log-probs in the loss are those before the update
        of_data = UNKNOWN if known["logprobs"][row] else inputs.get("current_logp", UNKNOWN)
        ratio = inputs.get("ref_logp", UNKNOWN) - inputs.get("prox_logp", of_data)
        facts["apart"] = float((np.expm1(ratio) - ratio).mean()) if len(ratio) else np.nan
        if known["input_ids"][row] and known["loss_mask"][row] and len(trained):
            ids = arrays["input_ids"][here]
            engine = arrays["logprobs"][here][trained].astype(np.float32)
            facts["unsampled"] = not engine.any() and bool((arrays["logprobs"][here] < 0).any())
            if not known["logprobs"][row]:
                engine = np.full(len(trained), np.nan, np.float32)
            own = np.full(len(trained), np.nan, np.float32)
            if trainer is not None:
                own = trainer[here][trained].astype(np.float32) - engine
            prompt = ids[: trained[0]]
            if 0 < facts["prompt_length"] == len(prompt) - 1:
                facts["skipped"] = int(prompt[-1])
            if trained[-1] == len(ids) - 2 and (arrays["logprobs"][here][-1] or not known["logprobs"][row]):
                facts["unended"] = int(ids[-1])
            if len(ids) > 2 and ids[0] == ids[1] != ids[2]:
                facts["doubled"] = int(ids[0])
            content = hash(prompt.tobytes()) if len(prompt) else 0
            ids, ends = ids[trained].astype(np.int32), np.append(np.diff(trained) > 1, True)
        elif texts is not None and texts[row]["completion"]:
            found = [words.setdefault(word, len(words)) for word in WORD.findall(texts[row]["completion"])]
            ids = np.array(found, np.int32) + np.int32(FIRST_WORD)
            content, ends = hash(texts[row]["prompt"]), np.arange(len(ids)) == len(ids) - 1
            engine = own = np.full(len(ids), np.nan, np.float32)
        else:
            continue
        of_tokens = {"ids": ids, "logprobs": engine, "difference": own, "ends": ends}
        rows.append(facts | of_tokens | {"content": content})
    return rows
