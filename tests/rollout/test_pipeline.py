"""The pipeline on its event loop: start and consumption of prompts, and errors."""

import asyncio
import functools
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.rollout.episodes import Plan
from areal_core.rollout.pipeline import Patience, Pipeline
from areal_core.rollout.staleness import StalenessControl
from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.rollout.workflow import episode_tensors
from areal_core.testing import ScriptedEngine
from tests.rollout.conftest import Rewarded

QUICK = Patience(check_every_s=0.01, paused_s=0.02, own_code_s=0.03, generation_s=0.03)


class Numbers:
    """A feed of rows {"number": n}, n = 0, 1, ..."""

    def __init__(self) -> None:
        self.num_taken = 0

    def take(self):
        self.num_taken += 1
        return self.num_taken - 1, {"number": self.num_taken - 1}


class Gated:
    """A workflow whose episodes wait for the test: `gates[prompt, sample].set_result(outcome)`."""

    def __init__(self) -> None:
        self.gates: dict[tuple[int, int], asyncio.Future] = {}

    async def arun_episode(self, engine, data):
        gate = self.gates[engine.prompt_id, engine.sample_id] = asyncio.get_running_loop().create_future()
        response = await engine.agenerate(ModelRequest(input_ids=[data["number"]], sampling=Sampling()))
        outcome = await gate
        if isinstance(outcome, Exception):
            raise outcome
        return None if outcome is None else episode_tensors(response, outcome)

    async def open(self, prompt_id: int, outcome=0.5, sample_id: int = 0) -> None:
        self.gates.pop((prompt_id, sample_id)).set_result(outcome)
        await settle()


def run(scenario) -> None:
    """Run a scenario with a time-out, so that a hang is a failure."""
    asyncio.run(asyncio.wait_for(scenario, 5))


def on_a_loop(test):
    """Run a test as a scenario."""

    @functools.wraps(test)
    def call(**given):
        run(test(**given))

    return call


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


def pipeline(batch_size=2, max_concurrent=100, ahead=0, **options) -> Pipeline:
    engine = options.pop("engine", None) or ScriptedEngine()
    control = StalenessControl(batch_size, max_concurrent, ahead)
    return Pipeline(engine, control, patience=options.pop("patience", QUICK), **options)


async def advance(pipe: Pipeline, version: int) -> None:
    """Do what a trainer does after a step."""
    pipe.engine.set_version(version)
    await pipe.set_version(version)
    await settle()


def ids(groups) -> list[int]:
    return sorted(group.prompt_id for group in groups)


@on_a_loop
async def test_synchronously_no_more_than_a_batch_starts_and_the_next_version_starts_the_next():
    pipe, workflow = pipeline(batch_size=2), Gated()
    first = asyncio.create_task(pipe.prepare(Numbers(), Plan(workflow), None))
    await settle()
    assert sorted(workflow.gates) == [(0, 0), (1, 0)]
    await workflow.open(1)
    assert not first.done()
    await workflow.open(0)
    assert ids(await first) == [0, 1]
    await settle()
    assert workflow.gates == {}  # consumed, but still of this version
    await advance(pipe, 1)  # no waiter for a batch now: the version alone wakes the producer
    assert sorted(workflow.gates) == [(2, 0), (3, 0)]
    await pipe.close()


@on_a_loop
async def test_asynchronously_the_pipe_stays_full_while_the_trainer_trains():
    pipe, workflow = pipeline(batch_size=2, ahead=1, max_concurrent=3), Gated()
    batch = asyncio.create_task(pipe.prepare(Numbers(), Plan(workflow), None))
    await settle()
    assert len(workflow.gates) == 3  # max_concurrent, of the 4 that the version allows
    await workflow.open(0)
    assert len(workflow.gates) == 3
    await workflow.open(2)
    assert ids(await batch) == [0, 2]
    assert sorted(workflow.gates) == [(1, 0), (3, 0)]  # 4 of version 0 were started: no more
    await advance(pipe, 1)
    assert len(workflow.gates) == 3
    await pipe.close()


@on_a_loop
async def test_a_group_is_complete_and_starts_and_ends_together():
    seen = []
    pipe, workflow = pipeline(batch_size=1), Gated()

    def accept(rows):
        seen.append((rows["prompt_id"].tolist(), rows["sample_id"].tolist(), rows["rewards"].tolist()))
        return True

    batch = asyncio.create_task(pipe.prepare(Numbers(), Plan(workflow, 3, accept), None))
    await settle()
    assert sorted(workflow.gates) == [(0, 0), (0, 1), (0, 2)]
    for sample_id in (2, 0, 1):
        assert seen == []
        await workflow.open(0, float(sample_id), sample_id)
    (group,) = await batch
    assert seen == [([0, 0, 0], [0, 1, 2], [0.0, 1.0, 2.0])]
    assert group.batch()["sample_id"].tolist() == [0, 1, 2]


