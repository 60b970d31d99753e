"""A run that only evaluates: one model after another, on the embedded engine and on servers."""

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from areal_core.config import PPOConfig, config_from_dict
from areal_core.config.checks import check_config
from areal_core.config.experiment import RewardModelConfig
from areal_core.environment import ADDRESSES_VARIABLE
from areal_core.paths import run_folder
from areal_core.rollout.http_thread import HttpThread
from areal_core.rollout.types import ModelRequest, sampling_from
from areal_core.rollout.workflow import episode_tensors, prompt_tokens
from areal_core.servers.server import Server
from areal_core.servers.sglang import SGLANG
from areal_core.servers.wire import weight_version
from areal_core.testing.embedded_server import EmbeddedServer
from areal_core.trainer import build
from areal_core.trainer.rl import PPOTrainer

TINY = Path(__file__).parents[1] / "debug" / "tiny.yaml"
ROWS = [{"messages": [{"role": "user", "content": f"{n}?"}], "wanted": n} for n in range(5)]


class FirstToken:
    """Ask once; the reward is 1 if the first token is even. A row of 4 is left out."""

    def __init__(self, gconfig, tokenizer):
        self.sampling, self.tokenizer = sampling_from(gconfig, n_samples=1), tokenizer

    async def arun_episode(self, engine, data):
        if data["wanted"] == 4:
            return None
        prompt = prompt_tokens(self.tokenizer, data["messages"], {})
        response = await engine.agenerate(ModelRequest(input_ids=prompt, sampling=self.sampling))
        return episode_tensors(response, float(response.output_tokens[0] % 2 == 0))


@pytest.fixture(scope="module")
def model(random_model, tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="module")
def other_model(random_model, tmp_path_factory):
    return random_model(tmp_path_factory.mktemp("other"), 1)


def config_of(folder: Path, model: Path, allocation: str, **evaluator) -> PPOConfig:
    tree = yaml.safe_load(TINY.read_text())
    del tree["actor"]["optimizer"], tree["actor"]["reward_norm"], tree["actor"]["adv_norm"]
    tree |= {"allocation_mode": allocation, "cluster": {"fileroot": str(folder)}, "evaluator": evaluator}
    tree["cluster"]["name_resolve"] = {"nfs_record_root": str(folder / "names")}
    tree["actor"]["path"] = str(model)
    tree["gconfig"] = {"n_samples": 2, "max_new_tokens": 6, "greedy": True}
    return config_from_dict(tree, PPOConfig)


def evaluate(config: PPOConfig, train=(), valid=ROWS) -> tuple[dict, list[list[dict]], list[tuple]]:
    """Return the summary, the samples of each model, and the events that observers got."""
    events = []
    watch = lambda trainer: lambda event, **facts: events.append((event, facts))  # noqa: E731
    with PPOTrainer(config, train, valid, observers=[watch], print_steps=False) as trainer:
        trainer.train(workflow=FirstToken)
    folder = run_folder(config, "logs") / "evaluation"
    summary = json.loads((folder / "evaluation.json").read_text())
    samples = [
        [json.loads(line) for line in (folder / of_model["file"]).read_text().splitlines()]
        for of_model in summary["models"]
    ]
    return summary, samples, events


def test_every_model_answers_the_same_rows_and_nothing_is_built_to_train(
    model, other_model, tmp_path, monkeypatch
):
    monkeypatch.setattr(build, "build_engine", None)
    models = [str(model), str(other_model), str(model)]
    config = config_of(tmp_path, model, "embedded|eval", checkpoints=models)
    assert check_config(config) == [
        "checked for rollouts alone: options of training may be missing and are not compared"
    ]
    summary, samples, events = evaluate(config)
    assert (summary["rows"], summary["num_rows"], summary["n_samples"]) == ("valid", 5, 2)
    assert [item["path"] for item in summary["models"]] == models
    names = [(prompt, sample) for prompt in range(4) for sample in range(2)]  # row 4 is left out
    assert [[(line["prompt_id"], line["sample_id"]) for line in lines] for lines in samples] == [names] * 3
    completions = [[line["completion"] for line in lines] for lines in samples]
    assert completions[0] == completions[2]  # greedy
    assert completions[0] != completions[1]
    assert samples[0][0]["prompt"] == "<|user|>0?<|end|><|assistant|>"
    assert samples[0][0]["num_sampled"] == 6

    assert [event for event, _ in events] == ["start", *["batch", "step"] * 3, "end"]
    batches = [facts["batch"] for event, facts in events if event == "batch"]
    assert [facts["step"] for event, facts in events if event == "batch"] == [0, 1, 2]
    assert [batch["prompt_id"].tolist() for batch in batches] == [
        [prompt + 5 * step for prompt, _ in names] for step in range(3)
    ]
    rewards = [[line["reward"] for line in lines] for lines in samples]
    assert [batch["rewards"].tolist() for batch in batches] == rewards
    stats = [facts["stats"]["eval-rollout/reward"] for event, facts in events if event == "step"]
    assert stats == pytest.approx([sum(of_model) / 8 for of_model in rewards])


