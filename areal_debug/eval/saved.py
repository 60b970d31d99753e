"""Results in folders, of one evaluation or of several that are compared, and their exit code."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from areal_debug.eval.results import (
    SAMPLES,
    SUMMARY,
    Report,
    Settings,
    make_report,
    read_models,
    read_settings,
    short_names,
)

FOLDER = "evaluation"  # of the results, in the folder of a run's logs
T = TypeVar("T")


def report_of(
    folder: Path, run: str, ks: str | None = None, solved_above: float = 0.0, record: str | None = None
) -> Report:
    """Summarise one evaluation.

    Args:
        ks: the k of pass@k, as of `parse_ks`.
        solved_above: as of `read_models`.

    Raises:
        ValueError: it cannot be read.
    """
    settings = parsed(read_settings, folder)
    numbers = parse_ks(ks, settings.n_samples)
    measured = parsed(lambda of: read_models(of, settings, numbers, solved_above), folder)
    return make_report(run, settings, measured, solved_above=solved_above, record=record)


def compare_saved(given: Sequence[Path], ks: str | None = None, solved_above: float = 0.0) -> Report:
    """Compare the models of several evaluations with the first model of the first one.

    Raises:
        ValueError: a folder is no evaluation, they are of different kinds, or of different rows.
    """
    folders = [results_in(folder) for folder in given]
    labels = short_names([str(of.parent if of.name == FOLDER else of) for of in folders])
    every = [parsed(read_settings, folder) for folder in folders]
    first = every[0]
    for label, settings in zip(labels, every, strict=True):
        if settings.method != first.method:
            raise ValueError(
                f"{label} is an evaluation of {kind_of(settings)} and {labels[0]} one of {kind_of(first)}: "
                "compare evaluations of one kind"
            )
    numbers = parse_ks(ks, min(settings.n_samples for settings in every))
    found = [
        parsed(lambda of, s=settings: read_models(of, s, numbers, solved_above), folder)  # type: ignore[misc]
        for folder, settings in zip(folders, every, strict=True)
    ]
    return make_report(
        ", ".join(labels),
        first,
        [model for models in found for model in models],
        names_of(labels, [[model.path for model in models] for models in found]),
        solved_above=solved_above,
        differing_settings=differences_of(labels, every),
    )


def kind_of(settings: Settings) -> str:
    return SAMPLES if settings.method == SAMPLES else f"rows ({settings.method})"


def parse_ks(text: str | None, n_samples: int) -> list[int]:
    """Return the k of pass@k, ascending; by default 1 and the number of samples.

    Raises:
        ValueError: one is not a number from 1 to `n_samples`.
    """
    words = f"1,{n_samples}".split(",") if text is None else text.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= n_samples for word in words):
        raise ValueError(
            f"--k is {text!r} and each row has {n_samples} samples: give numbers from 1 to {n_samples}, or more with --samples"
        )
    return sorted({int(word) for word in words})


def names_of(labels: Sequence[str], paths: Sequence[Sequence[str]]) -> list[str]:
    """Return a name of each model: its evaluation's, and its own if the evaluation has several."""
    return [
        label if len(of_evaluation) == 1 else f"{label}:{name}"
        for label, of_evaluation in zip(labels, paths, strict=True)
        for name in short_names(of_evaluation)
    ]


def results_in(folder: Path) -> Path:
    """Return the folder with the summary: `folder`, or `evaluation` in it.

    Raises:
        ValueError: there is none.
    """
    for candidate in (folder, folder / FOLDER):
        if (candidate / SUMMARY).is_file():
            return candidate
    raise ValueError(
        f"{folder} has no {SUMMARY}, so it is no complete evaluation: give the folder that areal-debug eval has written, "
        "logs/USER/EXPERIMENT/TRIAL-eval"
    )


def parsed(read: Callable[[Path], T], folder: Path) -> T:
    """Return what `read` makes of a folder of results.

    Raises:
        ValueError: it is not what an evaluation writes.
    """
    try:
        return read(folder)
    except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError, FileNotFoundError) as error:
        raise ValueError(
            f"{folder} is not what areal-debug eval writes ({type(error).__name__}: {error}): evaluate again"
        ) from error


def differences_of(labels: Sequence[str], every: Sequence[Settings]) -> list[str]:
    """Return a sentence for each evaluation that was sampled with other options than the first."""
    found = []
    first = options_of(every[0])
    for label, settings in zip(labels[1:], every[1:], strict=True):
        own = options_of(settings)
        changed = [
            f"{name} {own.get(name)!r} and not {first.get(name)!r}"
            for name in sorted(first.keys() | own.keys())
            if own.get(name) != first.get(name)
        ]
        if changed:
            found.append(f"{label} was evaluated with {', '.join(changed)}")
    return found


def options_of(settings: Settings) -> dict[str, object]:
    """Return what decides how samples were made."""
    return settings.sampling | {
        "n_samples": settings.n_samples,
        "num_rows": settings.num_rows,
        "reward_model": settings.reward_model,
    }


def exit_code(report: Report, fail_below: float | None, fails_if_worse: bool) -> int:
    """Return 1 if a model has lost against the first one, else 0.

    Args:
        fail_below: the smallest improvement that passes; None: a model fails whose verdict is
            "worse", if `fails_if_worse`.
    """
    if fail_below is not None:
        return int(any(item.improvement < fail_below for item in report.comparisons))
    return int(fails_if_worse and any(item.verdict == "worse" for item in report.comparisons))
