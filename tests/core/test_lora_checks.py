"""Options of adapters that must agree: one sentence each, with both names and the fix."""

import dataclasses

import pytest

from areal_core.config import DPOConfig, PPOConfig, TrainEngineConfig, config_from_dict
from areal_core.config.checks import check_config
from areal_core.config.servers import serves_adapters
from areal_core.errors import ConfigError

DATA = {"path": "arithmetic", "type": "rl", "batch_size": 8}
SERVED = {
    "experiment_name": "e",
    "trial_name": "t",
    "allocation_mode": "sglang:d1+fsdp:d1",
    "train_dataset": DATA,
    "gconfig": {"n_samples": 4, "max_new_tokens": 16},
    "rollout": {"use_lora": True, "consumer_batch_size": 8},
    "sglang": {"enable_lora": True, "max_lora_rank": 8, "context_length": 4096},
    "actor": {
        "path": "m",
        "kl_ctl": 0.0,
        "optimizer": {"lr": 1e-3},
        "use_lora": True,
        "lora_rank": 8,
        "weight_update_mode": "disk",
    },
}


def served(**changes: dict) -> PPOConfig:
    """A valid config of a run that sends adapters, with the options of some sections changed."""
    tree = {name: value | changes[name] if name in changes else value for name, value in SERVED.items()}
    return config_from_dict(
        tree | {name: value for name, value in changes.items() if name not in tree}, PPOConfig
    )


def test_a_run_that_sends_adapters_to_its_servers_is_sound():
    assert check_config(served()) == []
    assert serves_adapters(served())


def test_servers_get_merged_weights_unless_adapters_are_requested():
    merged = served(
        rollout={"use_lora": False}, sglang={"enable_lora": None}, actor={"weight_update_mode": "xccl"}
    )
    assert check_config(merged) == []
    assert not serves_adapters(merged)
    requested_by_the_server_alone = served(rollout={"use_lora": False})
    assert serves_adapters(requested_by_the_server_alone)
    embedded = dataclasses.replace(served(), allocation_mode="embedded|fsdp:d1")
    assert not serves_adapters(embedded)


@pytest.mark.parametrize(
    ("changes", "error_text"),
    [
        ({"actor": {"lora_rank": 0}}, "actor.lora_rank is 0 and actor.lora_alpha is 16; expected 1 or more"),
        ({"actor": {"use_lora": False}}, "rollout.use_lora is True and actor.use_lora is False"),
        ({"actor": {"weight_update_mode": "xccl"}}, "which they load only from a folder: set it to disk"),
        ({"actor": {"lora_rank": 16}}, "sglang.max_lora_rank is 8 and actor.lora_rank is 16"),
        ({"sglang": {"max_lora_rank": None}}, "sglang.max_lora_rank is None and actor.lora_rank is 8"),
        ({"sglang": {"enable_lora": None}}, "the servers would refuse adapters: set it to true"),
        (
            {"sglang": {"max_loaded_loras": 1}},
            "a weight update needs 2: the new adapter and the previous one",
        ),
        (
            {
                "sglang": {"lora_target_modules": ["q_proj"]},
                "actor": {"target_modules": ["q_proj", "v_proj"]},
            },
            "sglang.lora_target_modules is ['q_proj'] and actor.target_modules is ['q_proj', 'v_proj']",
        ),
        (
            {"rollout": {"pause_mode": "in_place"}},
            "only an aborted one uses the new adapter: set it to abort",
        ),
        ({"gconfig": {"lora_name": ""}}, "gconfig.lora_name is empty"),
        ({"ref": {"path": "m", "use_lora": True}}, "ref.use_lora is True; the model is not trained"),
        ({"actor": {"peft_type": "ia3"}}, "actor.peft_type is 'ia3'; expected one of 'lora'"),
    ],
)
def test_options_that_disagree_are_reported_in_one_sentence(changes, error_text):
    with pytest.raises(ConfigError) as error:
        check_config(served(**changes))
    assert error_text in str(error.value)


def test_a_reference_of_pairs_has_no_adapter_either():
    config = config_from_dict(
        {
            "experiment_name": "e",
            "trial_name": "t",
            "allocation_mode": "fsdp:d1",
            "train_dataset": DATA | {"type": "dpo"},
            "actor": {"path": "m", "optimizer": {"lr": 1e-3}, "use_lora": True},
        },
        DPOConfig,
    )
    check_config(config)
    config.ref = TrainEngineConfig(path="m", use_lora=True)
    with pytest.raises(ConfigError, match=r"ref\.use_lora is True; the model is not trained"):
        check_config(config)
