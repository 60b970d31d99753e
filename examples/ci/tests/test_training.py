"""Four recorded steps of training give the recorded numbers."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
RUN = [str(HERE / "train.py"), "--config", str(HERE / "train.yaml")]


@pytest.mark.replay("tests/records/four_steps.zip", run=RUN)
def test_training_gives_the_recorded_numbers(replay_record, recorded_model):
    report = replay_record(model=recorded_model)
    assert [result.step for result in report.steps] == [0, 1, 2, 3]
