"""Seeded schedules of faults against faulty servers: nothing lost, doubled, too old or poisoned.

The message of a failure has the seed, the faults and what they violated.
"""

from pathlib import Path

import pytest

from areal_core.servers import client
from tests.rollout.chaos.trial import BATCH_SIZE, N_SAMPLES, NUM_STEPS, run_trial

ALL = range(200)


def assert_clean(seed: int, folder: Path) -> None:
    trial = run_trial(seed, folder)
    assert not trial.violations, trial
    assert trial.num_rows == NUM_STEPS * BATCH_SIZE * N_SAMPLES
    assert trial.num_replies >= trial.num_rows


def test_a_schedule_of_faults_violates_nothing(tmp_path):
    """Staleness 2, and a trainer that starts again before step 4, with prompts in flight."""
    assert_clean(10, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", ALL)
def test_two_hundred_schedules_violate_nothing(seed, tmp_path):
    assert_clean(seed, tmp_path)


def test_a_client_that_trusts_every_reply_is_caught(tmp_path, monkeypatch):
    """Without its checks the client trains on what servers made up; the history shows it."""
    monkeypatch.setattr(client, "checked", lambda chunk, asked: chunk)
    trial = run_trial(0, tmp_path, ("nan",))
    assert trial.injected["nan"] > 0
    assert len(trial.violations.poisoned) > 0
    assert "as in a spoiled reply: nan from server " in trial.violations.poisoned[0]
