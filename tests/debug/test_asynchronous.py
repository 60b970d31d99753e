"""Asynchronous rollouts on real engines.

Staleness, versions and ids of the training samples, and the bit-identical replay.
"""

from collections import Counter
from itertools import pairwise

import pytest

from recorder import open_record


def trained_samples(record, num_ranks: int, ahead: int) -> tuple[Counter, int]:
    """Count how often each (prompt_id, sample_id) was trained on, and those with several versions.

    Asserts the bound on staleness.
    """
    seen, num_mixed = Counter(), 0
    for step in record.steps:
        for rank in range(num_ranks):
            batch = record.step(step).batch(rank)
            ends = batch["cu_seqlens"]
            for row, (start, end) in enumerate(pairwise(ends)):
                versions = batch["versions"][start:end][batch["loss_mask"][start:end] == 1]
                assert step - ahead <= versions.min() <= versions.max() <= step
                num_mixed += len(set(versions.tolist())) > 1
                seen[int(batch["prompt_id"][row]), int(batch["sample_id"][row])] += 1
    return seen, num_mixed


@pytest.mark.long
@pytest.mark.sglang
def test_a_server_gets_new_weights_in_the_middle_of_generations_and_no_sample_is_lost_or_doubled(
    areal_debug, train, tmp_path
):
    done = train(
        "--dump-rollout",
        tmp_path / "record",
        *("allocation_mode=sglang:d1+fsdp:d2", "sglang.context_length=512", "sglang.dtype=float32"),
        *("rollout.max_head_offpolicyness=2", "rollout.max_concurrent_rollouts=12", "total_train_steps=6"),
        *(
            "train_dataset.batch_size=8",
            "rollout.consumer_batch_size=8",
            "actor.mb_spec.max_tokens_per_mb=512",
        ),
        *("gconfig.max_new_tokens=160", "gconfig.ignore_eos=true"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen, num_mixed = trained_samples(open_record(tmp_path / "record"), num_ranks=2, ahead=2)
    assert sorted(seen) == [(prompt, sample) for prompt in range(6 * 8) for sample in range(4)]
    assert set(seen.values()) == {1}
    assert num_mixed >= 8
    done = areal_debug("replay", tmp_path / "record")
    assert "Bit-identical: 6 of 6 steps" in done.stdout, done.stdout + done.stderr


@pytest.mark.long
def test_a_run_killed_during_asynchronous_rollouts_continues_without_losing_or_doubling_a_prompt(
    train, tmp_path
):
    options = (
        *("rollout.max_head_offpolicyness=2", "rollout.max_concurrent_rollouts=3", "total_train_steps=6"),
        *("recover.mode=auto", "recover.freq_steps=1", "recover.retries=0", f"cluster.fileroot={tmp_path}"),
    )
    killed = train("--dump-rollout", tmp_path / "first", *options, KILL_IN_STEP="3")
    assert killed.returncode == 137, killed.stdout + killed.stderr
    done = train("--dump-rollout", tmp_path / "second", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = open_record(tmp_path / "first"), open_record(tmp_path / "second")
    assert (list(first.steps), list(second.steps)) == ([0, 1, 2], [3, 4, 5])
    seen = sum((trained_samples(record, num_ranks=1, ahead=2)[0] for record in (first, second)), Counter())
    assert sorted(seen) == [(prompt, sample) for prompt in range(6 * 4) for sample in range(4)]
    assert set(seen.values()) == {1}