@on_a_loop
async def test_rejected_prompts_are_replaced_and_counted_separately_from_failed_ones():
    outcomes = {0: None, 1: ValueError("flaky"), 2: 0.0, 3: 1.0, 4: 1.0}
    workflow = Rewarded(lambda prompt_id, _: outcomes[prompt_id])
    pipe = pipeline(batch_size=2, max_failures=1)
    groups = await pipe.prepare(
        Numbers(), Plan(workflow, 1, lambda rows: bool(rows["rewards"].sum() > 0)), None
    )
    assert ids(groups) == [3, 4]
    counts = pipe.control
    assert (counts.accepted, counts.rejected, counts.failed, counts.running) == (2, 2, 1, 0)


@on_a_loop
async def test_one_failure_more_than_allowed_raises_the_workflows_exception_and_cancels_the_rest():
    pipe, workflow = pipeline(batch_size=3, max_failures=1), Gated()
    batch = asyncio.create_task(pipe.prepare(Numbers(), Plan(workflow, 2), None))
    await settle()
    await workflow.open(1, ValueError("first"))
    assert not batch.done()
    await workflow.open(2, KeyError("second"), sample_id=1)
    with pytest.raises(KeyError, match="second") as raised:
        await batch
    assert raised.value.__notes__ == ["in the episode of prompt 2, sample 1"]
    assert pipe.control.running == 0
    assert all(gate.cancelled() for gate in workflow.gates.values())


class Stuck(ScriptedEngine):
    """An engine that never answers."""

    async def agenerate(self, req):
        await asyncio.Event().wait()


def test_a_version_that_moves_without_a_batch_drops_stale_prompts_and_counts_them(caplog):
    async def scenario():
        pipe, feed, workflow = pipeline(batch_size=1, ahead=1), Numbers(), Gated()
        batch = asyncio.create_task(pipe.prepare(feed, Plan(workflow), None))
        await settle()
        await workflow.open(0)
        await workflow.open(1)
        assert ids(await batch) == [0]
        await advance(pipe, 3)
        batch = asyncio.create_task(pipe.prepare(feed, Plan(workflow), None))
        await settle()
        await workflow.open(2)
        assert ids(await batch) == [2]
        assert (pipe.control.stale, pipe.control.accepted) == (1, 2)
        await pipe.close()

    run(scenario())
    assert "1 prompts (the first is 1) were dropped: their oldest tokens are of version 0" in caplog.text


@on_a_loop
async def test_cancelling_before_a_task_has_started_leaves_no_count_behind():
    pipe = pipeline(ahead=3)
    for number in range(3):
        await pipe.submit(None, {"number": number}, Plan(Gated()))
    await pipe.close()
    assert pipe.control.running == 0


@settings(max_examples=40)
@given(
    batch_size=st.integers(1, 3),
    ahead=st.integers(0, 3),
    max_concurrent=st.integers(1, 8),
    seed=st.randoms(use_true_random=False),
)
@on_a_loop
async def test_in_any_order_every_prompt_is_consumed_once_and_in_time(
    batch_size, ahead, max_concurrent, seed
):
    pipe, feed, workflow = pipeline(batch_size, max_concurrent, ahead), Numbers(), Gated()
    consumed, rejected = [], []
    for version in range(8):
        batch = asyncio.create_task(pipe.prepare(feed, Plan(workflow), None))
        await settle()
        while not batch.done():
            prompt_id, _ = seed.choice(sorted(workflow.gates))
            if len(rejected) < 10 and seed.random() < 0.1:
                rejected.append(prompt_id)
            await workflow.open(prompt_id, None if prompt_id in rejected else 0.0)
        groups = await batch
        assert len(groups) == batch_size
        versions = [int(rows["versions"].max()) for group in groups for rows in group.rows]
        assert all(version - ahead <= sampled <= version for sampled in versions)
        consumed += [group.prompt_id for group in groups]
        await advance(pipe, version + 1)
        for _ in range(seed.randrange(3)):  # some finish while the trainer trains
            await settle()
            if workflow.gates:
                await workflow.open(seed.choice(sorted(workflow.gates))[0])
    in_flight = await pipe.snapshot(list)
    assert sorted(consumed + rejected + in_flight) == list(range(feed.num_taken))
    assert pipe.control.stale == 0
    await pipe.close()


def test_an_episode_that_has_finished_is_not_called_stuck_while_its_group_runs(caplog):
    class OneIsQuick:
        async def arun_episode(self, engine, data):
            if engine.sample_id == 0:
                return
            await engine.agenerate(ModelRequest(input_ids=[1], sampling=Sampling(max_new_tokens=1)))

    async def scenario():
        pipe = pipeline(engine=Stuck())
        with pytest.raises(TimeoutError):
            await pipe.prepare(Numbers(), Plan(OneIsQuick(), 2), 0.2)
        await pipe.close()

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert any("2 episodes wait for the engine, prompt 0, sample 1" in message for message in caplog.messages)
    assert not any("stuck" in message for message in caplog.messages)
