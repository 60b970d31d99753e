"""The rows of supervised evaluations: read from their folders, summarised, and compared.

A loss is a mean over tokens for supervised fine-tuning, and over pairs for DPO and reward models.
Rows are the independent observations, so intervals resample rows, with their tokens.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_debug.eval.estimates import Estimate, Values, chance_of_difference, estimate_mean, holm
from areal_debug.eval.results import Verdict, short_names, verdict_of

ACCURACY = "accuracy"  # 1 where the chosen answer is above the rejected one
MARGIN = "margin"
PERPLEXITY = "perplexity"
LARGEST_LOSS = 709.0  # whose exponential is a float


@dataclass(frozen=True)
class MeasuredRows:
    """What one model measured. `measures` are [rows], in the order of `numbers`.

    `weights` [rows] are tokens in the loss mask, or 1 of a pair.
    """

    path: str
    file: str
    seconds: float
    numbers: tuple[int, ...]
    sha256: tuple[str, ...]
    weights: Values
    measures: dict[str, Values]


@dataclass(frozen=True)
class RowSettings:
    """What was evaluated: `method` is "sft", "dpo" or "rw", `rows` "valid" or "train"."""

    method: str
    rows: str
    num_rows: int

    @property
    def has_pairs(self) -> bool:
        """Whether a row is a chosen and a rejected answer."""
        return self.method != "sft"


@dataclass(frozen=True)
class RowModel:
    """The results of one model: the mean of each measure, by its name.

    `num_tokens` is None for pairs, `num_ties`, the pairs without a margin, for rows.
    """

    name: str
    path: str
    file: str
    seconds: float
    num_rows: int
    num_tokens: int | None
    num_ties: int | None
    measures: dict[str, Estimate]


@dataclass(frozen=True)
class RowComparison:
    """Differences of a model from the first one, on the same rows.

    `better` counts rows with a lower loss. `p_value` and `verdict` are of the mean loss; of several
    models, p-values are Holm's. `became_wrong` are pairs whose order is wrong now.
    """

    name: str
    baseline: str
    num_rows: int
    measures: dict[str, Estimate]
    better: int
    worse: int
    equal: int
    became_wrong: tuple[int, ...]
    became_right: tuple[int, ...]
    p_value: float
    verdict: Verdict

    @property
    def improvement(self) -> float:
        """How much lower the mean loss is."""
        return -self.measures["loss"].value


@dataclass(frozen=True)
class RowReport:
    """Everything that is printed of a supervised evaluation, or of several that are compared."""

    run: str
    settings: RowSettings
    models: tuple[RowModel, ...]
    comparisons: tuple[RowComparison, ...]


def read_rows(folder: Path) -> tuple[RowSettings, list[MeasuredRows]]:
    """Read what `SupervisedTrainer` wrote into a folder.

    Raises:
        ValueError: a number is not finite.
    """
    summary = json.loads((folder / "evaluation.json").read_text())
    settings = RowSettings(summary["method"], summary["rows"], summary["num_rows"])
    return settings, [read_model(folder / model["file"], model, settings) for model in summary["models"]]


def read_model(file: Path, model: dict[str, Any], settings: RowSettings) -> MeasuredRows:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    names = ("loss", ACCURACY, MARGIN) if settings.has_pairs else ("loss",)
    for line in lines:
        for name in names:
            if not math.isfinite(line[name]):
                raise ValueError(
                    f"{file}: the {name} of row {line['row_id']} is {line[name]}, which has no mean: {model['path']} computes "
                    "numbers that are not finite"
                )
    weights = [1 if settings.has_pairs else line["num_tokens"] for line in lines]
    if not any(weights):
        raise ValueError(f"{file}: no row has a token in its loss mask, so there is no loss")
    return MeasuredRows(
        path=model["path"],
        file=str(file),
        seconds=model["seconds"],
        numbers=tuple(line["row_id"] for line in lines),
        sha256=tuple(line["row_sha256"] for line in lines),
        weights=np.array(weights, dtype=np.float64),
        measures={name: np.array([line[name] for line in lines], dtype=np.float64) for name in names},
    )


def make_row_report(
    run: str, settings: RowSettings, measured: Sequence[MeasuredRows], names: Sequence[str] | None = None
) -> RowReport:
    """Summarise every model, and compare each with the first one.

    Args:
        names: of the models; by default `short_names` of their paths.

    Raises:
        ValueError: two models measured other rows.
    """
    names = names or short_names([rows.path for rows in measured])
    models = [summarise_rows(name, rows, settings) for name, rows in zip(names, measured, strict=True)]
    compared = [
        compare_rows(name, rows, names[0], measured[0])
        for name, rows in zip(names[1:], measured[1:], strict=True)
    ]
    adjusted = holm([item.p_value for item in compared])
    return RowReport(
        run,
        settings,
        tuple(models),
        tuple(
            replace(item, p_value=p_value, verdict=verdict_of(item.improvement, p_value))
            for item, p_value in zip(compared, adjusted, strict=True)
        ),
    )


def summarise_rows(name: str, rows: MeasuredRows, settings: RowSettings) -> RowModel:
    means = {
        measure: estimate_mean(values, is_share=measure == ACCURACY, weights=rows.weights)
        for measure, values in rows.measures.items()
    }
    if not settings.has_pairs:
        means[PERPLEXITY] = exponential(means["loss"])
    return RowModel(
        name=name,
        path=rows.path,
        file=rows.file,
        seconds=rows.seconds,
        num_rows=len(rows.numbers),
        num_tokens=None if settings.has_pairs else int(rows.weights.sum()),
        num_ties=int((rows.measures[MARGIN] == 0).sum()) if settings.has_pairs else None,
        measures=means,
    )


def exponential(loss: Estimate) -> Estimate:
    """Return the perplexity of a loss per token, at most that of the largest float."""

    def limited(value: float) -> float:
        return math.exp(min(value, LARGEST_LOSS))

    low, high = (None if limit is None else limited(limit) for limit in (loss.low, loss.high))
    return Estimate(limited(loss.value), low, high)


def compare_rows(name: str, rows: MeasuredRows, baseline: str, first: MeasuredRows) -> RowComparison:
    """Compare a model with the first one, row by row; not yet adjusted for several.

    Raises:
        ValueError: a row differs, or none is in both.
    """
    of_first = {number: i for i, number in enumerate(first.numbers)}
    both = [(i, of_first[number]) for i, number in enumerate(rows.numbers) if number in of_first]
    if not both:
        raise ValueError(
            f"{name} and {baseline} have measured no row in common: evaluate both on the same rows"
        )
    for i, j in both:
        if rows.sha256[i] != first.sha256[j]:
            raise ValueError(
                f"row {rows.numbers[i]} of {name} has other tokens than that of {baseline}: losses are compared row by row, "
                "evaluate both on the same rows with one tokenizer"
            )
    new, old = map(list, zip(*both, strict=True))
    weights = rows.weights[new]
    differences = {
        measure: values[new] - first.measures[measure][old] for measure, values in rows.measures.items()
    }
    loss, accuracy = differences["loss"], differences.get(ACCURACY, np.zeros(len(both)))
    numbers = np.array(rows.numbers)[new]
    better, worse = int((loss < 0).sum()), int((loss > 0).sum())
    return RowComparison(
        name=name,
        baseline=baseline,
        num_rows=len(both),
        measures={measure: estimate_mean(values, weights=weights) for measure, values in differences.items()},
        better=better,
        worse=worse,
        equal=len(both) - better - worse,
        became_wrong=tuple(numbers[accuracy < 0].tolist()),
        became_right=tuple(numbers[accuracy > 0].tolist()),
        p_value=chance_of_difference(loss * weights),
        verdict="no difference found",
    )
