"""The samples of evaluations: read from their folders, summarised per model, and compared."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Samples:
    """The samples of one model, by prompt: `rewards[i]` are those of prompt `prompts[i]`.

    `scores` are those of a reward model, by the same prompts. `num_expected` samples were to be.
    """

    path: str
    file: str
    seconds: float
    num_expected: int
    prompts: tuple[int, ...]
    texts: tuple[str, ...]
    rewards: tuple[tuple[float, ...], ...]
    scores: tuple[tuple[float, ...], ...] | None
    num_truncated: int
    num_tokens: int

    @property
    def num_samples(self) -> int:
        """Samples of all prompts."""
        return sum(map(len, self.rewards))


@dataclass(frozen=True)
class Settings:
    """What was evaluated. `rows` is "valid" or "train"; `sampling` the options of `gconfig`.

    `reward_model` is the path of the model whose scores the samples have; None without one.
    """

    rows: str
    num_rows: int
    n_samples: int
    sampling: dict[str, Any]
    reward_model: str | None


@dataclass(frozen=True)
class ModelResult:
    """The results of one model; `missing` samples were left out by the workflow or failed."""

    name: str
    path: str
    file: str
    seconds: float
    num_prompts: int
    num_samples: int
    missing: int
    mean_reward: Estimate
    mean_score: Estimate | None
    pass_at: dict[int, Estimate]
    truncated: float
    mean_tokens: float


@dataclass(frozen=True)
class ScoreDifference:
    """The difference of mean scores of the reward model, as that of rewards in `Comparison`."""

    mean: Estimate
    p_value: float
    verdict: Verdict


@dataclass(frozen=True)
class Change:
    """A prompt that one model solves and another does not: in more than half of its samples.

    `before` and `after` are the shares of solved samples, of the first model and the other one.
    """

    prompt_id: int
    prompt: str
    before: float
    after: float


@dataclass(frozen=True)
class Comparison:
    """Differences of a model from the first one, on the prompts that both answered.

    `better`, `worse` and `equal` count prompts by their mean reward. `p_value` and `verdict` are of
    the difference of mean rewards; of several models, p-values are Holm's.
    """

    name: str
    baseline: str
    num_prompts: int
    mean_reward: Estimate
    score: ScoreDifference | None
    pass_at: dict[int, Estimate]
    better: int
    worse: int
    equal: int
    became_wrong: tuple[Change, ...]
    became_right: tuple[Change, ...]
    p_value: float
    verdict: Verdict

    @property
    def improvement(self) -> float:
        """The difference of mean rewards."""
        return self.mean_reward.value


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


def read_results(folder: Path) -> tuple[Settings, list[Samples]]:
    """Read what `areal_core/trainer/evaluation_run.py` wrote into a folder."""
    summary = json.loads((folder / "evaluation.json").read_text())
    settings = Settings(
        rows=summary["rows"],
        num_rows=summary["num_rows"],
        n_samples=summary["n_samples"],
        sampling=summary["sampling"],
        reward_model=summary.get("reward_model"),
    )
    return settings, [read_samples(folder / model["file"], model, settings) for model in summary["models"]]


def read_samples(file: Path, model: dict[str, Any], settings: Settings) -> Samples:
    rewards: dict[int, list[float]] = {}
    scores: dict[int, list[float]] = {}
    texts: dict[int, str] = {}
    num_truncated, num_tokens = 0, 0
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            sample = json.loads(line)
            prompt = sample["prompt_id"]
            rewards.setdefault(prompt, []).append(sample["reward"])
            texts[prompt] = sample["prompt"]
            if settings.reward_model is not None:
                scores.setdefault(prompt, []).append(sample["score"])
            num_truncated += sample["finish_reason"] == "length"
            num_tokens += sample["num_sampled"]
    return Samples(
        path=model["path"],
        file=str(file),
        seconds=model["seconds"],
        num_expected=settings.num_rows * settings.n_samples,
        prompts=tuple(rewards),
        texts=tuple(texts.values()),
        rewards=tuple(map(tuple, rewards.values())),
        scores=tuple(map(tuple, scores.values())) if scores else None,
        num_truncated=num_truncated,
        num_tokens=num_tokens,
    )


def make_report(
    run: str,
    settings: Settings,
    samples: Sequence[Samples],
    ks: Sequence[int],
    solved_above: float,
    record: str | None,
    names: Sequence[str] | None = None,
    differing_settings: Sequence[str] = (),
) -> Report:
    """Summarise every model, and compare each with the first one.

    Args:
        ks: the k of pass@k; of prompts with fewer samples none is computed.
        solved_above: a sample solves its prompt if its reward is above this.
        names: of the models; by default `short_names` of their paths.

    Raises:
        ValueError: two models got different prompts.
    """
    names = names or short_names([of_model.path for of_model in samples])
    models = [
        summarise(name, of_model, ks, solved_above) for name, of_model in zip(names, samples, strict=True)
    ]
    comparisons = decided(
        [
            compare(name, of_model, names[0], samples[0], ks, solved_above)
            for name, of_model in zip(names[1:], samples[1:], strict=True)
        ]
    )
    rewards = {reward for of_model in samples for of_prompt in of_model.rewards for reward in of_prompt}
    return Report(
        run,
        settings,
        solved_above,
        tuple(sorted(rewards)),
        tuple(models),
        tuple(comparisons),
        record,
        tuple(differing_settings),
    )


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the last component of each path, or the complete path where several have the same."""
    last = [Path(path).name for path in paths]
    return [name if last.count(name) == 1 and name else path for name, path in zip(last, paths, strict=True)]


