"""Metrics of runs that learn, and of runs with one problem each, with the scatter of real runs."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from tests.command_line import invoke, reported

STEPS = 200
TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
OURS = tomllib.loads(Path(__file__).with_name("columns.toml").read_text(encoding="utf-8"))


def healthy(seed: int = 0, steps: int = STEPS) -> dict[str, np.ndarray]:
    """Return the columns of a run that learns, by quantity."""
    rng = np.random.default_rng(seed)
    x = np.linspace(0, 1, steps)

    def scattered(level, size):
        return level + rng.normal(0, size, steps)

    return {
        "reward": scattered(0.2 + 0.5 * (1 - np.exp(-3 * x)), 0.05),
        "eval_reward": scattered(0.2 + 0.4 * (1 - np.exp(-3 * x)), 0.05),
        "importance_weight": scattered(1.0, 0.003),
        "behave_imp_weight": scattered(1.0, 0.01),
        "clip_ratio": np.abs(scattered(0.05, 0.02)),
        "approx_kl": np.abs(scattered(0.003, 0.002)),
        "reference_kl": np.abs(scattered(0.02 * x, 0.003)),
        "entropy": scattered(1.0 - 0.4 * x, 0.03),
        "grad_norm": np.exp(scattered(-1.0, 0.3)),
        "length": scattered(300 + 20 * x, 15),
        "no_eos": np.abs(scattered(0.01, 0.01)),
        "zero_variance_groups": np.clip(scattered(0.3, 0.05), 0, 1),
        "staleness": np.abs(scattered(1.0, 0.2)),
        "logprob_difference": np.abs(scattered(0.011, 0.001)),
        "effective_samples": np.clip(scattered(0.99, 0.003), 0, 1),
        "filtered": np.abs(scattered(0.005, 0.003)),
        "lr": np.full(steps, 1e-6),
        "failed": np.zeros(steps),
        "accepted": np.arange(1.0, steps + 1) * 32,
        "explained_variance": np.clip(scattered(0.2 + 0.6 * x, 0.05), -1, 1),
        "failed_share": np.abs(scattered(0.01, 0.005)),
        "prompts_cut": np.zeros(steps),
        "tool_failures": np.abs(scattered(0.3 - 0.2 * x, 0.02)),
        "tool_calls": scattered(3.0, 0.1),
    }


def write_stats(folder: Path, metrics: dict[str, np.ndarray], names: dict[str, str] = OURS) -> Path:
    """Write statistics as the logger does."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = len(next(iter(metrics.values())))
    with (folder / "stats.jsonl").open("w") as out:
        for step in range(steps):
            row = {names[quantity]: float(values[step]) for quantity, values in metrics.items()}
            out.write(
                json.dumps({"step": step} | {k: v if np.isfinite(v) else str(v) for k, v in row.items()})
                + "\n"
            )
    return folder


def diagnosed(path: Path, *options: str) -> tuple[int, Any]:
    """Return the exit code and the JSON report of the verb."""
    return reported("doctor", path, *options)


def said(path: Path) -> str:
    return invoke("doctor", path).stdout


def ramp(begin: float, end: float, start: float = 0.5, steps: int = STEPS) -> np.ndarray:
    """Return `begin` up to the share `start` of the run, then a line to `end`."""
    x = np.linspace(0, 1, steps)
    return begin + (end - begin) * np.clip((x - start) / (1 - start), 0, 1)


def around(level, size: float = 0.05, seed: int = 5) -> np.ndarray:
    """Return a level, or one per step, with scatter."""
    return level + size * np.random.default_rng(seed).normal(size=STEPS)


def columns(row: dict[str, str], names: dict[str, Any], r: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return a run `r` with the columns of a row of `runs.toml`, whose expressions see some names."""
    found = dict(r)
    for name, text in row.items():
        value = eval(text, names | {"r": r})
        found |= value if name == "*" else {name: value}
    return found


def troubled(name: str, seed: int = 0) -> tuple[str, dict[str, np.ndarray]]:
    """Return a finding, and a run that has it."""
    expected, row = TABLES["troubles"][name]
    return expected, columns(row, globals(), healthy(seed))
