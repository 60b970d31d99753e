"""The results of an evaluation: read from its folder, summarised per model, and compared."""

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
    """The samples of one model, by prompt: `rewards[i]` are those of prompt `prompts[i]`."""

    path: str
    file: str
    seconds: float
    prompts: tuple[int, ...]
    rewards: tuple[tuple[float, ...], ...]
    num_truncated: int
    num_tokens: int

    @property
    def num_samples(self) -> int:
        """Samples of all prompts."""
        return sum(map(len, self.rewards))


@dataclass(frozen=True)
class Settings:
    """What was evaluated. `rows` is "valid" or "train"; `sampling` the options of `gconfig`."""

    rows: str
    num_rows: int
    n_samples: int
    sampling: dict[str, Any]


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
    pass_at: dict[int, Estimate]
    truncated: float
    mean_tokens: float


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
    pass_at: dict[int, Estimate]
    better: int
    worse: int
    equal: int
    p_value: float
    verdict: Verdict


@dataclass(frozen=True)
class Report:
    """Everything that is printed of an evaluation."""

    run: str
    settings: Settings
    solved_above: float
    distinct_rewards: tuple[float, ...]  # of all models, ascending
    models: tuple[ModelResult, ...]
    comparisons: tuple[Comparison, ...]
    record: str | None


def read_results(folder: Path) -> tuple[Settings, list[Samples]]:
    """Read what `areal_core/trainer/evaluation_run.py` wrote into a folder."""
    summary = json.loads((folder / "evaluation.json").read_text())
    settings = Settings(summary["rows"], summary["num_rows"], summary["n_samples"], summary["sampling"])
    return settings, [read_samples(folder / model["file"], model) for model in summary["models"]]


def read_samples(file: Path, model: dict[str, Any]) -> Samples:
    """Read the samples of one model."""
    rewards: dict[int, list[float]] = {}
    num_truncated, num_tokens = 0, 0
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            sample = json.loads(line)
            rewards.setdefault(sample["prompt_id"], []).append(sample["reward"])
            num_truncated += sample["finish_reason"] == "length"
            num_tokens += sample["num_sampled"]
    return Samples(
        path=model["path"],
        file=str(file),
        seconds=model["seconds"],
        prompts=tuple(rewards),
        rewards=tuple(map(tuple, rewards.values())),
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
) -> Report:
    """Summarise every model, and compare each with the first one.

    Args:
        ks: the k of pass@k; of prompts with fewer samples none is computed.
        solved_above: a sample solves its prompt if its reward is above this.
    """
    names = short_names([of_model.path for of_model in samples])
    models = [
        summarise(name, of_model, settings, ks, solved_above)
        for name, of_model in zip(names, samples, strict=True)
    ]
    comparisons = decided(
        [
            compare(name, of_model, names[0], samples[0], ks, solved_above)
            for name, of_model in zip(names[1:], samples[1:], strict=True)
        ]
    )
    rewards = {reward for of_model in samples for of_prompt in of_model.rewards for reward in of_prompt}
    return Report(
        run, settings, solved_above, tuple(sorted(rewards)), tuple(models), tuple(comparisons), record
    )


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the last component of each path, or the complete path where several have the same."""
    last = [Path(path).name for path in paths]
    return [name if last.count(name) == 1 and name else path for name, path in zip(last, paths, strict=True)]


def summarise(
    name: str, samples: Samples, settings: Settings, ks: Sequence[int], solved_above: float
) -> ModelResult:
    """Summarise one model."""
    return ModelResult(
        name=name,
        path=samples.path,
        file=samples.file,
        seconds=samples.seconds,
        num_prompts=len(samples.prompts),
        num_samples=samples.num_samples,
        missing=settings.num_rows * settings.n_samples - samples.num_samples,
        mean_reward=estimate_mean(means(samples.rewards)),
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
    """Compare a model with the first one, prompt by prompt; not yet adjusted for several."""
    of_first = dict(zip(first.prompts, first.rewards, strict=True))
    pairs = [
        (rewards, of_first[prompt])
        for prompt, rewards in zip(samples.prompts, samples.rewards, strict=True)
        if prompt in of_first
    ]
    differences = means([new for new, _ in pairs]) - means([old for _, old in pairs])
    by_k = {}
    for k in ks:
        both = [(new, old) for new, old in pairs if min(len(new), len(old)) >= k]
        if both:
            new_passes, old_passes = (passes([pair[i] for pair in both], k, solved_above) for i in (0, 1))
            by_k[k] = estimate_mean(new_passes - old_passes)
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    return Comparison(
        name=name,
        baseline=baseline,
        num_prompts=len(pairs),
        mean_reward=estimate_mean(differences),
        pass_at=by_k,
        better=better,
        worse=worse,
        equal=len(pairs) - better - worse,
        p_value=chance_of_difference(differences),
        verdict="no difference found",
    )


def decided(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return comparisons with adjusted p-values and their verdicts."""
    adjusted = holm([item.p_value for item in comparisons])
    return [
        replace(item, p_value=p_value, verdict=verdict_of(item.mean_reward.value, p_value))
        for item, p_value in zip(comparisons, adjusted, strict=True)
    ]


def verdict_of(difference: float, p_value: float) -> Verdict:
    """Return the verdict on a difference of mean rewards."""
    if p_value >= 1 - CONFIDENCE:
        return "no difference found"
    return "better" if difference > 0 else "worse"