def summarise(name: str, samples: Samples, ks: Sequence[int], solved_above: float) -> ModelResult:
    return ModelResult(
        name=name,
        path=samples.path,
        file=samples.file,
        seconds=samples.seconds,
        num_prompts=len(samples.prompts),
        num_samples=samples.num_samples,
        missing=samples.num_expected - samples.num_samples,
        mean_reward=estimate_mean(means(samples.rewards)),
        mean_score=None if samples.scores is None else estimate_mean(means(samples.scores)),
        pass_at={
            k: estimate_mean(values, is_share=True)
            for k in ks
            if len(values := passes(samples.rewards, k, solved_above))
        },
        truncated=samples.num_truncated / samples.num_samples,
        mean_tokens=samples.num_tokens / samples.num_samples,
    )


def means(rewards: Sequence[Sequence[float]]) -> Values:
    """Return the mean reward of each prompt."""
    return np.array([sum(of_prompt) / len(of_prompt) for of_prompt in rewards])


def passes(rewards: Sequence[Sequence[float]], k: int, solved_above: float) -> Values:
    """Return the pass@k of each prompt that has k samples."""
    solved = [(len(of_prompt), sum(reward > solved_above for reward in of_prompt)) for of_prompt in rewards]
    return np.array([pass_at_k(num, num_solved, k) for num, num_solved in solved if num >= k])


def compare(
    name: str, samples: Samples, baseline: str, first: Samples, ks: Sequence[int], solved_above: float
) -> Comparison:
    """Compare a model with the first one, prompt by prompt; not yet adjusted for several.

    Raises:
        ValueError: they got different prompts, or none of the same.
    """
    pairs = paired(name, samples, baseline, first)
    by_prompt = (dict(zip(of.prompts, of.rewards, strict=True)) for of in (samples, first))
    new_rewards, old_rewards = ([of[prompt] for prompt in pairs] for of in by_prompt)
    differences = means(new_rewards) - means(old_rewards)
    by_k = {}
    for k in ks:
        both = [pair for pair in zip(new_rewards, old_rewards, strict=True) if min(map(len, pair)) >= k]
        if both:
            new_passes, old_passes = (passes([pair[i] for pair in both], k, solved_above) for i in (0, 1))
            by_k[k] = estimate_mean(new_passes - old_passes)
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    before, after = (passes(rewards, 1, solved_above).tolist() for rewards in (old_rewards, new_rewards))
    changes = [
        Change(prompt, text, old, new)
        for (prompt, text), old, new in zip(pairs.items(), before, after, strict=True)
        if (old > 0.5) != (new > 0.5)
    ]
    return Comparison(
        name=name,
        baseline=baseline,
        num_prompts=len(pairs),
        mean_reward=estimate_mean(differences),
        score=compare_scores(samples, first, list(pairs)),
        pass_at=by_k,
        better=better,
        worse=worse,
        equal=len(pairs) - better - worse,
        became_wrong=tuple(change for change in changes if change.after < change.before),
        became_right=tuple(change for change in changes if change.after > change.before),
        p_value=chance_of_difference(differences),
        verdict="no difference found",
    )


def paired(name: str, samples: Samples, baseline: str, first: Samples) -> dict[int, str]:
    """Return the text of each prompt that both models answered, by its number.

    Raises:
        ValueError: a text differs, or there is no such prompt.
    """
    of_first = dict(zip(first.prompts, first.texts, strict=True))
    pairs = {
        prompt: text
        for prompt, text in zip(samples.prompts, samples.texts, strict=True)
        if prompt in of_first
    }
    for prompt, text in pairs.items():
        if text != of_first[prompt]:
            raise ValueError(
                f"prompt {prompt} of {name} is {text!r} and that of {baseline} {of_first[prompt]!r}: evaluations are compared "
                "prompt by prompt, evaluate both on the same rows with one tokenizer"
            )
    if not pairs:
        raise ValueError(
            f"{name} and {baseline} have answered no prompt in common: evaluate both on the same rows"
        )
    return pairs


def compare_scores(samples: Samples, first: Samples, prompts: Sequence[int]) -> ScoreDifference | None:
    if samples.scores is None or first.scores is None:
        return None
    new, old = (dict(zip(of.prompts, of.scores or (), strict=True)) for of in (samples, first))
    differences = means([new[prompt] for prompt in prompts]) - means([old[prompt] for prompt in prompts])
    return ScoreDifference(
        estimate_mean(differences), chance_of_difference(differences), "no difference found"
    )


def decided(comparisons: Sequence[Comparison]) -> list[Comparison]:
    adjusted = holm([item.p_value for item in comparisons])
    with_verdicts = [
        replace(item, p_value=p_value, verdict=verdict_of(item.mean_reward.value, p_value))
        for item, p_value in zip(comparisons, adjusted, strict=True)
    ]
    of_scores = iter(holm([item.score.p_value for item in comparisons if item.score is not None]))
    return [
        item if item.score is None else replace(item, score=decided_score(item.score, next(of_scores)))
        for item in with_verdicts
    ]


def decided_score(score: ScoreDifference, p_value: float) -> ScoreDifference:
    return replace(score, p_value=p_value, verdict=verdict_of(score.mean.value, p_value))


def verdict_of(improvement: float, p_value: float) -> Verdict:
    if p_value >= 1 - CONFIDENCE:
        return "no difference found"
    return "better" if improvement > 0 else "worse"
