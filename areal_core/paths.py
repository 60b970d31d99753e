"""Folders of the files of a run: `{fileroot}/{logs,checkpoints}/{user}/{experiment}/{trial}`."""

import getpass
from pathlib import Path

from areal_core.config import BaseExperimentConfig


def run_folder(config: BaseExperimentConfig, kind: str) -> Path:
    """Return the folder of a run for files of one kind: "logs" or "checkpoints"."""
    user = getpass.getuser()
    return Path(config.cluster.fileroot) / kind / user / config.experiment_name / config.trial_name


def record_folder(config: BaseExperimentConfig) -> Path:
    """Return the folder of the run's record: `debug.path`, or `record` next to its logs."""
    return Path(config.debug.path) if config.debug.path else run_folder(config, "logs") / "record"
