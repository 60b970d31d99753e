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


AT = np.arange(STEPS)
FLAT = {"reward": around(0.3), "eval_reward": around(0.3, seed=6)}
# Each trouble: its alarm, and what it changes of the run `r` that learns.
TROUBLES = {
    "flat reward": ("D01", lambda r: FLAT),
    "falling reward": ("D01", lambda r: FLAT | {"reward": around(ramp(0.6, 0.2, 0.0))}),
    "scattering reward": (
        "D02",
        lambda r: {"reward": ramp(0.2, 0.4, 0.0) + ramp(0.05, 0.9) * around(0.0, 1.0)},
    ),
    "validation left behind": ("D03", lambda r: {"eval_reward": around(0.3)}),
    "reward after a peak": ("D04", lambda r: {name: r[name] - ramp(0.0, 0.45, 0.7) for name in FLAT}),
    "importance weight": ("D10", lambda r: {"importance_weight": around(ramp(1.0, 1.2), 0.01)}),
    "behaviour weight": ("D11", lambda r: {"behave_imp_weight": around(ramp(1.0, 0.8), 0.01)}),
    "clipping": ("D12", lambda r: {"clip_ratio": around(0.7, 0.02)}),
    "no gradient": ("D13", lambda r: {"grad_norm": r["grad_norm"] * (ramp(0.0, 1.0) == 0.0)}),
    "no learning rate": ("D13", lambda r: {"lr": ramp(1e-06, 0.0, 0.0) * (ramp(0.0, 1.0) == 0.0)}),
    "large updates": ("D14", lambda r: {"approx_kl": around(0.09, 0.01)}),
    "entropy collapse": ("D15", lambda r: {"entropy": np.abs(around(ramp(1.0, 0.02, 0.3), 0.01))}),
    "drift without gain": (
        "D16",
        lambda r: {"reward": around(0.3), "reference_kl": around(ramp(0.01, 0.4, 0.0), 0.01)},
    ),
    "gradient spikes": ("D17", lambda r: {"grad_norm": r["grad_norm"] * np.where(AT % 23 == 7, 30, 1)}),
    "gradient is no number": ("D17", lambda r: {"grad_norm": np.where(AT > 197, np.nan, r["grad_norm"])}),
    "reward is no number": ("D18", lambda r: {"reward": np.where(AT == 150, np.inf, r["reward"])}),
    "truncation": ("D20", lambda r: {"no_eos": around(ramp(0.01, 0.3), 0.01)}),
    "length": ("D21", lambda r: FLAT | {"length": around(ramp(300, 900, 0.0), 20)}),
    "old samples": ("D23", lambda r: {"staleness": around(ramp(1, 6, 0.0), 0.2)}),
    "stale engine": ("D24", lambda r: {"logprob_difference": around(ramp(0.011, 0.036, 0.3), 0.0005)}),
    "few effective samples": ("D25", lambda r: {"effective_samples": around(0.3, 0.02)}),
    "filtering": ("D26", lambda r: {"filtered": around(ramp(0.01, 0.3), 0.01)}),
    "failures": ("D27", lambda r: {"failed": np.arange(STEPS) * 4.0}),
    "cut prompts": ("D52", lambda r: {"prompts_cut": around(0.2, 0.01)}),
    "aborted episodes": ("D53", lambda r: {"failed_share": around(ramp(0.01, 0.2), 0.01)}),
    "failing tools": ("D54", lambda r: {"tool_failures": around(ramp(0.1, 0.7), 0.02)}),
    "no tools": ("D55", lambda r: FLAT | {"tool_calls": around(ramp(3.0, 0.1), 0.02)}),
    "critic": ("D28", lambda r: {"explained_variance": around(-0.3)}),
}


def troubled(name: str, seed: int = 0) -> tuple[str, dict[str, np.ndarray]]:
    """Return a finding, and a run that has it."""
    expected, change = TROUBLES[name]
    run = healthy(seed)
    return expected, run | change(run)
