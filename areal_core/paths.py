"""Folders of the files of a run: `{fileroot}/{logs,checkpoints}/{user}/{experiment}/{trial}`."""

import getpass
from pathlib import Path

from areal_core.config import BaseExperimentConfig, DebugConfig
from areal_core.safety.private import keep_files_private, make_private


def run_folder(config: BaseExperimentConfig, kind: str) -> Path:
    """Return the folder of a run for files of one kind: "logs" or "checkpoints"."""
    user = getpass.getuser()
    return Path(config.cluster.fileroot) / kind / user / config.experiment_name / config.trial_name


def make_run_folders(config: BaseExperimentConfig) -> None:
    """Create the folders of a run below those of its user, which nobody else may own.

    This process and those that it starts create files for the user only from then on, or for the
    group too if `debug.group_readable` is set.

    Raises:
        ForeignOwner: the user's folder belongs to somebody else.
    """
    debug: DebugConfig = config.debug
    keep_files_private(debug.group_readable)
    for kind in ("logs", "checkpoints"):
        make_private(Path(config.cluster.fileroot) / kind / getpass.getuser(), debug.group_readable)


def record_folder(config: BaseExperimentConfig) -> Path:
    """Return the folder of the run's record: `debug.path`, or `record` next to its logs."""
    return Path(config.debug.path) if config.debug.path else run_folder(config, "logs") / "record"
