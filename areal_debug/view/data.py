"""Read the data of a page from a record: curves of the run; text, columns, calls of a step."""

import base64
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np

from areal_core.safety.printable import printable, printable_block
from areal_debug.doctor.names import find_name
from areal_debug.doctor.rows import logged
from recorder.conversations import Conversation, conversations
from recorder.errors import StepNotRecorded
from recorder.format import UNKNOWN_BITS
from recorder.pictures.kinds import kind_of
from recorder.reader import Damage, Record, RecordedStep
from recorder.samples import token_texts

Decode = Callable[[list[int]], str]
BROKEN = "\ufffd"  # text of an incomplete character


@dataclass(frozen=True)
class TokenText:
    """Token `i` is entry `index[i]` of the tables. A token that is not known has the id -1."""

    index: np.ndarray  # uint32 [tokens]
    texts: list[str]
    ids: list[int]


def text_of_tokens(ids: np.ndarray, bounds: np.ndarray, decode: Decode | None) -> TokenText:
    """Decode flat `ids` [tokens], rows from `bounds[i]` to `bounds[i + 1]`.

    Without `decode`, the texts are ids in angle brackets.
    """
    unique, index = np.unique(ids, return_inverse=True)
    known = [int(token) for token in unique]
    if decode is None:
        return TokenText(index.astype(np.uint32), [f"⟨{token}⟩" for token in known], known)
    texts = texts_after_another(known, decode)
    partial = np.array([BROKEN in text for text in texts], dtype=bool)
    found = TokenText(index.astype(np.uint32), texts, known)
    return (
        join_partial_tokens(found, np.flatnonzero(partial[index]), bounds, decode) if partial.any() else found
    )


def texts_after_another(tokens: Sequence[int], decode: Decode) -> list[str]:
    anchor = next((t for t in tokens if (text := decode([t])).strip() and BROKEN not in text), None)
    if anchor is None:
        return [decode([token]) for token in tokens]
    before = len(decode([anchor]))
    return [decode([anchor, token])[before:] for token in tokens]


def join_partial_tokens(
    found: TokenText, places: np.ndarray, bounds: np.ndarray, decode: Decode
) -> TokenText:
    index, texts, ids = found.index.copy(), list(found.texts), list(found.ids)
    entries: dict[tuple[int, str], int] = {}
    rows = np.searchsorted(bounds, places, side="right")
    for _, run in groupby(
        enumerate(zip(places.tolist(), rows.tolist(), strict=True)), lambda p: (p[1][0] - p[0], p[1][1])
    ):
        where = [place for _, (place, _) in run]
        run_ids = [ids[index[place]] for place in where]
        for place, token, text in zip(where, run_ids, token_texts(run_ids, decode), strict=True):
            entry = entries.setdefault((token, text), len(texts))
            if entry == len(texts):
                texts.append(text)
                ids.append(token)
            index[place] = entry
    return TokenText(index, texts, ids)


def image_document(step: RecordedStep) -> dict[str, Any]:
    """Return the pictures of a step, and their positions by row over all ranks.

    Raises DamagedRecord.
    """
    rows = [row for rank in step.ranks for row in step.pictures_of_rows(rank)]
    places: dict[str, int] = {}
    images: list[dict[str, str]] = []
    for name, size_bytes in (named for row in rows for named in row):
        if name in places:
            continue
        places[name] = len(images)
        data = step.picture(name, size_bytes)
        kind = kind_of(data)
        image = {"about": f"{kind}, {size_bytes:,} bytes", "name": name}
        if kind.is_shown:
            image |= {"format": kind.format.lower(), "data": base64.b64encode(data).decode()}
        images.append(image)
    return {"rows": [[places[name] for name, _ in row] for row in rows], "images": images}


def with_images_named(found: TokenText, bounds: np.ndarray, types: np.ndarray) -> TokenText:
    """Replace the text of each run of placeholders of a picture by one phrase.

    `types` [tokens] are 0 for text; rows go from `bounds[i]` to `bounds[i + 1]`.
    """
    of_image = types != 0
    begins = of_image & ~np.concatenate([[False], of_image[:-1]])
    begins[bounds[:-1][bounds[:-1] < len(types)]] = of_image[bounds[:-1][bounds[:-1] < len(types)]]
    places = np.flatnonzero(begins)
    run = np.cumsum(begins) - 1  # of each placeholder
    sizes = np.bincount(run[of_image], minlength=len(places))
    entries = {size: len(found.texts) + 1 + number for number, size in enumerate(np.unique(sizes).tolist())}
    index = np.where(of_image, len(found.texts), found.index)
    index[places] = [entries[size] for size in sizes.tolist()]
    names = [f"[image: {size} tokens]" for size in entries]
    return TokenText(
        index.astype(np.uint32), [*found.texts, "", *names], [*found.ids, -1, *[-1] * len(names)]
    )


