"""Couplings of an engine's options for memory placement and kernels."""

from collections.abc import Iterator

from areal_core.config.engine import TrainEngineConfig
from areal_core.config.experiment import BaseExperimentConfig


def liger_has_a_gpu(config: BaseExperimentConfig) -> Iterator[str]:
    for name, engine in engines_of(config):
        if engine.use_liger and config.device == "cpu":
            yield f"{name}.use_liger is True and device is 'cpu'; Liger's kernels need a GPU: set it to false"


def compiled_layers_are_not_split(config: BaseExperimentConfig) -> Iterator[str]:
    train = config.allocation.train
    for name, engine in engines_of(config):
        if engine.fsdp.compile and train is not None and train.tensor > 1:
            yield (
                f"{name}.fsdp.compile is True and the allocation trains on t{train.tensor}; "
                "tensor-parallel layers are not compiled: set the first to false, or use t1"
            )


def without_effect_on_a_cpu(config: BaseExperimentConfig) -> Iterator[str]:
    """Yield one sentence for each option that offloads to host memory on a CPU run."""
    if config.device != "cpu":
        return
    for name, engine in engines_of(config):
        options = {
            "offload": engine.offload,
            "fsdp.offload_params": engine.fsdp.offload_params,
            "fsdp.per_layer_optim_step": engine.fsdp.per_layer_optim_step,
            "optimizer.offload": engine.optimizer is not None and engine.optimizer.offload,
        }
        for option, is_on in options.items():
            if is_on:
                yield f"{name}.{option} is True and device is 'cpu': everything is in host memory already"


def engines_of(config: BaseExperimentConfig) -> Iterator[tuple[str, TrainEngineConfig]]:
    """Yield the name and the section of each model."""
    for name, section in vars(config).items():
        if isinstance(section, TrainEngineConfig):
            yield name, section


ENGINE_COUPLINGS = (liger_has_a_gpu, compiled_layers_are_not_split)
