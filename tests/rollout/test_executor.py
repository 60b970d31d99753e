"""The executor as a script uses it: from a thread without an event loop."""

import asyncio
import time

import pytest

from areal_core.errors import ConfigError
from areal_core.rollout.errors import NothingAccepted, RolloutStuck
from areal_core.rollout.pipeline import Executor
from areal_core.rollout.staleness import StalenessControl
from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.rollout.workflow import episode_tensors
from areal_core.telemetry.stats import Stats
from areal_core.testing import ScriptedEngine
from areal_core.trainer.build_rollouts import build_filter, build_workflow
from areal_core.trainer.checkpointing import Frequency
from areal_core.trainer.evaluation import Evaluation
from areal_core.trainer.live import LiveRollouts


class Rewarded:
    """One completion; its reward is `reward(prompt_id, sample_id)`, and None rejects it."""

    def __init__(self, reward=lambda prompt_id, sample_id: 0.5) -> None:
        self.reward = reward

    async def arun_episode(self, engine, data):
        response = await engine.agenerate(ModelRequest(input_ids=[data["number"]], sampling=Sampling()))
        reward = self.reward(engine.prompt_id, engine.sample_id)
        return None if reward is None else episode_tensors(response, reward)


class Numbered:
    """A loader of two prompts per batch, with a state."""

    def __init__(self) -> None:
        self.position = 0

    def next_batch(self):
        self.position += 2
        return [(i, self.row(i)) for i in (self.position - 2, self.position - 1)]

    def row(self, prompt_id):
        return {"number": prompt_id}

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.fixture
def start():
    """Start executors; all are closed at the end."""
    started = []

    def make(batch_size=4, max_concurrent=100, ahead=0, engine=None, **options) -> Executor:
        control = StalenessControl(batch_size, max_concurrent, ahead)
        started.append(Executor(engine or ScriptedEngine(), control, **options))
        return started[-1]

    yield make
    for executor in reversed(started):
        executor.close()


def rows(*numbers):
    return [(number, {"number": number}) for number in numbers]


def test_results_come_in_order_and_a_rejected_one_is_none(start):
    executor = start()
    workflow = Rewarded(lambda prompt_id, _: None if prompt_id == 1 else float(prompt_id))
    ids = [executor.submit({"number": i}, workflow, n_samples=2) for i in range(3)]
    assert ids == [0, 1, 2]
    first, second = executor.wait(2, timeout_s=10)
    assert first["rewards"].tolist() == [0.0, 0.0]
    assert first["sample_id"].tolist() == [0, 1]
    assert second is None
    assert executor.wait_for_task(2, timeout_s=10)["prompt_id"].tolist() == [2, 2]


def test_a_synchronous_batch_is_in_canonical_order_and_without_rejected_prompts(start):
    workflow = Rewarded(lambda prompt_id, sample_id: None if (prompt_id, sample_id) == (5, 0) else 1.0)
    batch = start().rollout_batch(rows(9, 5, 7), workflow, n_samples=2)
    pairs = list(zip(batch["prompt_id"].tolist(), batch["sample_id"].tolist(), strict=True))
    assert pairs == [(5, 1), (7, 0), (7, 1), (9, 0), (9, 1)]
    with pytest.raises(NothingAccepted, match="all 2 prompts were rejected or failed"):
        start().rollout_batch(rows(1, 2), Rewarded(lambda *_: None))


def test_paused_it_starts_nothing_and_resumed_it_continues(start):
    engine = ScriptedEngine()
    executor = start(engine=engine)
    executor.pause()
    executor.submit({"number": 0}, Rewarded())
    with pytest.raises(TimeoutError, match="0 running, 1 queued"):
        executor.wait(1, timeout_s=0.05)
    assert engine.requests == []
    executor.resume()
    assert len(executor.wait(1, timeout_s=10)) == 1


def test_an_episode_that_waits_for_its_own_executor_raises(start):
    executor = start()

    class Recursive:
        async def arun_episode(self, engine, data):
            executor.wait(1)

    executor.submit({"number": 0}, Recursive())
    with pytest.raises(RolloutStuck, match="an episode called its own executor"):
        executor.wait(1, timeout_s=10)


def test_groups_whose_rewards_are_equal_are_filtered_out(start):
    workflow = Rewarded(lambda prompt_id, sample_id: float(sample_id) if prompt_id == 2 else 1.0)
    for filter_fn in (
        build_filter(True, None),
        build_filter(False, lambda batch: len(set(batch["rewards"].tolist())) > 1),
    ):
        batch = start().rollout_batch(rows(1, 2, 3), workflow, n_samples=2, should_accept=filter_fn)
        assert batch["prompt_id"].tolist() == [2, 2]
    both = build_filter(True, lambda batch: batch["rewards"].sum() > 5)
    with pytest.raises(NothingAccepted):
        start().rollout_batch(rows(1, 2, 3), workflow, n_samples=2, should_accept=both)
    assert build_filter(False, None) is None


