import pytest

from areal_core.config import OptimizerConfig, SFTConfig, TrainEngineConfig
from areal_core.config.checks import check_config
from areal_core.config.train_engine import FSDPEngineConfig
from areal_core.errors import ConfigError


def sft(allocation: str = "fsdp:d2", **engine: object) -> SFTConfig:
    config = SFTConfig(experiment_name="a", trial_name="b", allocation_mode=allocation)
    config.actor = TrainEngineConfig(path="model", optimizer=OptimizerConfig(), **engine)
    config.train_dataset.path, config.train_dataset.type, config.train_dataset.batch_size = "data", "sft", 4
    return config


def test_kernels_for_a_gpu_are_refused_on_a_cpu():
    config = sft(use_liger=True)
    assert check_config(config) == []  # "auto": there may be a GPU
    config.device = "cpu"
    with pytest.raises(ConfigError, match=r"actor.use_liger is True and device is 'cpu'"):
        check_config(config)


def test_layers_that_are_split_are_not_compiled():
    with pytest.raises(ConfigError, match=r"actor.fsdp.compile is True and the allocation fsdp:d1t2"):
        check_config(sft("fsdp:d1t2", fsdp=FSDPEngineConfig(compile=True)))


def test_moving_to_host_memory_where_there_is_no_device_memory_is_only_noted():
    config = sft(offload=True, fsdp=FSDPEngineConfig(offload_params=True, per_layer_optim_step=True))
    config.actor.optimizer.offload = True
    assert check_config(config) == []
    config.device = "cpu"
    notes = check_config(config)
    assert [note.partition(" is ")[0] for note in notes] == [
        "actor.offload",
        "actor.fsdp.offload_params",
        "actor.fsdp.per_layer_optim_step",
        "actor.optimizer.offload",
    ]
    assert notes[0].endswith("and device is 'cpu': everything is in host memory already")


def test_enable_offload_speaks_for_every_model():
    config = SFTConfig(experiment_name="a", trial_name="b", enable_offload=True)
    assert config.actor.offload


def test_float16_is_refused_where_it_is_trained_in():
    with pytest.raises(ConfigError, match=r"^actor.dtype is 'float16'; .*: use bfloat16 or float32$"):
        check_config(sft(dtype="float16"))
    assert check_config(sft(dtype="bfloat16")) == []


@pytest.mark.parametrize(("allocation", "size", "trains"), [("d4", 3, "d4"), ("d4t2", 2, "d4t2")])
def test_copies_of_the_weights_that_do_not_divide_the_ranks_are_refused(allocation, size, trains):
    config = sft(f"fsdp:{allocation}", fsdp=FSDPEngineConfig(shard_size=size))
    with pytest.raises(ConfigError, match=rf"shard_size is {size} and the allocation fsdp:{trains}; "):
        check_config(config)
    config = sft("fsdp:d4", fsdp=FSDPEngineConfig(shard_size=2))
    assert check_config(config) == []
