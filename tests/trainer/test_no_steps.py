"""A run that would have no steps fails before it starts, with every method, and reports why."""

import pytest

from areal_core.config import DPOConfig, GRPOConfig, RWConfig, SFTConfig
from areal_core.errors import ConfigError
from areal_core.trainer.dpo import DPOTrainer
from areal_core.trainer.reward_model import RWTrainer
from areal_core.trainer.rl import PPOTrainer
from areal_core.trainer.sft import SFTTrainer

METHODS = {GRPOConfig: PPOTrainer, SFTConfig: SFTTrainer, RWConfig: RWTrainer, DPOConfig: DPOTrainer}


def config_of(method):
    config = method(experiment_name="e", trial_name="t")
    config.train_dataset.batch_size = 4
    return config


@pytest.mark.parametrize("method", METHODS)
def test_fewer_rows_than_a_batch(method):
    with pytest.raises(ConfigError, match="0 steps: the dataset has 3 rows and train_dataset"):
        METHODS[method](config_of(method), [{}] * 3)


@pytest.mark.parametrize(("method", "num_seqs"), [(GRPOConfig, 8), (SFTConfig, 4)])
def test_fewer_sequences_than_a_step_has(method, num_seqs):
    config = config_of(method)
    config.total_train_n_seqs = num_seqs - 1
    if method is GRPOConfig:
        config.gconfig.n_samples = 2
    with pytest.raises(ConfigError, match=f"n_seqs is {num_seqs - 1} and a step has {num_seqs} sequences"):
        METHODS[method](config, [{}] * 9)
