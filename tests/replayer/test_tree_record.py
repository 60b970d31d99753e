"""A recorded run that computed the samples of a prompt as a tree, and its replay to the bit."""

import numpy as np
import pytest

from replayer.goto import goto

MODEL = {"dtype": "float32", "mb_spec": {"max_tokens_per_mb": 64}, "enable_tree_training": True}
SHARED = 3  # tokens that the samples of a prompt begin with


def share_beginnings(batch, step):
    ids = batch["input_ids"]
    ids[:, :SHARED] = ids[::4, :SHARED].repeat_interleave(4, 0)
    return batch


@pytest.fixture(scope="module")
def tree_run(tmp_path_factory, tiny_model, record_run):
    """Three steps with a reference and a critic; an anchor before step 2."""
    others = {"path": str(tiny_model), **MODEL}
    return record_run(
        tmp_path_factory.mktemp("tree"),
        tiny_model,
        3,
        share_beginnings,
        debug__anchor_every_steps=2,
        actor__enable_tree_training=True,
        actor__kl_ctl=0.1,
        ref=others,
        critic=others | {"optimizer": {"lr": 1e-3}},
    )


def test_the_plan_has_the_distinct_tokens_of_each_micro_batch(tree_run):
    for step in range(3):
        recorded = tree_run.record.step(step)
        lengths = np.diff(recorded.batch(0)["cu_seqlens"]).tolist()
        details = recorded.plan(0).details
        for minibatch in details["minibatches"] + details["critic"]:
            for rows, computed in zip(minibatch["micro_batches"], minibatch["tree_tokens"], strict=True):
                prompts = len({row // 4 for row in rows})
                tokens = sum(lengths[row] for row in rows)
                # random tokens after the shared ones: hardly ever equal
                assert 0 <= tokens - SHARED * (len(rows) - prompts) - computed <= 2
        assert [len({row // 4 for row in part["rows"]}) for part in details["minibatches"]] == [2, 2]


@pytest.mark.parametrize(("step", "anchor"), [pytest.param(1, None, marks=pytest.mark.long), (2, 2)])
def test_the_run_replays_to_the_same_bits(tree_run, weights_of, step, anchor):
    seen = []

    def look(scene):
        engines = (scene.trainer.actor, scene.trainer.reference, scene.trainer.critic)
        seen.append((weights_of(scene.trainer), [engine.shares_prefixes for engine in engines]))

    report = goto(tree_run.path, step, look)
    assert seen == [(tree_run.weights[step], [True, True, True])]
    assert (report.anchor, report.faithful) == (anchor, True)
