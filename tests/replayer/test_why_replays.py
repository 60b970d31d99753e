"""`why` with replays of a real record: all of it, and one step with each of several options."""

from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_debug.replay.ranks import runner
from replayer.why.chain import Options, explain

ROOT = Path(__file__).parents[2]


@contextmanager
def replaying():
    with runner(None) as run:
        yield (
            Options(
                ROOT,
                replay=lambda record, step, *given, **apart: run.replay(record, step, step, *given, **apart),
            ),
            run,
        )


@pytest.mark.long
def test_of_two_options_the_one_that_changes_the_step_is_the_cause(tmp_path, tiny_model, record_run):
    both = {"actor__ppo_n_minibatches": 2}
    left = record_run(tmp_path / "a", tiny_model, 1, **both)
    changed = {"actor__eps_clip": 0.0001, "actor__c_clip": 1000.0}
    right = record_run(tmp_path / "b", tiny_model, 1, **both, **changed)
    with replaying() as (options, _):
        answer = explain(left.record, right.record, options)
    assert [setting.where for setting in answer.settings if setting.acts] == [
        "actor.c_clip",
        "actor.eps_clip",
    ]
    assert answer.finding.cause.what == "actor.eps_clip was set differently (actor.eps_clip=0.0001 in B)"
    assert answer.finding.confidence == "high"
    assert answer.finding.evidence[1] == (
        "A, replayed here with B's options, has B's bits at the loss of step 0"
    )
