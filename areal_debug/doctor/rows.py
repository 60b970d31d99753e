"""Metrics of a record: what its trainer logged, and what its rows show.

A value that is not known is left out of every mean, and `notes` count such rows. One that is known
and not finite makes the mean infinite.
"""

import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from areal_debug.waiting import tick
from recorder import Record, RecordedStep
from recorder.errors import StepNotRecorded
from recorder.format import RECORD_FILE, STEP_FILE, STEPS_FOLDER
from recorder.reader import Damage

STOP, LENGTH = 0, 1  # finish reasons
OF_TOKENS = ("version", "difference")  # columns per token in the loss mask
# The column of a metric, and how extreme its values are: the largest is shown.
EXTREMES: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "record/reward": ("reward", np.negative),
    "record/length": ("length", np.positive),
    "record/no_eos": ("no_eos", np.positive),
    "record/staleness": ("version", np.negative),
    "record/logprob_difference": ("difference", np.abs),
    "record/k3": ("difference", np.abs),
}
NOWHERE: tuple[int | None, int | None, int | None] = None, None, None
USED = ("rewards", "finish_reason", "loss_mask", "prompt_id", "versions", "logprobs")


def is_record(path: Path) -> bool:
    if path.is_file():
        return zipfile.is_zipfile(path)
    marks = (RECORD_FILE, "zarr.json", f"{STEPS_FOLDER}/zarr.json")  # the last: the rest of an archive
    return any((path / mark).is_file() for mark in marks) or any(path.glob(f"{STEPS_FOLDER}/*/{STEP_FILE}"))


def metrics_of(record: Record, damage: Damage) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the metrics of each step by name, and a sentence on the values that are unknown.

    A step of which a file is damaged goes into `damage`.
    """
    rows, unknown, total = [], Counter[str](), 0
    for number in record.steps:
        tick()
        with damage.left_out():
            step = record.step(number)
            row = {"step": number, **logged(step), **shown_by_rows(step)}
            total += sum(step.num_rows(rank) for rank in step.ranks)
            unknown.update(step.num_unknown())
            rows.append(row)
    counts = ", ".join(f"{key} ({count} of {total} rows)" for key, count in unknown.items())
    return rows, (f"Not recorded: {counts}. Checks that need them were skipped.",) if counts else ()


def logged(step: RecordedStep) -> Mapping[str, float]:
    """Return what the trainer logged of a step; empty if that was not recorded."""
    try:
        return step.outcome(0).stats
    except StepNotRecorded:
        return {}


def shown_by_rows(step: RecordedStep) -> dict[str, float]:
    """Compute the metrics of the rows of all ranks, without those that nothing is known for."""
    columns = [columns_of(step, rank) for rank in step.ranks]
    joined = {name: np.concatenate([of_rank[name] for of_rank in columns]) for name in columns[0]}
    difference = joined["difference"][~np.isnan(joined["difference"])]
    finite = difference[np.isfinite(difference)]
    prompts, rewards = joined["prompt"], joined["reward"]
    groups = [rewards[prompts == prompt] for prompt in np.unique(prompts[np.isfinite(prompts)])]
    alike = [(one == one[0]).all() for one in groups if len(one) > 1 and np.isfinite(one).all()]
    values = {
        "reward": joined["reward"],
        "length": joined["length"],
        "no_eos": joined["no_eos"],
        "zero_variance_groups": np.array(alike, np.float64),
        "staleness": step.manifest.version - 1 - joined["version"],
        "logprob_difference": np.abs(difference),
        "k3": np.exp(finite) - finite - 1,
    }
    known = {name: column[~np.isnan(column)] for name, column in values.items()}
    return {f"record/{name}": float(column.mean()) for name, column in known.items() if len(column)}


def columns_of(step: RecordedStep, rank: int) -> dict[str, np.ndarray]:
    """Return float64 columns of a rank, NaN where a value is unknown, -inf for a known reward that is not finite.

    Per row [rows]: `prompt`, `reward`, `no_eos`, `length` (tokens in the loss mask). Per token in
    the loss mask: `version`, and `difference`, trainer minus engine.
    """
    arrays = step.batch(rank)
    bounds, known = arrays["cu_seqlens"], {key: step.known(rank, key) for key in USED}
    row_of_token = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    trained = arrays["loss_mask"].astype(bool)

    def of_rows(key: str, values: np.ndarray) -> np.ndarray:
        return np.where(known[key], np.where(np.isfinite(values), values, -np.inf), np.nan)

    def of_tokens(key: str, values: np.ndarray) -> np.ndarray:
        return np.where(known[key][row_of_token], values, np.nan)[trained]

    engine = of_tokens("logprobs", arrays["logprobs"].astype(np.float64))
    trainer = recomputed(step, rank)
    difference = np.zeros(0) if trainer is None else trainer[trained] - engine
    if not difference.any():  # a copy of the engine's: a difference of 0 would look measured
        difference = np.zeros(0)
    return {
        "prompt": of_rows("prompt_id", arrays["prompt_id"].astype(np.float64)),
        "reward": of_rows("rewards", arrays["rewards"].astype(np.float64)),
        "no_eos": of_rows("finish_reason", arrays["finish_reason"] == LENGTH),
        "length": of_rows("loss_mask", np.bincount(row_of_token, trained, len(bounds) - 1)),
        "version": of_tokens("versions", arrays["versions"]),
        "difference": difference,
    }


def recomputed(step: RecordedStep, rank: int) -> np.ndarray | None:
    """Return the trainer's log-probs before the update, float64 [tokens], aligned to the token.

    None if they were not recorded.
    """
    values = step.trainer_logprobs(rank)
    return (
        None if values is None else np.concatenate([[np.nan], values[:-1]]).astype(np.float64)[: len(values)]
    )


def worst_place(step: RecordedStep, metric: str) -> tuple[int | None, int | None, int | None]:
    """Return where a metric of `shown_by_rows` is most extreme in a step: prompt, sample and token.

    None for another metric, for one of groups, and where the row has no known group; the token is
    None for a metric of rows.
    """
    most, found = -np.inf, NOWHERE
    for rank in step.ranks if metric in EXTREMES else ():
        column, size_of = EXTREMES[metric]
        values = size_of(columns_of(step, rank)[column])
        if np.isnan(values).all() or np.nanmax(values) <= most:
            continue
        row, token = int(np.nanargmax(values)), None
        most = values[row]
        arrays = step.batch(rank, ["prompt_id", "sample_id", "loss_mask", "cu_seqlens"])
        if column in OF_TOKENS:
            token = int(np.flatnonzero(arrays["loss_mask"])[row])
            row = int(np.searchsorted(arrays["cu_seqlens"], token, side="right")) - 1
            token -= int(arrays["cu_seqlens"][row])
        place = int(arrays["prompt_id"][row]), int(arrays["sample_id"][row]), token
        found = place if step.known(rank, "prompt_id")[row] else NOWHERE
    return found