def conversations_of(step: RecordedStep) -> list[Conversation | None] | None:
    """Return the calls of each row over all ranks; None if no row has any. Raises DamagedRecord."""
    rows = [row for rank in step.ranks for row in conversations(step, rank) or [None] * step.num_rows(rank)]
    return rows if any(rows) else None


def call_counts(rows: Sequence[Conversation | None] | None) -> dict[str, np.ndarray]:
    """Return the columns of the page's table: calls, and tool calls that failed, uint32 [rows]."""
    if rows is None:
        return {}
    return {
        "calls": np.array([0 if row is None else len(row.calls) for row in rows], np.uint32),
        "failed": np.array([0 if row is None else row.num_failed for row in rows], np.uint32),
    }


def calls_document(step: RecordedStep) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    places: dict[tuple[int, int, int], int] = {}
    rows: list[dict[str, Any] | None] = []
    for row in conversations_of(step) or ():
        if row is None:
            rows.append(None)
            continue
        one = row.transcript
        for call in row.calls:
            name = (one.prompt_id, one.episode, call.turn)
            if name not in places:
                places[name] = len(calls)
                parts = [
                    asdict(part) | {"name": printable_block(part.name), "text": printable_block(part.text)}
                    for part in row.parts(call)
                ]
                facts = {"turn": call.turn, "after": call.after, "finish": printable(call.finish)}
                calls.append(facts | {"reward": call.reward, "parts": parts})
        rows.append(
            {
                "agent": printable(one.agent.name),
                "failure": one.failure and printable(one.failure),
                "calls": [places[one.prompt_id, one.episode, call.turn] for call in row.calls],
            }
        )
    return {"rows": rows, "calls": calls}


MAX_CURVE_STEPS = 1000
# Curves from the outcome's statistics: label on the page, and the quantities of `doctor.names`.
STATS = {"loss": ("policy_loss", "loss"), "grad norm": ("grad_norm",), "entropy": ("entropy",)}
# Columns that may be unknown in every row, and their labels on the page.
ROW_LABELS = {
    "rewards": "reward",
    "finish_reason": "finish reason",
    "loss_mask": "loss mask",
    "logprobs": "logprob",
    "versions": "version",
    "prompt_id": "prompt",
}
NOT_GIVEN = "its trainer did not give it"
# Per-token columns of the trainer, aligned to the previous token, and their labels on the page.
TRAINER_COLUMNS = {
    "prox_logp": "trainer logprob",
    "ref_logp": "reference logprob",
    "advantages": "advantage",
    "returns": "return",
    "entropy": "entropy",
}


@dataclass(frozen=True)
class RunView:
    """A run over its steps. `curves` have one value per step, NaN where it is not known."""

    record: str
    header: dict[str, str]
    clip: tuple[float, float] | None  # the ratio is clipped outside this range
    steps: list[int]
    curves: dict[str, list[float]]
    num_steps: int  # of the record; `steps` may be a selection


@dataclass(frozen=True)
class StepView:
    """One step over all ranks: rows one after another, columns aligned to the token itself.

    The row column `unknown` has the bits of FORMAT.md; under a set bit a value means nothing.
    """

    step: int
    version: int
    rows: dict[str, np.ndarray]  # [rows]
    tokens: dict[str, np.ndarray]  # [tokens]
    text: TokenText
    recorded_text: (
        list[tuple[str, str] | None] | None
    )  # prompt and completion of each row whose tokens have no text
    missing: dict[str, str] = field(default_factory=dict)  # absent columns, and how to record them
    images: list[int] | None = None  # number of pictures of each row, if there are any


