"""What models measured in an evaluation: read from its folder, summarised, and compared.

Prompts with their samples, rows or pairs are the independent observations, here all called rows:
intervals resample them, with their tokens where a loss is a mean over tokens.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from areal_debug.eval.estimates import (
    CONFIDENCE,
    Estimate,
    Values,
    chance_of_difference,
    estimate_mean,
    holm,
    pass_at_k,
)

Verdict = Literal["better", "worse", "no difference found"]
SUMMARY = "evaluation.json"
SAMPLES = "samples"  # the method of an evaluation that is not of a supervised script
REWARD, SCORE, PASS = "mean reward", "mean score", "pass@"
LOSS, PERPLEXITY, MARGIN = "loss", "perplexity", "margin"
ACCURACY = "accuracy"  # 1 where the chosen answer is above the rejected one
LARGEST_LOSS = 709.0  # whose exponential is a float


def is_share(measure: str) -> bool:
    """True for measures that are shown in percent."""
    return measure == ACCURACY or measure.startswith(PASS)


@dataclass(frozen=True)
class Settings:
    """What was evaluated: `method` is "samples", "sft", "dpo" or "rw", `rows` "valid" or "train".

    Of samples, `sampling` are options of `gconfig`, and `reward_model` the path of the model whose
    scores they have; None without one.
    """

    method: str
    rows: str
    num_rows: int
    n_samples: int = 1
    sampling: dict[str, Any] = field(default_factory=dict)
    reward_model: str | None = None

    @property
    def unit(self) -> str:
        """What a row is: a prompt, a row, or a pair of a chosen and a rejected answer."""
        return {SAMPLES: "prompt", "sft": "row"}.get(self.method, "pair")

    @property
    def decides(self) -> str:
        """The measure that verdicts are of."""
        return REWARD if self.method == SAMPLES else LOSS


@dataclass(frozen=True)
class Measured:
    """What one model measured: `measures` are [rows], NaN where a row has none.

    `texts` are the same for the same rows: a prompt, or the hash of tokens. `solved` [rows] are
    shares of solved samples, None where nothing is solved or not; `facts` are numbers about all
    rows together; `rewards` are the distinct ones.
    """

    path: str
    file: str
    seconds: float
    numbers: tuple[int, ...]
    texts: tuple[str, ...]
    weights: Values
    measures: dict[str, Values]
    solved: Values | None
    facts: dict[str, float]
    rewards: frozenset[float] = frozenset()


@dataclass(frozen=True)
class ModelResult:
    """The mean of each measure of one model.

    `facts` are: of samples num_samples, missing (left out by the workflow, or failed), repeated
    (prompts whose text an earlier one has), truncated (a share) and mean_tokens; of rows
    num_tokens; of pairs num_ties, which have no margin.
    """

    name: str
    path: str
    file: str
    seconds: float
    num_rows: int
    measures: dict[str, Estimate]
    facts: dict[str, float]


@dataclass(frozen=True)
class Change:
    """A prompt that one model solves in more than half of its samples and another does not, or a
    pair whose order is right for one; `before` and `after` are the shares that are right.
    """

    number: int
    text: str
    before: float
    after: float


@dataclass(frozen=True)
class Test:
    """The test of a mean difference; of several models, p-values are Holm's."""

    p_value: float
    verdict: Verdict = "no difference found"


@dataclass(frozen=True)
class Comparison:
    """Differences of a model from the first one, on the rows that both have.

    `improvement` is that of the measure which decides: `better`, `worse` and `equal` count rows by
    it, `p_value` and `verdict` are of it; `by_score` is of the scores of a reward model.
    """

    name: str
    baseline: str
    num_rows: int
    measures: dict[str, Estimate]
    improvement: float
    better: int
    worse: int
    equal: int
    became_wrong: tuple[Change, ...]
    became_right: tuple[Change, ...]
    p_value: float
    verdict: Verdict
    by_score: Test | None


@dataclass(frozen=True)
class Report:
    """Everything that is printed of an evaluation, or of several that are compared."""

    run: str
    settings: Settings
    solved_above: float
    distinct_rewards: tuple[float, ...]  # of all models, ascending
    models: tuple[ModelResult, ...]
    comparisons: tuple[Comparison, ...]
    record: str | None
    differing_settings: tuple[str, ...] = ()  # of evaluations that are compared


def read_settings(folder: Path) -> Settings:
    """Read what was evaluated, as `areal_core/trainer` wrote it into a folder."""
    summary = json.loads((folder / SUMMARY).read_text())
    if "method" in summary:
        return Settings(summary["method"], summary["rows"], summary["num_rows"])
    options = (summary["n_samples"], summary["sampling"], summary.get("reward_model"))
    return Settings(SAMPLES, summary["rows"], summary["num_rows"], *options)


