"""The executor, and what a trainer gets of it: from a thread without an event loop."""

import asyncio
import json

import pytest
import torch

from areal_core.config import GenerationHyperparameters
from areal_core.data import PromptLoader
from areal_core.rollout.errors import NothingAccepted
from areal_core.rollout.pipeline import Executor, PromptFeed
from areal_core.rollout.staleness import StalenessControl
from areal_core.rollout.workflow import RLVRWorkflow, WrittenWorkflow
from areal_core.telemetry.stats import Stats
from areal_core.testing import ScriptedEngine, make_tiny_tokenizer
from areal_core.trainer.build_rollouts import build_filter
from areal_core.trainer.checkpointing import Frequency
from areal_core.trainer.evaluation import Evaluation
from areal_core.trainer.live import LiveRollouts
from tests.rollout.conftest import Rewarded

TOKENIZER = make_tiny_tokenizer()


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


def test_a_prompt_with_a_sample_left_out_is_dropped_where_groups_must_be_whole(start):
    workflow = Rewarded(lambda prompt_id, sample_id: None if (prompt_id, sample_id) == (5, 0) else 1.0)
    batch = start(drops_incomplete=True).rollout_batch(rows(9, 5, 7), workflow, n_samples=2)
    assert batch["prompt_id"].tolist() == [7, 7, 9, 9]


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


# Of a trainer


def test_new_weights_are_sent_before_the_version_moves(start):
    class Weights:
        def named_full_tensors(self):
            yield "w", torch.ones(1)

    class Update:
        def send(self, weights, version):
            self.seen = ([(name, t.item()) for name, t in weights], version, engine.version)

        def close(self):
            pass

    engine, update = ScriptedEngine(), Update()
    live = LiveRollouts(start(2, 2, engine=engine), None, Rewarded(), weight_update=update)
    live.update_weights(Weights(), 4)
    assert update.seen == ([("w", 1.0)], 4, 0)
    assert engine.version == 4


def test_rlvr_episode_holds_prompt_and_completion_with_masks_logprobs_and_versions():
    messages = [{"role": "user", "content": "1+1"}]
    prompt = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    completion = [*TOKENIZER.encode("2", add_special_tokens=False), TOKENIZER.eos_token_id]
    engine = ScriptedEngine(completions={tuple(prompt): completion}, version=3)
    seen = {}

    async def reward(prompt, completions, prompt_ids, completion_ids, **data) -> float:
        seen.update(prompt=prompt, completions=completions, ids=(prompt_ids, completion_ids), data=data)
        return 0.25

    gconfig = GenerationHyperparameters(n_samples=4, stop_token_ids=[50], max_new_tokens=7)
    workflow = RLVRWorkflow(reward, gconfig, TOKENIZER)
    row = {"messages": messages, "answer": "2"}
    episode = asyncio.run(workflow.arun_episode(engine, row))

    n = len(prompt)
    assert {key: value.tolist() for key, value in episode.items()} == {
        "input_ids": [prompt + completion],
        "attention_mask": [[True] * (n + 2)],
        "loss_mask": [[0] * n + [1, 1]],
        "logprobs": [[0.0] * n + [-1.0, -1.0]],
        "versions": [[-1] * n + [3, 3]],
        "rewards": [0.25],
        "finish_reason": [0],
    }
    assert {key: str(value.dtype).removeprefix("torch.") for key, value in episode.items()} == {
        "input_ids": "int32",
        "attention_mask": "bool",
        "loss_mask": "int32",
        "logprobs": "float32",
        "versions": "int32",
        "rewards": "float32",
        "finish_reason": "int32",
    }
    assert seen == {
        "prompt": "<|user|>1+1<|end|><|assistant|>",
        "completions": "2",
        "ids": (prompt, completion),
        "data": row,
    }
    sent = engine.requests[0].sampling
    assert sorted({TOKENIZER.eos_token_id, TOKENIZER.pad_token_id, 50}) == sent.stop_token_ids
    assert (sent.n_samples, sent.max_new_tokens) == (1, 7)


def test_a_rejected_prompt_keeps_its_place_and_nothing_is_sampled_for_it(start):
    feed = PromptFeed(PromptLoader([{"number": 1}] * 12, 4, shuffle=False))
    executor, batches = start(4, 4, holds_rejected=True), []
    workflow = Rewarded(lambda prompt_id, _: None if prompt_id % 2 == 0 else 1.0)
    for version in range(3):
        executor.engine.set_version(version)
        executor.set_version(version)
        batches.append(executor.prepare_batch(feed, workflow, timeout_s=20)["prompt_id"].tolist())
    assert batches == [[1, 3], [5, 7], [9, 11]]
    assert feed.take()[0] == 12
    assert (executor.control.accepted, executor.control.rejected, executor.control.held) == (6, 6, 6)


def test_episodes_are_written_with_their_names_reward_and_text(start, tmp_path):
    rewarded = Rewarded(lambda prompt_id, sample_id: 0.25 * prompt_id)
    workflow = WrittenWorkflow(rewarded, tmp_path, TOKENIZER)
    batch = start().rollout_batch([(3, {"number": 5}), (7, {"number": 6})], workflow, n_samples=2)
    lines = [json.loads(line) for line in (tmp_path / "0/7.jsonl").read_text().splitlines()]
    assert sorted(line["sample_id"] for line in lines) == [0, 1]
    assert {(line["prompt_id"], line["reward"], line["prompt"]) for line in lines} == {(7, 1.75, TOKENIZER.decode([6]))}  # fmt: skip
    row = batch["prompt_id"].tolist().index(7)
    sampled = batch["input_ids"][row][batch["loss_mask"][row].bool()]
    assert lines[0]["completion"] == TOKENIZER.decode(sampled)
    assert lines[0]["num_sampled"] == len(sampled)
    assert lines[0]["finish_reason"] in ("stop", "length")
