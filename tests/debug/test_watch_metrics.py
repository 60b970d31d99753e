"""`train --watch` follows the run's metrics: hooks, and a finding that stops the run."""

import pytest

from areal_debug.verbs.train import without_watch


def test_the_child_gets_the_command_line_without_what_goes_with_watching():
    given = ["train", "--watch", "s.py", "--on-alarm", "echo a", "--stop-on=D17", "a.b=1"]
    assert without_watch(given) == ["train", "s.py", "a.b=1"]


@pytest.mark.long
def test_a_finding_stops_the_run_after_its_hooks(train, tmp_path):
    # with this learning rate all rewards are soon equal, and the weights do not move
    endless = ("total_train_steps=400", "total_train_epochs=30", "actor.optimizer.lr=0.5")
    hook = f"echo $AREAL_DEBUG_ALARM_RUN $AREAL_DEBUG_ALARM_ID >> {tmp_path}/alarms"
    done = train("--watch", "--stop-on", "all", "--on-alarm", hook, *endless)
    assert done.returncode == 1, done.stderr
    first = (tmp_path / "alarms").read_text().splitlines()[0]
    assert first.startswith("test D")
    assert f"doctor: stopping the run for {first.split()[1]}: SIGTERM" in done.stderr
    assert "interrupted after" in done.stdout