def read_models(folder: Path, settings: Settings, ks: Sequence[int], solved_above: float) -> list[Measured]:
    """Read what each model measured.

    Args:
        ks: the k of pass@k; of prompts with fewer samples none is computed.
        solved_above: a sample solves its prompt if its reward is above this.

    Raises:
        ValueError: a number is not finite, or no row has a token.
    """
    models = json.loads((folder / SUMMARY).read_text())["models"]
    if settings.method == SAMPLES:
        return [read_samples(folder / of["file"], of, settings, ks, solved_above) for of in models]
    return [read_rows(folder / of["file"], of, settings) for of in models]


def read_samples(
    file: Path, model: dict[str, Any], settings: Settings, ks: Sequence[int], solved_above: float
) -> Measured:
    by_prompt: dict[int, list[dict[str, Any]]] = {}
    num_samples, num_truncated, num_tokens = 0, 0, 0
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            sample = json.loads(line)
            num_samples += 1
            num_truncated += sample["finish_reason"] == "length"
            num_tokens += sample["num_sampled"]
            kept = {"reward": sample["reward"], "text": sample["prompt"]}
            if settings.reward_model is not None:
                kept["score"] = sample["score"]
            by_prompt.setdefault(sample["prompt_id"], []).append(kept)
    rewards = [[sample["reward"] for sample in of_prompt] for of_prompt in by_prompt.values()]
    measures = {REWARD: means(rewards)}
    if settings.reward_model is not None:
        measures[SCORE] = means([[sample["score"] for sample in of] for of in by_prompt.values()])
    return Measured(
        path=model["path"],
        file=str(file),
        seconds=model["seconds"],
        numbers=tuple(by_prompt),
        texts=tuple(of_prompt[-1]["text"] for of_prompt in by_prompt.values()),
        weights=np.ones(len(by_prompt)),
        measures=measures | {f"{PASS}{k}": passes(rewards, k, solved_above) for k in ks},
        solved=passes(rewards, 1, solved_above),
        facts={
            "num_samples": num_samples,
            "missing": settings.num_rows * settings.n_samples - num_samples,
            "repeated": len(by_prompt) - len({of_prompt[-1]["text"] for of_prompt in by_prompt.values()}),
            "truncated": num_truncated / num_samples,
            "mean_tokens": num_tokens / num_samples,
        },
        rewards=frozenset(reward for of_prompt in rewards for reward in of_prompt),
    )


def means(values: Sequence[Sequence[float]]) -> Values:
    return np.array([sum(of_prompt) / len(of_prompt) for of_prompt in values])


def passes(rewards: Sequence[Sequence[float]], k: int, solved_above: float) -> Values:
    """Return the pass@k of each prompt, NaN where it has fewer than k samples."""
    solved = [(len(of_prompt), sum(reward > solved_above for reward in of_prompt)) for of_prompt in rewards]
    return np.array([pass_at_k(num, right, k) if num >= k else math.nan for num, right in solved])


def read_rows(file: Path, model: dict[str, Any], settings: Settings) -> Measured:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    has_pairs = settings.unit == "pair"
    names = (LOSS, ACCURACY, MARGIN) if has_pairs else (LOSS,)
    for line in lines:
        for name in names:
            if not math.isfinite(line[name]):
                raise ValueError(
                    f"{file}: the {name} of row {line['row_id']} is {line[name]}, which has no mean: {model['path']} computes "
                    "numbers that are not finite"
                )
    weights = np.array([1 if has_pairs else line["num_tokens"] for line in lines], np.float64)
    if not weights.any():
        raise ValueError(f"{file}: no row has a token in its loss mask, so there is no loss")
    measures = {name: np.array([line[name] for line in lines], np.float64) for name in names}
    return Measured(
        path=model["path"],
        file=str(file),
        seconds=model["seconds"],
        numbers=tuple(line["row_id"] for line in lines),
        texts=tuple(line["row_sha256"] for line in lines),
        weights=weights,
        measures=measures,
        solved=measures.get(ACCURACY),
        facts={"num_ties": int((measures[MARGIN] == 0).sum())}
        if has_pairs
        else {"num_tokens": int(weights.sum())},
    )


