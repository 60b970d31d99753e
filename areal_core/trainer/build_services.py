"""Builders of the logging services of `stats_logger`, besides the stats.jsonl of every run."""

from pathlib import Path
from typing import Any

from areal_core.config import BaseExperimentConfig, config_to_dict, without_keys
from areal_core.telemetry import TensorBoardLogger, TrackioLogger, WandbLogger
from areal_core.telemetry.loggers import Logger, without_none

UNSAFE_IN_ID = str.maketrans("/\\#?%:", "------")  # Weights & Biases refuses ids with these


def build_services(config: BaseExperimentConfig, folder: Path, first_step: int = 0) -> list[Logger]:
    """Build one logger per service; local files are stored under `folder`.

    Args:
        first_step: above 0, the services continue their earlier runs there.

    Raises:
        ConfigError: the package of a configured service is not installed.
    """
    options, built = config.stats_logger, list[Logger]()
    if options.tensorboard.path:
        built.append(TensorBoardLogger(options.tensorboard.path, first_step))
    if options.wandb.mode != "disabled":
        built.append(WandbLogger(dir=str(folder), **wandb_arguments(config)))
    if options.trackio.mode != "disabled":
        trackio = options.trackio
        built.append(
            TrackioLogger(
                trackio.mode,
                trackio.space_id,
                project=trackio.project or config.experiment_name,
                name=trackio.name or config.trial_name,
                config=without_keys(config_to_dict(config)),
            )
        )
    return built


def wandb_arguments(config: BaseExperimentConfig) -> dict[str, Any]:
    """Return the arguments of `wandb.init`.

    The id is that of experiment and trial, so that a continued run stays one run there.
    """
    options = config.stats_logger.wandb
    trial = f"{config.experiment_name}_{config.trial_name}"
    account = without_none(
        {"base_url": options.wandb_base_url or None, "api_key": options.wandb_api_key or None}
    )
    return {
        "mode": options.mode,
        "entity": options.entity,
        "project": options.project or config.experiment_name,
        "name": options.name or config.trial_name,
        "id": "_".join([trial, *([options.id_suffix] if options.id_suffix else [])]).translate(UNSAFE_IN_ID),
        "group": options.group or trial,
        "job_type": options.job_type,
        "notes": options.notes,
        "tags": options.tags,
        "config": without_keys(options.config or config_to_dict(config)),
        "settings": account or None,
    }
