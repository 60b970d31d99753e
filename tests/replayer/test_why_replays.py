"""`why` with replays of a real record: all of it, and one step with each of several options."""

from pathlib import Path

import pytest

from areal_debug.replay.ranks import runner
from replayer.why.chain import Options, explain

from .conftest import train_and_record

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_of_two_options_the_one_that_changes_the_step_is_the_cause(tmp_path, tiny_model):
    both = {"actor__ppo_n_minibatches": 2}
    left = train_and_record(tmp_path / "a", tiny_model, 1, **both)
    changed = {"actor__eps_clip": 0.0001, "actor__c_clip": 1000.0}
    right = train_and_record(tmp_path / "b", tiny_model, 1, **both, **changed)
    with runner(None) as run:

        def replay(record, step, *given, **apart):
            return run.replay(record, step, step, *given, **apart)

        answer = explain(left.record, right.record, Options(ROOT, replay=replay))
    assert [setting.where for setting in answer.settings if setting.acts] == [
        "actor.c_clip",
        "actor.eps_clip",
    ]
    assert answer.finding.cause.what == "actor.eps_clip was set differently (actor.eps_clip=0.0001 in B)"
    assert answer.finding.confidence == "high"
    assert answer.finding.evidence[1] == (
        "A, replayed here with B's options, has B's bits at the loss of step 0"
    )
