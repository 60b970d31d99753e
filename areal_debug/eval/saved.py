"""Results in folders, of one evaluation or of several that are compared, and their exit code."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from areal_debug.eval.results import Report, Settings, make_report, read_results, short_names
from areal_debug.eval.supervised_rows import RowReport, make_row_report, read_rows

SUMMARY = "evaluation.json"
FOLDER = "evaluation"  # of the results, in the folder of a run's logs
SAMPLES = "samples"  # the kind of an evaluation that is not of a supervised method's rows
AnyReport = Report | RowReport
T = TypeVar("T")


def report_of(
    folder: Path, run: str, ks: str | None = None, solved_above: float = 0.0, record: str | None = None
) -> AnyReport:
    """Summarise one evaluation.

    Args:
        ks: the k of pass@k, as of `parse_ks`.
        solved_above: as of `make_report`.

    Raises:
        ValueError: it cannot be read.
    """
    if kind_of(folder) != SAMPLES:
        row_settings, measured = parsed(read_rows, folder)
        return make_row_report(run, row_settings, measured)
    settings, samples = parsed(read_results, folder)
    return make_report(run, settings, samples, parse_ks(ks, settings.n_samples), solved_above, record)


def compare_saved(given: Sequence[Path], ks: str | None = None, solved_above: float = 0.0) -> AnyReport:
    """Compare the models of several evaluations with the first model of the first one.

    Raises:
        ValueError: a folder is no evaluation, they are of different kinds, or of different rows.
    """
    folders = [results_in(folder) for folder in given]
    labels = short_names([str(of.parent if of.name == FOLDER else of) for of in folders])
    kinds = [kind_of(folder) for folder in folders]
    for label, kind in zip(labels, kinds, strict=True):
        if kind != kinds[0]:
            raise ValueError(
                f"{label} is an evaluation of {kind} and {labels[0]} one of {kinds[0]}: compare evaluations of one kind"
            )
    run = ", ".join(labels)
    if kinds[0] != SAMPLES:
        of_rows = [parsed(read_rows, folder) for folder in folders]
        names = names_of(labels, [[model.path for model in models] for _, models in of_rows])
        return make_row_report(
            run, of_rows[0][0], [model for _, models in of_rows for model in models], names
        )
    found = [parsed(read_results, folder) for folder in folders]
    every = [settings for settings, _ in found]
    return make_report(
        run,
        every[0],
        [model for _, models in found for model in models],
        parse_ks(ks, min(settings.n_samples for settings in every)),
        solved_above,
        None,
        names_of(labels, [[model.path for model in models] for _, models in found]),
        differences_of(labels, every),
    )


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


def kind_of(folder: Path) -> str:
    """Return what was evaluated: samples, or the rows of a supervised method."""
    summary = parsed(lambda of: json.loads((of / SUMMARY).read_text()), folder)
    return f"rows ({summary['method']})" if "method" in summary else SAMPLES


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
    first = options_of(every[0])
    found = []
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


def options_of(settings: Settings) -> dict[str, Any]:
    """Return what decides how samples were made."""
    return settings.sampling | {
        "n_samples": settings.n_samples,
        "num_rows": settings.num_rows,
        "reward_model": settings.reward_model,
    }


def exit_code(report: AnyReport, fail_below: float | None, fails_if_worse: bool) -> int:
    """Return 1 if a model has lost against the first one, else 0.

    Args:
        fail_below: the smallest improvement that passes; None: a model fails whose verdict is
            "worse", if `fails_if_worse`.
    """
    if fail_below is not None:
        return int(any(item.improvement < fail_below for item in report.comparisons))
    return int(fails_if_worse and any(item.verdict == "worse" for item in report.comparisons))
