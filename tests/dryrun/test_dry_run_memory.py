"""Options that move memory on a plan, and its estimate against what a micro-batch allocates."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from areal_core.config import DatasetConfig, GRPOConfig, OptimizerConfig, PPOActorConfig, TrainEngineConfig
from areal_core.config.allocation import Parallel, parse_allocation
from areal_core.data import get_dataset
from areal_core.engine.memory_plan import Model, Shape, estimate_memory, read_shape, state_parts
from areal_core.engine.model import load_model, load_tokenizer_at
from areal_core.testing.tiny_vision import make_tiny_vision_model
from areal_core.trainer.build import build_engine
from areal_debug.dry_run.plan import longest_row
from tests.engine.options_program import make_options

SHAPE = Shape(1000, 0, 200, 400, 2, 8, 16, 100, 64)


def sizes(options: TrainEngineConfig, on_host: bool) -> dict[str, int]:
    parts = state_parts(Model("actor", options, trains=True), SHAPE, Parallel(data=2))
    return {
        part.name.removeprefix("actor: "): part.size_bytes for part in parts if part.is_on_host == on_host
    }


ALL = {"masters": 2000, "optimizer": 4000, "gradients": 2000}
WITHOUT_STATES = {"masters": 2000, "gradients": 2000}


@pytest.mark.parametrize(
    ("changes", "on_device", "on_host"),
    [
        ({}, ALL, {}),
        ({"optimizer.offload": True}, WITHOUT_STATES, {"optimizer": 4000}),
        ({"fsdp.per_layer_optim_step": True}, WITHOUT_STATES, {"optimizer": 4000}),
        ({"fsdp.offload_params": True}, {}, ALL),
        ({"optimizer.type": "adam_bf16"}, ALL | {"optimizer": 3000}, {}),
        ({"fsdp.shard_size": 1}, {name: 2 * size for name, size in ALL.items()}, {}),
        ({"fsdp.sync_every_micro_batch": False}, ALL | {"summed gradients": 4000}, {}),
    ],
)
def test_states_are_in_the_memory_that_options_choose(changes, on_device, on_host):
    options = make_options("", changes)
    assert sizes(options, on_host=False) == on_device
    assert sizes(options, on_host=True) == on_host


def test_a_frozen_vision_tower_has_weights_and_neither_gradients_nor_states(tmp_path):
    folder = str(make_tiny_vision_model(tmp_path, "qwen2_5_vl"))
    model = load_model(folder)
    options = TrainEngineConfig(path=folder, optimizer=OptimizerConfig(), freeze_vision_tower=True)
    shape = read_shape(Model("actor", options, trains=True))
    parts = state_parts(Model("actor", options, trains=True), shape, Parallel())
    total = sum(parameter.numel() for parameter in model.parameters())
    tower = sum(parameter.numel() for parameter in model.model.visual.parameters())
    assert (shape.num_parameters, shape.tower) == (total, tower)
    assert [part.size_bytes for part in parts] == [4 * total, 8 * (total - tower), 4 * (total - tower)]


def config_of(model, dtype: str, num_samples: int, max_new_tokens: int) -> GRPOConfig:
    config = GRPOConfig(experiment_name="a", trial_name="b", device="cpu")
    config.actor = PPOActorConfig(
        path=str(model), dtype=dtype, optimizer=OptimizerConfig(), ppo_n_minibatches=1
    )
    config.train_dataset = DatasetConfig(path="arithmetic", type="rl", batch_size=8)
    config.gconfig.n_samples, config.gconfig.max_new_tokens = num_samples, max_new_tokens
    return config


def peak_bytes(call) -> int:
    """Return the largest sum of tensor memory that is allocated during a call, above its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        call()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in measured.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    held = peak = 0
    for _, size in changes:
        held += size
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize(
    ("dtype", "max_new_tokens"),
    [
        ("float32", 8),
        *(pytest.param(dtype, 256, marks=pytest.mark.long) for dtype in ("float32", "bfloat16")),
    ],
)
def test_the_estimate_is_within_a_factor_of_two_of_the_measured_peak(
    tiny_model, ranks, dtype, max_new_tokens
):
    config = config_of(tiny_model, dtype, 4, max_new_tokens)
    row = longest_row(config)
    [prompt] = get_dataset(config.train_dataset)[:1]
    tokenizer = load_tokenizer_at(str(tiny_model))
    assert row == len(
        tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True)["input_ids"]
    )

    engine = build_engine(config.actor, ranks, total_steps=1)
    shape = (8 * 4, row + max_new_tokens)
    batch = {
        "input_ids": torch.randint(3, 100, shape, dtype=torch.int32),
        "attention_mask": torch.ones(shape, dtype=torch.bool),
        "loss_mask": torch.ones(shape, dtype=torch.int32),
    }

    def step() -> None:
        engine.train_batch(
            batch, lambda logprobs, entropy, inputs: -logprobs.sum(), lambda batch: torch.tensor(1.0)
        )

    step()  # optimizer states and gradients exist from here on
    measured = peak_bytes(step)
    memory = estimate_memory(config, parse_allocation("embedded|fsdp:d1"), row)
    parts = {part.name: part.size_bytes for part in memory.rank}
    estimated = parts["working copy"] + parts["activations"] + parts["logits"]
    assert 0.5 < estimated / measured < 2
