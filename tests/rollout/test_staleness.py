"""The arithmetic of staleness: capacity, shares of ranks, and the bound in any order of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_core.rollout.staleness import StalenessControl, choose_batch, per_rank


@pytest.mark.parametrize(
    ("control", "capacity"),
    [
        # capacity = min(max_concurrent - running, (max_head_offpolicyness + version + 1) *
        # batch_size - (accepted + running))
        (StalenessControl(4, 100), 4),
        (StalenessControl(4, 3), 3),
        (StalenessControl(4, 100, 2), 12),
        (StalenessControl(4, 100, 2, version=3, accepted=20, consumed=12, running=3), 1),
        (StalenessControl(4, 100, 2, version=3, accepted=20, consumed=12, running=6), -2),
        (StalenessControl(4, 8, 2, version=3, accepted=13, consumed=12, running=5), 3),
        (StalenessControl(4, 100, 2, num_steps=2), 8),
        # A version that moved without a batch does not let more prompts start than fit into later
        # batches.
        (StalenessControl(4, 100, 1, version=3), 8),
    ],
)
def test_capacity_is_the_smaller_of_two_limits(control, capacity):
    assert control.capacity() == capacity


@pytest.mark.parametrize(("total", "num_ranks", "share"), [(8, 2, 4), (7, 2, 3), (1, 4, 1), (3, 4, 1)])
def test_a_ranks_share_is_never_zero(total, num_ranks, share):
    assert per_rank(total, num_ranks) == share


def test_the_trainer_waits_for_stale_ones_that_would_not_fit_into_later_batches():
    # At version 1, two of version 0 are running. With max_head_offpolicyness 2 and batches of one,
    # version 2 could consume only one of them, so a newer finished one may not be consumed first.
    assert choose_batch([1], [0, 0], 1, 2, 1) is None
    assert choose_batch([1, 0], [0], 1, 2, 1) == [1]
    # With one running there is space for it later.
    assert choose_batch([1], [0], 1, 2, 1) == [0]


@given(
    batch_size=st.integers(1, 4),
    ahead=st.integers(0, 4),
    max_concurrent=st.integers(1, 12),
    choices=st.lists(st.integers(0, 10**6), min_size=1, max_size=400),
)
def test_no_sample_is_consumed_too_stale_or_dropped_whatever_finishes_first(
    batch_size, ahead, max_concurrent, choices
):
    """Events in random order: a running prompt ends, mostly a new one, or a batch is requested."""
    control = StalenessControl(batch_size, max_concurrent, ahead)
    running: list[int] = []  # versions at the start
    ready: list[int] = []
    num_consumed = 0
    for choice in choices:
        while control.capacity() > 0:
            running.append(control.version)
            control.running += 1
        assert 0 < control.running <= max_concurrent or len(ready) >= batch_size
        event, which = choice % 8, choice // 8
        if event < 5 and running:
            version = running.pop(which % len(running) if event < 2 else -1)
            control.running -= 1
            if event:
                control.accepted += 1
                ready.append(version)
            else:
                control.rejected += 1
            continue
        chosen = choose_batch(ready, running, control.version, ahead, batch_size)
        if chosen is None:
            assert running, "the trainer would wait indefinitely"
            continue
        assert [ready[i] for i in chosen] == sorted(ready)[:batch_size]
        assert all(control.version - ready[i] <= ahead for i in chosen)
        ready = [version for i, version in enumerate(ready) if i not in chosen]
        num_consumed += batch_size
        control.consumed += batch_size
        while control.capacity() > 0:  # before the version moves
            running.append(control.version)
            control.running += 1
        control.version += 1
        assert not any(control.is_stale(version) for version in ready + running)
    assert num_consumed == control.version * batch_size
    assert control.accepted == num_consumed + len(ready)
