"""`areal-debug consistency --over-time`: what moves the gap between engine and trainer."""

import numpy as np
import pytest

from areal_debug import Recorder
from tests.command_line import reported

STEPS = 24


def frozen(step, age):
    return None


def write(folder, gap, ages=(0,), has_reference=True):
    """Write a run whose engine is `gap(step, age)` nats off, or has the reference's log-probs."""
    rng = np.random.default_rng(0)
    with Recorder(folder, trainer="slime") as recorder:
        for step in range(STEPS):
            rows = []
            for n in range(12):
                age = min(ages[n % len(ages)], step)
                trainer = -rng.exponential(1.0, 10)
                reference = trainer + rng.normal(0, 0.02 * (1 + step), 10)
                size = gap(step, age)
                engine = reference if size is None else trainer + rng.normal(0, size, 10)
                row = {
                    "prompt_tokens": [1, n + 2],
                    "completion_tokens": rng.integers(3, 90, 10),
                    "logprobs": engine,
                }
                row |= {"old_logprobs": trainer, "versions": step - age, "reward": 0.0, "group": n}
                rows.append(row | ({"ref_logprobs": reference} if has_reference else {}))
            recorder.step(step, rows)
    return reported("consistency", folder, "--over-time")


@pytest.mark.parametrize(
    ("gap", "options", "code", "says"),
    [
        (lambda s, a: 1e-6, {}, 0, None),
        (lambda s, a: 0.01, {}, 0, None),
        (frozen, {}, 1, "the engine is frozen"),
        (lambda s, a: 0.001 + 0.02 * a, {"ages": (0, 1, 2, 3)}, 0, "staleness"),
        (lambda s, a: 0.002 + 0.02 * (s % 6), {}, 1, "drift between full updates"),
        (lambda s, a: 0.004 if s < 14 else 0.05, {}, 1, "the gap jumps at one update"),
        (lambda s, a: 0.002 * (1 + s), {"has_reference": False}, 1, "moves away from the trainer"),
        (lambda s, a: 0.08, {}, 1, "by the same amount at all times"),
    ],
)
def test_what_moves_the_gap_is_named(tmp_path, gap, options, code, says):
    found_code, found = write(tmp_path / "r", gap, **options)
    names = [cause["name"] for cause in found["causes"]]
    assert found_code == code
    assert (says is None) == (not names)
    assert says is None or says in names[0]
    assert {line["against"] for line in found["regressions"]} >= {"steps"}
    assert any("ref_logprobs" in text for text in found["unobserved"]) == (
        options.get("has_reference") is False
    )
