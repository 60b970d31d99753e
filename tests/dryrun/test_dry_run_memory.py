"""The effect of options that move memory on a plan."""

import dataclasses

import pytest

from areal_core.config import OptimizerConfig, TrainEngineConfig
from areal_core.config.allocation import Parallel
from areal_core.config.train_engine import FSDPEngineConfig
from areal_core.engine.memory_plan import Model, Shape, read_shape, state_parts
from areal_core.engine.model import load_model
from areal_core.testing.tiny_vision import make_tiny_vision_model

SHAPE = Shape(1000, 0, 200, 400, 2, 8, 16, 100, 64)
PLAIN = TrainEngineConfig(optimizer=OptimizerConfig())


def sizes(options: TrainEngineConfig, on_host: bool) -> dict[str, int]:
    parts = state_parts(Model("actor", options, trains=True), SHAPE, Parallel(data=2))
    return {
        part.name.removeprefix("actor: "): part.size_bytes for part in parts if part.is_on_host == on_host
    }


@pytest.mark.parametrize(
    ("options", "on_device", "on_host"),
    [
        (PLAIN, {"masters": 2000, "optimizer": 4000, "gradients": 2000}, {}),
        (
            dataclasses.replace(PLAIN, optimizer=OptimizerConfig(offload=True)),
            {"masters": 2000, "gradients": 2000},
            {"optimizer": 4000},
        ),
        (
            dataclasses.replace(PLAIN, fsdp=FSDPEngineConfig(per_layer_optim_step=True)),
            {"masters": 2000, "gradients": 2000},
            {"optimizer": 4000},
        ),
        (
            dataclasses.replace(PLAIN, fsdp=FSDPEngineConfig(offload_params=True)),
            {},
            {"masters": 2000, "optimizer": 4000, "gradients": 2000},
        ),
        (
            dataclasses.replace(PLAIN, optimizer=OptimizerConfig(type="adam_bf16")),
            {"masters": 2000, "optimizer": 3000, "gradients": 2000},
            {},
        ),
        (
            dataclasses.replace(PLAIN, fsdp=FSDPEngineConfig(shard_size=1)),
            {"masters": 4000, "optimizer": 8000, "gradients": 4000},
            {},
        ),
        (
            dataclasses.replace(PLAIN, fsdp=FSDPEngineConfig(sync_every_micro_batch=False)),
            {"masters": 2000, "optimizer": 4000, "gradients": 2000, "summed gradients": 4000},
            {},
        ),
    ],
)
def test_states_are_in_the_memory_that_options_choose(options, on_device, on_host):
    assert sizes(options, on_host=False) == on_device
    assert sizes(options, on_host=True) == on_host


def test_a_frozen_vision_tower_has_weights_and_neither_gradients_nor_states(tmp_path):
    folder = str(make_tiny_vision_model(tmp_path, "qwen2_5_vl"))
    model = load_model(folder)
    options = dataclasses.replace(PLAIN, path=folder, freeze_vision_tower=True)
    shape = read_shape(Model("actor", options, trains=True))
    parts = state_parts(Model("actor", options, trains=True), shape, Parallel())
    total = sum(parameter.numel() for parameter in model.parameters())
    tower = sum(parameter.numel() for parameter in model.model.visual.parameters())
    assert (shape.num_parameters, shape.tower) == (total, tower)
    assert [part.size_bytes for part in parts] == [4 * total, 8 * (total - tower), 4 * (total - tower)]
