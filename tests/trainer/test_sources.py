"""Prompts in flight, resharded to another number of ranks."""

import pytest

from areal_core.data.loader import PromptLoader
from areal_core.rollout.pipeline import PromptFeed
from areal_core.trainer.checkpointing import reshard

ROWS = [{"messages": str(i)} for i in range(13)]


def feeds(num_ranks: int) -> list[PromptFeed]:
    return [PromptFeed(PromptLoader(ROWS, 4, rank, num_ranks, seed=3)) for rank in range(num_ranks)]


def prompts_of(feeds: list[PromptFeed], count: int) -> set[int]:
    return {feed.take()[0] for feed in feeds for _ in range(count)}


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4), (4, 2)])
def test_no_prompt_is_lost_or_repeated_when_some_are_in_flight_and_ranks_are_ahead(before, after):
    old = feeds(before)
    finished = prompts_of(old, 4 // before)
    in_flight = [[feed.take()[0] for _ in range(1 + 2 * (rank == 0))] for rank, feed in enumerate(old)]
    states = [feed.state_dict(ids) for feed, ids in zip(old, in_flight, strict=True)]
    new = feeds(after)
    for feed, state in zip(new, reshard(states, after), strict=True):
        feed.load_state_dict(state)
    assert finished == {0, 1, 2, 3}
    sizes = [len(feed.state_dict([])["prompts"]) for feed in new]
    assert max(sizes) - min(sizes) <= 1
    again = [feed.take()[0] for feed in new for _ in range(max(sizes))]
    again += [feed.take()[0] for feed in new for _ in range(8 // after)]
    assert sorted(again)[: 8 + sum(sizes)] == list(range(4, 12 + sum(sizes)))


def test_without_prompts_in_flight_the_new_ranks_get_the_rows_of_an_uninterrupted_run():
    old, new, fresh = feeds(2), feeds(4), feeds(4)
    prompts_of(old, 2)
    for feed, state in zip(new, reshard([feed.state_dict([]) for feed in old], 4), strict=True):
        feed.load_state_dict(state)
    prompts_of(fresh, 1)
    assert [feed.take() for feed in new] == [feed.take() for feed in fresh]
