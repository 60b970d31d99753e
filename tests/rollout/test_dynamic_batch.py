"""Batches that rejected prompts make smaller, and episodes that are written as text."""

import json

import pytest

from areal_core.rollout.errors import NothingAccepted
from areal_core.rollout.pipeline import Executor
from areal_core.rollout.staleness import StalenessControl
from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.rollout.workflow import WrittenWorkflow, episode_tensors
from areal_core.testing import ScriptedEngine, make_tiny_tokenizer


class Prompts:
    """A feed of numbered prompts."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self):
        self.taken += 1
        return self.taken - 1, {"number": 1}


class RewardedBy:
    """One completion; its reward is that of its prompt, and None rejects it."""

    def __init__(self, rewards) -> None:
        self.rewards = rewards

    async def arun_episode(self, engine, data):
        response = await engine.agenerate(ModelRequest(input_ids=[data["number"]], sampling=Sampling()))
        reward = self.rewards(engine.prompt_id)
        return None if reward is None else episode_tensors(response, reward)


@pytest.fixture
def start():
    started = []

    def make(**options):
        control = StalenessControl(batch_size=4, max_concurrent=4)
        started.append(Executor(ScriptedEngine(), control, **options))
        return started[-1]

    yield make
    for executor in started:
        executor.close()


def take_batches(executor, workflow, count):
    feed, found = Prompts(), []
    for version in range(count):
        executor.engine.set_version(version)
        executor.set_version(version)
        batch = executor.prepare_batch(feed, workflow, timeout_s=20)
        found.append(batch["prompt_id"].tolist())
    return feed.taken, found


def accepts_odd(prompt_id):
    return None if prompt_id % 2 == 0 else 1.0


def test_a_rejected_prompt_keeps_its_place_and_nothing_is_sampled_for_it(start):
    executor = start(holds_rejected=True)
    assert take_batches(executor, RewardedBy(accepts_odd), 3) == (12, [[1, 3], [5, 7], [9, 11]])
    assert (executor.control.accepted, executor.control.rejected, executor.control.held) == (6, 6, 6)


def test_otherwise_it_is_replaced(start):
    executor = start()
    _, batches = take_batches(executor, RewardedBy(accepts_odd), 2)
    assert [len(batch) for batch in batches] == [4, 4]


def test_a_batch_of_rejected_prompts_alone_is_replaced(start):
    executor = start(holds_rejected=True)
    rewards = RewardedBy(lambda prompt_id: None if prompt_id < 4 else 1.0)
    assert take_batches(executor, rewards, 2) == (12, [[4, 5, 6, 7], [8, 9, 10, 11]])
    assert executor.control.held == 0


def test_when_everything_is_rejected_the_run_ends_with_a_reason(start):
    with pytest.raises(NothingAccepted, match="prompts in a row were rejected"):
        take_batches(start(holds_rejected=True), RewardedBy(lambda prompt_id: None), 1)


def test_episodes_are_written_with_their_names_reward_and_text(start, tmp_path):
    tokenizer = make_tiny_tokenizer()
    workflow = WrittenWorkflow(RewardedBy(lambda prompt_id: 0.25 * prompt_id), tmp_path, tokenizer)
    batch = start().rollout_batch([(3, {"number": 5}), (7, {"number": 6})], workflow, n_samples=2)
    lines = [json.loads(line) for line in (tmp_path / "0/7.jsonl").read_text().splitlines()]
    assert sorted(line["sample_id"] for line in lines) == [0, 1]
    assert {(line["prompt_id"], line["reward"], line["prompt"]) for line in lines} == {(7, 1.75, tokenizer.decode([6]))}  # fmt: skip
    row = batch["prompt_id"].tolist().index(7)
    sampled = batch["input_ids"][row][batch["loss_mask"][row].bool()]
    assert lines[0]["completion"] == tokenizer.decode(sampled)
    assert lines[0]["num_sampled"] == len(sampled)
    assert lines[0]["finish_reason"] in ("stop", "length")
