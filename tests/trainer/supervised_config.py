"""Configs of small supervised runs."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from areal_core.config import DPOConfig, RWConfig, SFTConfig
from areal_core.config.train_engine import OptimizerConfig
from areal_core.trainer.dpo import DPOTrainer
from areal_core.trainer.reward_model import RWTrainer
from areal_core.trainer.sft import SFTTrainer

METHODS = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer), "rw": (RWConfig, RWTrainer)}


def make_config(
    method: str,
    folder: Path | str,
    model: Path | str,
    batch_size: int,
    options: Mapping[str, object] = MappingProxyType({}),
) -> SFTConfig | DPOConfig | RWConfig:
    """Return a config of one rank in float32 with its files under `folder`.

    `options` are by their dotted names.
    """
    config = METHODS[method][0](experiment_name="e", trial_name="t", device="cpu", allocation_mode="fsdp:d1")
    config.cluster.fileroot = str(folder)
    config.actor.path, config.actor.dtype = str(model), "float32"
    config.actor.optimizer = OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.0)
    config.train_dataset.path, config.train_dataset.type = "x", method
    config.train_dataset.batch_size = batch_size
    for name, value in options.items():
        section, (*sections, option) = config, name.split(".")
        for part in sections:
            section = getattr(section, part)
        assert hasattr(section, option), name
        setattr(section, option, value)
    return config
