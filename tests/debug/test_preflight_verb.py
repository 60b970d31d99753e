"""How `areal-debug check run` repeats steps, and what it concludes; the runs are scripted."""

import pytest

from areal_debug.verbs.check import Repeats, repeat_steps
from recorder import Outcome
from replayer.preflight.repeats import write_repeat


class Scripted(Repeats):
    """Runs whose loss in the last step is `bits(number of the run)`."""

    def run(self, folder, keep=()):
        folder.mkdir()
        losses = (1.0, 1.0 + self.bits(next(self.numbers)))
        outcomes = [Outcome(step, step + 1, (), {"loss": loss}, {}) for step, loss in enumerate(losses)]
        write_repeat(folder, outcomes, [])
        return folder


@pytest.mark.parametrize(
    ("num_runs", "bits", "step"),
    [
        (2, lambda number: 0.0, None),
        (2, float, 1),
        (3, lambda number: float(number == 2), 1),  # more runs find what two miss
        (8, lambda number: float(number == 7), 1),
    ],
)
def test_a_run_that_differs_in_any_repeat_is_found(num_runs, bits, step, tmp_path):
    repeats = Scripted([], 1, 2, num_runs, False)
    object.__setattr__(repeats, "bits", bits)
    object.__setattr__(repeats, "numbers", iter(range(100)))
    report = repeat_steps(tmp_path, repeats)
    assert (report.identical, report.num_runs, report.step) == (step is None, num_runs, step)
