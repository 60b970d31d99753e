"""A copy of a record without credentials, and without texts or pictures where that is asked for.

    calls-*.jsonl, text-*.jsonl ─ each text ─────────────> masked
    input_ids ─ decoded, where a row has something to mask ─> tokens of MASK in its place
    weights, anchors ───────────────────────────────────> not copied

A step in which nothing was masked has the same bits as before.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from areal_core.safety.scratch import unfinished_folder
from areal_core.safety.secrets import MASK, masker
from recorder.documents import json_text, parse_document
from recorder.errors import RecordError
from recorder.format import IMAGE_DATA, IMAGE_KEYS, STEPS_FOLDER, UNKNOWN_BITS, BatchEntry, step_name
from recorder.header import write_gaps, write_header
from recorder.integrity.chain import write_end
from recorder.reader import Record, RecordedStep, read_end
from recorder.samples import token_texts
from recorder.step_files import RankStep, commit_step, write_rank
from recorder.tensors import BITS_ONLY, FlatBatch, FlatTensor, narrow

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Rules:
    """What a copy lacks: credentials, what `patterns` match, and texts or pictures if not kept.

    `mask_token` is the token id that stands for tokens that are masked.
    """

    patterns: Sequence[re.Pattern[str]] = ()
    keeps_text: bool = True
    keeps_images: bool = True
    mask_token: int = 0


@dataclass(frozen=True)
class Redacted:
    """What was written: steps, masked texts, rows and steps whose tokens were changed, pictures."""

    num_steps: int
    num_masked: int
    num_rows: int
    steps_changed: tuple[int, ...]
    num_images: int


class Redactor:
    """Masks texts; `count` is the number of matches."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.masker, self.num_matches = rules, masker(), 0

    @property
    def count(self) -> int:
        """Matches of patterns, and credentials."""
        return self.num_matches + self.masker.count

    def text(self, text: str) -> str:
        """Return a text without credentials and matches."""
        for pattern in self.rules.patterns:
            text, count = pattern.subn(MASK, text)
            self.num_matches += count
        return self.masker.text(text)

    def tree(self, value: Any) -> Any:
        """Return a JSON value without them, also in the texts of tool calls, which are JSON."""
        return self._matches(self.masker.tree(value))

    def _matches(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._matches(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._matches(item) for item in value]
        return self.text(value) if isinstance(value, str) else value


def redact_record(
    record: Record,
    destination: Path,
    rules: Rules,
    decode: Decode | None,
    tick: Callable[[object], None],
    steps: Iterable[RecordedStep] | None = None,
) -> Redacted:
    """Write the copy of the steps, or of some, into a new folder, which is complete or absent.

    Raises:
        RecordError: tokens would have to be masked, and the tokenizer is not there.
    """
    if rules.keeps_text and decode is None:
        if any(record.step(step).has_tokens for step in record.steps[:1]):
            raise RecordError(
                "the tokenizer of this record is not available, and token ids say what its texts say: restore the model at "
                "its recorded path, or leave out all texts and tokens with --without-text"
            )
        decode = no_text
    redactor = Redactor(rules)
    changed, num_steps, num_rows, num_images, link = [], 0, 0, 0, None
    with unfinished_folder(destination) as folder:
        (folder / STEPS_FOLDER).mkdir(parents=True)
        header = record.header
        paths: dict[str, Any] = {
            name: identity and identity | {"path": redactor.text(str(identity["path"]))}
            for name, identity in (("model", header.model), ("tokenizer", header.tokenizer))
        }
        environment = header.environment | {"redacted": True}
        for step in map(record.step, record.steps) if steps is None else steps:
            number = step.manifest.step
            num_steps += 1
            ranks = [rank_step(step, rank) for rank in step.ranks]
            kept = [without_secrets(rank, redactor, decode) for rank in ranks]
            pairs = zip(ranks, kept, strict=True)
            rows = sum(int(changed_rows(a.batch, b.batch.tensors["input_ids"].array).sum()) for a, b in pairs)
            changed += [number] if rows else []
            if not rules.keeps_images and any(IMAGE_KEYS.keys() & one.batch.tensors.keys() for one in ranks):
                environment["without_images"] = True
            num_rows += rows
            num_images += sum(len(one.batch.tensors["image_bytes"].array) for one in kept if has_files(one))
            place = folder / STEPS_FOLDER / step_name(number)
            place.mkdir()
            files = [write_rank(place, rank, len(kept), one) for rank, one in enumerate(kept)]
            link = commit_step(place, number, step.manifest.version, files, link).link
            tick(number)
        config = redactor.tree(header.config)
        write_header(folder, replace(header, config=config, environment=environment, **paths))
        write_gaps(folder, record.gaps)
        end = read_end(record.storage)
        if end is not None:
            write_end(folder, end.finished, link)
    return Redacted(num_steps, redactor.count, num_rows, tuple(changed), num_images)


def no_text(ids: list[int]) -> str:
    """Decode the tokens of a record that has none."""
    return ""


def has_files(step: RankStep) -> bool:
    return IMAGE_DATA in step.batch.tensors


def without_secrets(step: RankStep, redactor: Redactor, decode: Decode | None) -> RankStep:
    rules, batch = redactor.rules, step.batch
    if not rules.keeps_images:
        dropped = {IMAGE_DATA, *IMAGE_KEYS}
        tensors = {key: tensor for key, tensor in batch.tensors.items() if key not in dropped}
        batch = replace(batch, tensors=tensors)
    if not rules.keeps_text or decode is None:
        ids = np.full_like(batch.tensors["input_ids"].array, rules.mask_token)
        return replace(step, batch=with_tokens(batch, ids), text=None, calls=None)
    # calls first: what they name as a secret is known in the rest
    calls = None if step.calls is None else masked_lines(step.calls, redactor)
    text = None if step.text is None else masked_lines(step.text, redactor)
    return replace(step, batch=masked_tokens(batch, redactor, decode), text=text, calls=calls)


def masked_lines(data: bytes, redactor: Redactor) -> bytes:
    """Return lines of JSON without secrets; those without any as they were."""
    lines = []
    for line in data.split(b"\n")[:-1]:
        before = parse_document(line, "a line of text")
        after = redactor.tree(before)
        lines.append(line if after == before else json_text(after).encode())
    return b"".join(line + b"\n" for line in lines)


def masked_tokens(batch: FlatBatch, redactor: Redactor, decode: Decode) -> FlatBatch:
    bounds = batch.tensors["cu_seqlens"].array.tolist()
    ids = batch.tensors["input_ids"].array.copy()
    for begin, end in pairwise(bounds):
        row = ids[begin:end].tolist()
        hidden = list(hidden_tokens(row, redactor, decode))
        ids[begin:end][hidden] = redactor.rules.mask_token
    return with_tokens(batch, ids)


def hidden_tokens(ids: list[int], redactor: Redactor, decode: Decode) -> Iterator[int]:
    """Yield the positions of the tokens whose text is masked.

    Where the places of several secrets are not clear, all from the first to the last.
    """
    text = decode(ids)
    masked = redactor.text(text)
    if masked == text:
        return
    pieces = token_texts(ids, decode)
    text = "".join(pieces)
    spans = masked_spans(text, redactor.text(text))
    ends = list(accumulate(map(len, pieces)))
    found = sorted({at for begin, end in spans for at in tokens_between(ends, begin, end)})
    left = [redactor.rules.mask_token if at in set(found) else token for at, token in enumerate(ids)]
    shown = decode(left)
    if redactor.text(shown) != shown and found:
        found = list(range(found[0], found[-1] + 1))
    yield from found


def tokens_between(ends: Sequence[int], begin: int, end: int) -> range:
    first, last = np.searchsorted(ends, begin, side="right"), np.searchsorted(ends, end, side="left")
    return range(int(first), min(int(last) + 1, len(ends)))


def masked_spans(text: str, masked: str) -> list[tuple[int, int]]:
    first, *pieces = masked.split(MASK)
    spans, at = [], len(first)
    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        end = len(text) - len(piece) if is_last else text.find(piece, at + 1)
        end = max(at, end) if end >= 0 else len(text)
        spans.append((at, end))
        at = end + len(piece)
    return spans


def with_tokens(batch: FlatBatch, ids: np.ndarray) -> FlatBatch:
    """Return a batch with other tokens; those of a row that is changed are unknown to its readers."""
    tensors, num_rows = batch.tensors, batch.num_rows
    changed = changed_rows(batch, ids)
    if not changed.any():
        return batch
    bounds, trained = tensors["cu_seqlens"].array, tensors["loss_mask"].array.astype(bool)
    begins = [int(np.append(trained[begin:end], True).argmax()) for begin, end in pairwise(bounds.tolist())]
    unknown = FlatTensor("U8", "row", np.zeros(num_rows, np.uint8))
    others = {
        "unknown": unknown,
        "prompt_length": FlatTensor("I64", "row", np.array(begins, np.int64)),
    } | tensors
    bits = others["unknown"].array | np.where(changed, UNKNOWN_BITS["input_ids"], 0).astype(np.uint8)
    masked = {
        "input_ids": replace(tensors["input_ids"], array=narrow(ids)),
        "unknown": replace(unknown, array=bits),
    }
    return replace(batch, tensors=others | masked)


def changed_rows(batch: FlatBatch, ids: np.ndarray) -> np.ndarray:
    """Return which rows have other tokens, bool [rows]."""
    row_of_token = np.repeat(np.arange(batch.num_rows), np.diff(batch.tensors["cu_seqlens"].array))
    return np.bincount(row_of_token, batch.tensors["input_ids"].array != ids, batch.num_rows) > 0


def rank_step(step: RecordedStep, rank: int) -> RankStep:
    """Return a rank's data of a step, as it was recorded. Raises DamagedRecord."""
    name, entry = step.batch_entry(rank)
    learning = step.rank_name("learning", rank, "safetensors")
    text, calls = (step.rank_name(kind, rank, "jsonl") for kind in ("text", "calls"))
    plan, outcome = (step.rank_name(kind, rank, "json") for kind in ("plan", "outcome"))
    files, batches = step.manifest.files, step.manifest.batches
    return RankStep(
        step.manifest.step,
        step.manifest.version,
        with_image_data(step, rank, flat_batch(step, name, entry)),
        step.plan(rank) if plan in files else None,
        step.outcome(rank) if outcome in files else None,
        flat_batch(step, learning, batches[learning]) if learning in batches else None,
        step.file(text) if text in files else None,
        calls=step.file(calls) if calls in files else None,
    )


def flat_batch(step: RecordedStep, name: str, entry: BatchEntry) -> FlatBatch:
    arrays = step.tensors(name, entry)
    tensors = {}
    for key, tensor in entry.tensors.items():
        is_narrow = tensor.axis == "token" and tensor.dtype not in BITS_ONLY.values()
        array = narrow(arrays[key]) if is_narrow else arrays[key]
        tensors[key] = FlatTensor(tensor.dtype, tensor.axis, array)
    return FlatBatch(entry.num_rows, entry.num_tokens, entry.padded_length, tensors)


def with_image_data(step: RecordedStep, rank: int, batch: FlatBatch) -> FlatBatch:
    """Replace the names of pictures, which are of another record's files, by their bytes."""
    if "image_sha256" not in batch.tensors:
        return batch
    tensors = {key: tensor for key, tensor in batch.tensors.items() if key != "image_sha256"}
    tensors[IMAGE_DATA] = FlatTensor("U8", "byte", step.image_data(rank))
    return replace(batch, tensors=tensors)