def read_run(
    record: Record, tick: Callable[[object], None] = lambda _: None, damage: Damage | None = None
) -> RunView:
    """Read the curves of a run; of more than `MAX_CURVE_STEPS` steps, evenly spaced ones.

    A damaged step goes into `damage` and has no value, or raises DamagedRecord.
    """
    chosen = record.steps
    if len(chosen) > MAX_CURVE_STEPS:
        places = np.linspace(0, len(record.steps) - 1, MAX_CURVE_STEPS).round().astype(int)
        chosen = tuple(record.steps[place] for place in places)
    points: dict[int, dict[str, float]] = {}
    for step in chosen:
        with damage.left_out() if damage else nullcontext():
            points[step] = step_point(record.step(step), tick)
    header = record.header
    return RunView(
        record=str(record.path),
        header={
            "recorded": header.created,
            **({"trainer": header.trainer} if header.trainer else {}),
            "model": str(header.model["path"]),
            **({} if header.trainer else {"allocation": str(header.allocation)}),
            "scope": header.recording.scope,
            "ranks": str(header.num_ranks),
        },
        clip=clip_range(header.config),
        steps=list(points),
        curves=curves_of(list(points.values())),
        num_steps=len(record.steps),
    )


def curves_of(points: Sequence[dict[str, float]]) -> dict[str, list[float]]:
    """Return one list per curve that has a value, NaN where a step has none."""
    names = list(
        dict.fromkeys(name for point in points for name, value in point.items() if not math.isnan(value))
    )
    return {name: [point.get(name, math.nan) for point in points] for name in names}


def step_point(step: RecordedStep, tick: Callable[[object], None]) -> dict[str, float]:
    """Return a step's value on every curve."""
    arrays = [step.batch(rank, ["rewards", "cu_seqlens", "versions", "loss_mask"]) for rank in step.ranks]
    sizes = [np.diff(a["cu_seqlens"]) for a in arrays]
    has_tokens, has_reward, has_version = (
        [step.known(rank, key) for rank in step.ranks] for key in ("input_ids", "rewards", "versions")
    )
    lengths = np.concatenate([size[known] for size, known in zip(sizes, has_tokens, strict=True)])
    rewards = np.concatenate([a["rewards"][known] for a, known in zip(arrays, has_reward, strict=True)])
    versions = np.concatenate(
        [
            a["versions"][(a["loss_mask"] > 0) & np.repeat(known, size)]
            for a, known, size in zip(arrays, has_version, sizes, strict=True)
        ]
    )
    point = {"reward": mean(rewards), "length": mean(lengths)}
    # The batch was trained on by the version before the one that the step produced.
    point["staleness"] = step.manifest.version - 1 - mean(versions)
    point |= stats_point(step)
    tick(step)
    return point


def stats_point(step: RecordedStep) -> dict[str, float]:
    """Return the statistics of the outcome, those of `STATS` first and under their short names.

    Empty if the scope excludes them.
    """
    stats = logged(step)
    found = {curve: name_of_curve(quantities, tuple(stats)) for curve, quantities in STATS.items()}
    short = {name: curve for curve, name in found.items() if name is not None}
    first = {curve: stats[name] for name, curve in short.items()}
    return first | {name: value for name, value in stats.items() if name not in short}


@cache
def name_of_curve(quantities: tuple[str, ...], names: tuple[str, ...]) -> str | None:
    return next((name for quantity in quantities if (name := find_name(quantity, list(names)))), None)


def mean(values: np.ndarray) -> float:
    """Return the mean; NaN of an empty array."""
    return float(values.mean()) if len(values) else math.nan


def clip_range(config: dict[str, Any]) -> tuple[float, float] | None:
    actor = config.get("actor")
    if not isinstance(actor, dict) or not isinstance(actor.get("eps_clip"), float):
        return None
    low = actor["eps_clip"]
    high = actor.get("eps_clip_higher") or low
    return 1 - low, 1 + high