def test_servers_load_each_model_and_keep_version_0_for_their_own(model, other_model, tmp_path, monkeypatch):
    expected = evaluate(
        config_of(tmp_path, model, "embedded|eval", checkpoints=[str(model), str(other_model)])
    )[1]
    engine = EmbeddedServer(str(model), dtype=torch.float32)
    http = HttpThread(engine.application(), "server")
    server = Server(f"127.0.0.1:{http.port}")
    monkeypatch.setitem(os.environ, ADDRESSES_VARIABLE, server.address)
    try:
        served = config_of(tmp_path, model, "sglang:d1+eval")
        alone, [lines], _ = evaluate(served)
        assert (alone["models"][0]["version"], weight_version(server, SGLANG)) == (0, "default")
        served.evaluator.checkpoints = [str(other_model), str(model)]
        both, [of_other, of_tiny], events = evaluate(served)
        assert [item["version"] for item in both["models"]] == [1, 2]
        assert weight_version(server, SGLANG) == "2"
        versions = [
            set(facts["batch"]["versions"][facts["batch"]["loss_mask"] == 1].tolist())
            for event, facts in events
            if event == "batch"
        ]
        assert versions == [{1}, {2}]
        assert lines == of_tiny == expected[0]
        assert of_other == expected[1]
        served.evaluator.checkpoints = None  # the servers' own model again, which they do not hold now
        _, [again], _ = evaluate(served)
        assert again == of_tiny
    finally:
        http.close()
        engine.sampler.close()


def test_a_reward_model_scores_samples_beside_the_verifier(model, tmp_path):
    torch.manual_seed(0)
    scorer = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    scorer.save_pretrained(tmp_path / "scorer")
    scorer.config.pad_token_id = None  # one row at a time: its last token
    without = evaluate(config_of(tmp_path, model, "embedded|eval"))[1][0]
    config = config_of(tmp_path, model, "embedded|eval")
    config.reward_model = RewardModelConfig(path=str(tmp_path / "scorer"), dtype="float32", weight=5.0)
    summary, [lines], events = evaluate(config)
    assert summary["reward_model"] == str(tmp_path / "scorer")
    [batch] = [facts["batch"] for event, facts in events if event == "batch"]
    rows = [
        ids[mask][None] for ids, mask in zip(batch["input_ids"].long(), batch["attention_mask"], strict=True)
    ]
    with torch.no_grad():
        expected = [scorer(row).logits.item() for row in rows]
    assert [line["score"] for line in lines] == pytest.approx(expected, abs=1e-5)
    assert len({line["score"] for line in lines}) > 1
    assert [{name: line[name] for name in line if name != "score"} for line in lines] == without
    assert batch["rewards"].tolist() == [line["reward"] for line in without]  # the verifier's alone
    [stats] = [facts["stats"] for event, facts in events if event == "step"]
    assert stats["eval-rollout/score"] == pytest.approx(sum(expected) / len(expected), abs=1e-5)


def test_a_lora_adapter_is_merged_into_the_model_of_the_config(model, tmp_path):
    peft = pytest.importorskip("peft")

    def adapted():
        torch.manual_seed(0)
        options = peft.LoraConfig(r=4, lora_alpha=64, init_lora_weights=False, target_modules=["q_proj"])
        return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), options)

    adapted().save_pretrained(tmp_path / "adapter")
    adapted().merge_and_unload().save_pretrained(tmp_path / "merged")
    models = [str(tmp_path / "adapter"), str(tmp_path / "merged"), str(model)]
    config = config_of(tmp_path, model, "embedded|eval", checkpoints=models)
    _, [of_adapter, of_merged, of_base], _ = evaluate(config)
    assert of_adapter == of_merged
    assert of_adapter != of_base
    assert not (run_folder(config, "checkpoints") / "merged-0").exists()