def make_report(
    run: str,
    settings: Settings,
    measured: Sequence[Measured],
    names: Sequence[str] | None = None,
    *,
    solved_above: float = 0.0,
    record: str | None = None,
    differing_settings: Sequence[str] = (),
) -> Report:
    """Summarise every model, and compare each with the first one.

    Args:
        names: of the models; by default `short_names` of their paths.

    Raises:
        ValueError: two models got different rows.
    """
    names = names or short_names([of_model.path for of_model in measured])
    compared = [
        compare(name, of_model, names[0], measured[0], settings)
        for name, of_model in zip(names[1:], measured[1:], strict=True)
    ]
    rewards = frozenset[float]().union(*(of_model.rewards for of_model in measured))
    return Report(
        run,
        settings,
        solved_above,
        tuple(sorted(rewards)),
        tuple(summarise(name, of_model) for name, of_model in zip(names, measured, strict=True)),
        tuple(decided(compared)),
        record,
        tuple(differing_settings),
    )


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the last component of each path, or the complete path where several have the same."""
    last = [Path(path).name for path in paths]
    return [name if last.count(name) == 1 and name else path for name, path in zip(last, paths, strict=True)]


def summarise(name: str, of: Measured) -> ModelResult:
    found = estimates(of.measures, of.weights, are_levels=True)
    if list(of.measures) == [LOSS]:
        found[PERPLEXITY] = exponential(found[LOSS])
    return ModelResult(name, of.path, of.file, of.seconds, len(of.numbers), found, of.facts)


def estimates(measures: dict[str, Values], weights: Values, are_levels: bool) -> dict[str, Estimate]:
    """Return the mean of each measure that any row has; differences of shares are no shares."""
    known = {name: np.isfinite(values) for name, values in measures.items()}
    return {
        name: estimate_mean(values[known[name]], are_levels and is_share(name), weights[known[name]])
        for name, values in measures.items()
        if known[name].any()
    }


def exponential(loss: Estimate) -> Estimate:
    """Return the perplexity of a loss per token, at most that of the largest float."""

    def limited(value: float) -> float:
        return math.exp(min(value, LARGEST_LOSS))

    low, high = (None if limit is None else limited(limit) for limit in (loss.low, loss.high))
    return Estimate(limited(loss.value), low, high)


def compare(name: str, of: Measured, baseline: str, first: Measured, settings: Settings) -> Comparison:
    """Compare a model with the first one, row by row; not yet adjusted for several.

    Raises:
        ValueError: a row differs, or none is in both.
    """
    new, old = paired(name, of, baseline, first, settings.unit)
    weights = of.weights[new]
    differences = {
        measure: values[new] - first.measures[measure][old]
        for measure, values in of.measures.items()
        if measure in first.measures
    }
    gains = differences[settings.decides] * (1 if settings.decides == REWARD else -1)
    better, worse = int((gains > 0).sum()), int((gains < 0).sum())
    changes = []
    if of.solved is not None and first.solved is not None:
        before, after = first.solved[old], of.solved[new]
        changes = [
            Change(of.numbers[new[i]], of.texts[new[i]], float(before[i]), float(after[i]))
            for i in np.flatnonzero((before > 0.5) != (after > 0.5))
        ]
    return Comparison(
        name=name,
        baseline=baseline,
        num_rows=len(new),
        measures=estimates(differences, weights, are_levels=False),
        improvement=float(np.average(gains, weights=weights)),
        better=better,
        worse=worse,
        equal=len(new) - better - worse,
        became_wrong=tuple(change for change in changes if change.after < change.before),
        became_right=tuple(change for change in changes if change.after > change.before),
        p_value=chance_of_difference(gains * weights),
        verdict="no difference found",
        by_score=Test(chance_of_difference(differences[SCORE])) if SCORE in differences else None,
    )


def paired(name: str, of: Measured, baseline: str, first: Measured, unit: str) -> tuple[list[int], list[int]]:
    """Return the places of the rows that both models have.

    Raises:
        ValueError: the same number is another row, or there is none.
    """
    of_first = {number: i for i, number in enumerate(first.numbers)}
    both = [(i, of_first[number]) for i, number in enumerate(of.numbers) if number in of_first]
    if not both:
        raise ValueError(f"{name} and {baseline} have no {unit} in common: evaluate both on the same rows")
    for i, j in both:
        if of.texts[i] != first.texts[j]:
            raise ValueError(
                f"{unit} {of.numbers[i]} of {name} has other tokens than that of {baseline}: evaluations are compared {unit} "
                f"by {unit}, evaluate both on the same rows with one tokenizer"
            )
    return [i for i, _ in both], [j for _, j in both]


def decided(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons with verdicts, by p-values that are adjusted for their number."""
    adjusted = holm([item.p_value for item in comparisons])
    scores = iter(holm([item.by_score.p_value for item in comparisons if item.by_score]))
    return [
        replace(
            item,
            p_value=p_value,
            verdict=verdict_of(item.improvement, p_value),
            by_score=item.by_score
            and Test(of_score := next(scores), verdict_of(item.measures[SCORE].value, of_score)),
        )
        for item, p_value in zip(comparisons, adjusted, strict=True)
    ]


def verdict_of(improvement: float, p_value: float) -> Verdict:
    if p_value >= 1 - CONFIDENCE:
        return "no difference found"
    return "better" if improvement > 0 else "worse"
