"""Records of runs that learn to add, and the same runs with one fault of their samples each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from areal_debug import Recorder

STEPS, PROMPTS, SAMPLES = 12, 8, 4
END, USER = "<|end|>", "<|user|>"
WORDS = [
    "we", "look", "at", "the", "sum", "then", "add", "both", "values", "with", "care", "and", "write", "now",
]  # fmt: skip


@dataclass
class Episode:
    """One sample before it is recorded; a fault changes it."""

    step: int
    group: int
    k: int
    rng: np.random.Generator
    prompt: str
    gold: int
    said: int
    reasoning: str
    reward: float
    finish: str = "stop"
    completion: str = ""
    end: str = END
    mask_prompt: bool = False
    difference: Callable[[int], np.ndarray] | None = None
    logprobs: np.ndarray | None = None

    @property
    def progress(self) -> float:
        return self.step / (STEPS - 1)

    @property
    def onset(self) -> bool:
        """From the middle of the run on."""
        return self.step >= STEPS // 2


Fault = Callable[[Episode], None]


def healthy(
    step: int, group: int, k: int, rng: np.random.Generator, numbers: tuple[int, int], accuracy: float
) -> Episode:
    a, b = numbers
    is_right = rng.random() < accuracy
    said = a + b if is_right else a + b + int(rng.integers(1, 20)) * int(rng.choice([-1, 1]))
    count = int(rng.integers(6, 16))
    reasoning = " ".join(rng.choice(WORDS, count))
    has_mark = rng.random() < 0.7 + 0.3 * step / STEPS
    made = Episode(
        step,
        group,
        k,
        rng,
        f"{USER}{a}+{b}={END}<|assistant|>",
        a + b,
        said,
        reasoning,
        float(is_right and has_mark),
    )
    made.completion = (
        f"<think>{reasoning}</think>\n#### {said}" if has_mark else f"<think>{reasoning}</think> {said}"
    )
    if rng.random() < 0.03:
        made.finish, made.end, made.reward = "length", "", 0.0
        made.completion = made.completion[: len(made.completion) // 2]
    return made


def write_record(
    folder: Path,
    tokenizer: Any,
    model: Path | str,
    fault: Fault = lambda episode: None,
    seed: int = 0,
    steps: int = STEPS,
    accuracy: tuple[float, float] = (0.3, 0.8),
    prompts: Callable[[int, np.random.Generator], list[tuple[int, int]]] | None = None,
) -> Path:
    """Write a run whose accuracy rises."""
    rng = np.random.default_rng(seed)
    draw = prompts or (lambda step, rng: [tuple(rng.integers(2, 400, 2)) for _ in range(PROMPTS)])
    ids: dict[str, list[int]] = {}
    with Recorder(folder, tokenizer=tokenizer, model=model, trainer="other", text=False) as recorder:
        for step in range(steps):
            rows = []
            level = accuracy[0] + (accuracy[1] - accuracy[0]) * step / max(1, steps - 1)
            for group, numbers in enumerate(draw(step, rng)):
                for k in range(SAMPLES):
                    episode = healthy(step, group, k, rng, numbers, level)
                    fault(episode)
                    rows.append(row_of(episode, tokenizer, ids))
            recorder.step(step, rows)
    return folder


def row_of(episode: Episode, tokenizer: Any, ids: dict[str, list[int]]) -> dict[str, Any]:
    if episode.prompt not in ids:
        ids[episode.prompt] = tokenizer.encode(episode.prompt, add_special_tokens=False)
    prompt = ids[episode.prompt]
    completion = tokenizer.encode(episode.completion + episode.end, add_special_tokens=False)
    logprobs = -episode.rng.exponential(0.4, len(completion))
    row: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "logprobs": logprobs.tolist(),
        "reward": episode.reward,
        "group": f"{episode.step}/{episode.group}",
        "finish_reason": episode.finish,
        "versions": episode.step,
    }
    if episode.reward is None:  # of data: nothing sampled it
        del row["logprobs"]
        return row
    noise = episode.rng.normal(0, 0.005, len(completion))
    if episode.difference is not None:
        noise = noise + episode.difference(len(completion))
    row["old_logprobs"] = (logprobs + noise).tolist()
    if episode.mask_prompt:
        row["loss_mask"] = [1] * (len(prompt) + len(completion))
        row["tokens"] = [*row.pop("prompt_tokens"), *row.pop("completion_tokens")]
        row["logprobs"] = [0.0] * len(prompt) + row["logprobs"]
        row["old_logprobs"] = [0.0] * len(prompt) + row["old_logprobs"]
    return row
