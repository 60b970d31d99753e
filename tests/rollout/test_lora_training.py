"""A training run with adapter updates: the server samples with the adapter that was trained."""

import os
from pathlib import Path

import pytest
import yaml

from areal_core.config import PPOConfig, config_from_dict
from areal_core.config.checks import check_config
from areal_core.data import get_dataset
from areal_core.environment import ADDRESSES_VARIABLE
from areal_core.servers.sglang import SGLANG
from areal_core.servers.wire import weight_version
from areal_core.testing.embedded_server import EmbeddedServer
from areal_core.trainer.rl import PPOTrainer

TINY = Path(__file__).parents[1] / "debug"
ADAPTER = {
    "use_lora": True,
    "lora_rank": 4,
    "lora_alpha": 64,  # so that three steps are seen
    "weight_update_mode": "disk",
    "prox_logp_method": "recompute",
}


def served_config(folder: Path, model: Path) -> PPOConfig:
    tree = yaml.safe_load((TINY / "tiny.yaml").read_text())
    tree |= {"allocation_mode": "sglang:d1+fsdp:d1", "cluster": {"fileroot": str(folder)}}
    tree["cluster"]["name_resolve"] = {"nfs_record_root": str(folder / "names")}
    tree["actor"] |= {"path": str(model), **ADAPTER}
    tree["rollout"] |= {"use_lora": True, "verify_weights_every": 1}
    tree["sglang"] = {"enable_lora": True, "max_lora_rank": 4, "context_length": 2048}
    return config_from_dict(tree, PPOConfig)


@pytest.mark.long
def test_the_server_samples_each_step_with_the_adapter_of_its_version(
    serve_application, tiny_model, tmp_path, monkeypatch
):
    engine = EmbeddedServer(str(tiny_model))
    server = serve_application(engine.application())
    monkeypatch.setitem(os.environ, ADDRESSES_VARIABLE, server.address)
    config = served_config(tmp_path, tiny_model)
    assert check_config(config) == []
    seen = []

    def watch(trainer):
        def observe(event, **facts):
            if event == "batch":
                sampled = facts["batch"]["loss_mask"].bool()
                seen.append({"versions": set(facts["batch"]["versions"][sampled].tolist())})
            if event == "advantages":
                inputs = facts["inputs"]
                trained = inputs["loss_mask"].bool()
                difference = (inputs["prox_logp"] - inputs["logprobs"])[trained]
                seen[-1]["difference"] = float(difference.abs().max())

        return observe

    with PPOTrainer(
        config, get_dataset(config.train_dataset), observers=[watch], print_steps=False
    ) as trainer:
        trainer.train(workflow_kwargs={"reward_fn": f"{TINY}/rewards.py:even_share"})
        merged = dict(trainer.actor.named_full_tensors())
    engine.sampler.close()
    assert [step["versions"] for step in seen] == [{0}, {1}, {2}]
    assert max(step["difference"] for step in seen) < 1e-5
    # A stale adapter would be visible: after three steps the weights differ from the first.
    assert weight_version(server, SGLANG) == "3"
    moved = {name: (merged[name] - tensor).abs().max() for name, tensor in engine._adapters.beneath.items()}
    assert min(moved.values()) > 1e-4
    served = dict(engine._replica.model.named_parameters())
    assert all((served[name] - merged[name]).abs().max() < 1e-6 for name in moved)