def test_a_filter_or_workflow_is_found_by_its_import_path_or_refused_by_it():
    assert build_filter(False, "math.isfinite")(1.0) is True
    with pytest.raises(ConfigError, match=r"dynamic_filter_fn 'math.nothing': math has no nothing; its func"):
        build_filter(False, "math.nothing")
    with pytest.raises(ConfigError, match=r"workflow 'no.such.Thing': no.such cannot be imported"):
        build_workflow("no.such.Thing", {}, None, None, lambda close: None)


def test_a_continued_run_neither_loses_nor_doubles_a_prompt(start):
    """Cut off after three steps, with prompts running, finished and waiting; two were rejected."""
    reject = {1, 4}
    consumed = []

    def live():
        workflow = Rewarded(lambda prompt_id, _: None if prompt_id in reject else 1.0)
        return LiveRollouts(start(batch_size=2, max_concurrent=3, ahead=2), Numbered(), workflow)

    def train(rollouts, steps):
        for step in steps:
            consumed.extend(rollouts.next_batch(step, step)["prompt_id"].tolist())
            rollouts.update_weights(None, step + 1)

    first = live()
    train(first, range(3))
    state = first.state_dict()
    second = live()
    second.load_state_dict(state)
    second.update_weights(None, 3)
    train(second, range(3, 7))
    assert len(consumed) == len(set(consumed)) == 14
    in_flight = second.state_dict()["prompts"]
    assert sorted({*consumed, *in_flight, *reject}) == list(range(second.feed.loader.position))


def test_validation_runs_concurrently_with_training_and_is_not_delayed_by_it(start):
    class TrainingWaits(ScriptedEngine):
        async def agenerate(self, req):
            if req.input_ids[0] < 100:
                await asyncio.Event().wait()
            return await super().agenerate(req)

    executor = start(engine=TrainingWaits())
    for number in range(4):
        executor.submit({"number": number}, Rewarded())
    stats = Stats()
    concurrent = start(
        batch_size=1, max_concurrent=2, ahead=10**12, engine=executor.engine, loop=executor.loop
    )
    workflow = Rewarded(lambda prompt_id, sample_id: float(prompt_id))
    rows = [(i, {"number": 100 + i}) for i in range(5)]
    for rank in range(2):
        frequency = Frequency(None, 2, None, 10)
        evaluation = Evaluation(concurrent, rows[rank::2], frequency, stats, workflow, n_samples=3)
        evaluation.after_step(0)
        evaluation.after_step(1)
    exported = stats.export()
    assert exported["eval-rollout/n_seqs"] == 15
    assert exported["eval-rollout/reward"] == 2.0


def test_frequency_is_whichever_period_ends_first():
    now = [0.0]
    frequency = Frequency(1, 3, 60.0, steps_per_epoch=4, clock=lambda: now[0])
    due = []
    for step in range(12):
        now[0] += 61.0 if step == 5 else 1.0
        if frequency.is_due(step):
            due.append(step)
    assert due == [2, 3, 5, 7, 8, 11]
    assert not Frequency(None, None, None, 4).is_set
    late_elsewhere = Frequency(None, None, 60.0, 4, agree=lambda late: 1, clock=lambda: 0.0)
    assert late_elsewhere.is_due(0)


def seconds_of(request: ModelRequest) -> float:
    """One completion in four takes ten times as long."""
    return 0.1 if request.metadata["prompt_id"] % 4 == 0 else 0.01


def wall_time(executor: Executor, num_steps: int, train_s: float) -> float:
    """Return the seconds of a run whose training only sleeps."""
    rollouts = LiveRollouts(executor, Numbered(), Rewarded())
    start_s = time.perf_counter()
    for step in range(num_steps):
        rollouts.next_batch(step, step)
        time.sleep(train_s)
        rollouts.update_weights(None, step + 1)
    return time.perf_counter() - start_s


@pytest.mark.long
def test_asynchronous_rollouts_beat_waiting_for_the_longest(start):
    synchronous = wall_time(start(batch_size=2, engine=ScriptedEngine(duration_s=seconds_of)), 6, 0.04)
    ahead = wall_time(start(batch_size=2, ahead=2, engine=ScriptedEngine(duration_s=seconds_of)), 6, 0.04)
    # Synchronous: three long waits and six trainings, at least 0.54 s. Asynchronous: 0.34 s, as
    # all waits except the first are hidden.
    assert synchronous > 0.5
    assert ahead < 0.8 * synchronous
