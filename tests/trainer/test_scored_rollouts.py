"""Rewards of a reward model in PPO: against Transformers, recorded, served."""

import numpy as np
import pytest
import torch
from aiohttp import web

from areal_core.config import PPOConfig, load_expr_config
from areal_core.data import get_dataset
from areal_core.errors import ConfigError
from areal_core.paths import run_folder
from areal_core.reward import no_reward
from areal_core.rollout.http_thread import HttpThread
from areal_core.telemetry.loggers import read_stats
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import recorder_of
from recorder import Recording, RecordingOptions, open_record
from replayer.request import Request
from replayer.run import replay_and_compare
from tests.trainer import reward_model as program


@pytest.fixture(scope="module")
def scorer(tiny_model, tmp_path_factory):
    return program.make_reward_model(tiny_model, tmp_path_factory.mktemp("scorer"))


def test_scores_are_those_of_transformers_and_a_replay_has_them_without_the_model(
    tiny_model, scorer, tmp_path
):
    batches, record = [], tmp_path / "record"
    moved = tmp_path / "scorer"
    scorer.rename(moved)
    options = RecordingOptions(Recording("full"))
    observers = [program.keep_batches(batches), lambda trainer: recorder_of(trainer, record, options)]
    with program.build(tiny_model, moved, tmp_path / "run", observers=observers) as trainer:
        program.train(trainer)
        logs = run_folder(trainer.config, "logs")
    moved.rename(scorer)
    for batch in batches:
        pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
        scores = program.scores_of(scorer, [ids[mask].tolist() for ids, mask in pairs])
        assert scores.std() > 0.1
        torch.testing.assert_close(batch["scores.reward_model"], scores, rtol=1e-4, atol=1e-5)
        assert torch.equal(batch["rewards"], 0.5 * batch["scores.reward_model"])
    steps = read_stats(logs / "stats.jsonl")
    for step, batch in zip(steps, batches, strict=True):
        assert step["reward_model/score/avg"] == pytest.approx(float(batch["scores.reward_model"].mean()))
        assert step["ppo_actor/task_reward/avg"] == pytest.approx(float(batch["rewards"].mean()), rel=1e-5)
        assert step["rollout/reward"] == 0  # the workflow's own
        assert abs(step["eval-rollout/reward"]) > 0.01
    recorded = open_record(record)
    np.testing.assert_array_equal(
        recorded.step(1).batch(0)["scores.reward_model"], batches[1]["scores.reward_model"]
    )
    assert not moved.exists()  # the folder that the record names
    report = replay_and_compare(Request(str(record), 0, 1))
    assert report.identical, report.first_different


def test_a_served_reward_model_gives_the_rewards_of_the_workflow(tiny_model, tmp_path):
    async def classify(request):
        tokens = (await request.json())["input_ids"]
        return web.json_response({"embedding": [len(tokens) / 4]})

    application = web.Application()
    application.router.add_post("/classify", classify)
    server = HttpThread(application, "reward model")
    served = [
        f"scheduler.reward_model_path={tiny_model}",
        f"scheduler.reward_model_service_url=http://127.0.0.1:{server.port}/classify",
    ]
    batches = []
    options = [f"cluster.fileroot={tmp_path}", f"actor.path={tiny_model}", "total_train_steps=1", *served]
    config, _ = load_expr_config(["--config", str(program.TINY), *options], PPOConfig)
    rows = get_dataset(config.train_dataset)
    with PPOTrainer(config, rows, observers=[program.keep_batches(batches)], print_steps=False) as trainer:
        with pytest.raises(
            ConfigError, match="the script gives the workflow's reward_fn: remove one of them"
        ):
            trainer.train(workflow_kwargs={"reward_fn": no_reward})
        trainer.train()
    server.close()
    expected = []
    for ids, sampled in zip(batches[0]["input_ids"], batches[0]["loss_mask"].bool(), strict=True):
        completion = trainer.tokenizer.decode(ids[sampled], skip_special_tokens=True)
        expected.append((int(sampled.int().argmax()) + len(completion) + len(["<|end|>"])) / 4)
    assert batches[0]["rewards"].tolist() == expected