def read_step(
    step: RecordedStep,
    decode: Decode | None,
    trainer: str | None = None,
) -> StepView:
    """Read a step as columns; `trainer` is that of the record's header."""
    batches = [step.batch(rank) for rank in step.ranks]
    lengths = [np.diff(batch["cu_seqlens"]) for batch in batches]
    bounds = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    tokens = {
        key: np.concatenate([batch[key] for batch in batches])
        for key in ("input_ids", "loss_mask", "logprobs", "versions")
    }
    text = text_of_tokens(tokens.pop("input_ids"), bounds, decode)
    unknown = unknown_bits(step)
    has_ids = np.repeat((unknown & UNKNOWN_BITS["input_ids"]) == 0, np.diff(bounds))
    if not has_ids.all():
        index = np.where(has_ids, text.index, len(text.texts)).astype(np.uint32)
        text = TokenText(index, [*text.texts, "?"], [*text.ids, -1])
    if decode and all("mm_token_type_ids" in batch for batch in batches):
        types = np.concatenate([batch["mm_token_type_ids"] for batch in batches])
        text = with_images_named(text, bounds, types)
    images = [len(row) for rank in step.ranks for row in step.pictures_of_rows(rank)]
    trained = tokens["loss_mask"] > 0
    computed, missing = trainer_columns(step, bounds, tokens["logprobs"], trained, trainer)
    missing |= {
        label: NOT_GIVEN
        for key, label in ROW_LABELS.items()
        if (unknown & UNKNOWN_BITS[key]).all() and len(unknown)
    }
    return StepView(
        step=step.manifest.step,
        version=step.manifest.version - 1,
        rows={
            "rank": np.repeat(np.arange(len(batches)), [len(n) for n in lengths]).astype(np.uint32),
            "row": np.concatenate([np.arange(len(n)) for n in lengths]).astype(np.uint32),
            "length": np.concatenate(lengths).astype(np.uint32),
            "unknown": unknown,
            **{
                name: np.concatenate([batch[key] for batch in batches]).astype(dtype)
                for name, key, dtype in (
                    ("prompt", "prompt_id", np.int32),
                    ("sample", "sample_id", np.int32),
                    ("reward", "rewards", np.float32),
                    ("finish", "finish_reason", np.uint8),
                )
            },
            **call_counts(conversations_of(step)),
        },
        tokens={
            "mask": tokens["loss_mask"].astype(np.uint8),
            "logprob": tokens["logprobs"].astype(np.float32),
            "version": tokens["versions"].astype(np.int32),
            **computed,
        },
        text=text,
        recorded_text=recorded_texts(step, unknown & UNKNOWN_BITS["input_ids"] if decode else None),
        missing=missing,
        images=images if any(images) else None,
    )


def trainer_columns(
    step: RecordedStep,
    bounds: np.ndarray,
    logprobs: np.ndarray,
    trained: np.ndarray,
    trainer: str | None,
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the trainer's per-token columns, aligned to their token, and why others are absent."""
    wider = "record with debug.dump_scope=full" if trainer is None else NOT_GIVEN
    try:
        ranks = [step.learning(rank) for rank in step.ranks]
    except StepNotRecorded:
        return {}, dict.fromkeys(("trainer logprob", "ratio", "advantage", "entropy"), wider)
    found = {}
    for key, name in TRAINER_COLUMNS.items():
        if all(key in rank for rank in ranks):
            flat = np.concatenate([rank[key] for rank in ranks]).astype(np.float32)
            moved = np.concatenate([[0], flat[:-1]]).astype(np.float32)
            # No prediction for the first token of a row.
            moved[bounds[:-1][bounds[:-1] < len(moved)]] = np.nan
            found[name] = moved
    # Without a forward pass of its own the trainer copies the engine's logprobs: a ratio of 1 would
    # look like a measurement.
    copied = "trainer logprob" in found and np.array_equal(
        found["trainer logprob"][trained], logprobs[trained]
    )
    if copied and trainer is None:
        del found["trainer logprob"]
    needed = "needs actor.recompute_logprob=true or actor.use_decoupled_loss=true"
    needed = needed if trainer is None else NOT_GIVEN
    missing = {name: needed for name in ("trainer logprob", "entropy") if name not in found}
    return found, missing | ({"ratio": needed} if "trainer logprob" in missing else {})


def unknown_bits(step: RecordedStep) -> np.ndarray:
    """Return the bits of the values that are unknown, uint8 [rows] over all ranks."""
    return np.concatenate(
        [
            sum((~step.known(rank, key) * np.uint8(bit) for key, bit in UNKNOWN_BITS.items()), np.uint8(0))
            for rank in step.ranks
        ]
    )


def recorded_texts(step: RecordedStep, wanted: np.ndarray | None) -> list[tuple[str, str] | None] | None:
    """Return the recorded text of the rows of all ranks, or None.

    Only that of rows with `wanted` [rows], if it is given.
    """
    ranks = [step.text(rank) for rank in step.ranks]
    if any(rank is None for rank in ranks) or (wanted is not None and not wanted.any()):
        return None
    lines = [line for rank in ranks if rank is not None for line in rank]
    shown = [True] * len(lines) if wanted is None else wanted.tolist()
    return [
        (line["prompt"], line["completion"]) if row else None for line, row in zip(lines, shown, strict=True)
    ]


def run_document(run: RunView) -> dict[str, Any]:
    """Return the run as a JSON document for the page; values that are not finite are null."""
    return asdict(run) | {
        "record": printable(run.record),
        "header": {name: printable(value) for name, value in run.header.items()},
        "curves": {
            printable(name): [value if math.isfinite(value) else None for value in values]
            for name, values in run.curves.items()
        },
    }
