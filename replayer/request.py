"""A replay's request, and the options that follow from it.

The options are those of the recorded run with overrides, without side effects on that run's files
and services. Imports no torch.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from areal_core.config import BaseExperimentConfig, PPOConfig, config_to_dict
from areal_core.config.checks import check_config
from areal_core.config.experiment import METHODS
from areal_core.config.loading import apply_override, built, literal, load_with_notes
from areal_core.config.names import sections_of
from areal_core.config.presets import option_name
from areal_core.safety.file_names import one_part
from areal_core.safety.private import fresh_folder
from recorder import Record
from replayer.carried import use_carried_models
from replayer.own_code import put_own_code

C = TypeVar("C", bound=BaseExperimentConfig)
Summation = Literal["", "fixed", "gloo"]


@dataclass(frozen=True)
class Request:
    """Steps `first` to `last` of a record, both included, and what is changed in their replay.

    Args:
        record: folder or archive.
        first: the first step to report; the replay starts at the nearest anchor before it.
        last: the last step.
        model: current path of the model that the run started from, if it has moved.
        settings: overrides of options, as `actor.eps_clip=0.3`.
        config: file with the options, for a record of another trainer.
        row_filter: expression that a row must satisfy to be trained on (`replayer.expression`).
        edit: Python file whose `edit(batch, step)` returns the batch to train on.
        reward: reward function by its import path, or `file.py:function`; recomputes every reward.
        record_to: folder for a new record of this replay.
        stop_at_difference: end at the first step that differs.
        locate: find the first stage that differs.
        virtual: compute the share of every recorded rank, on a divisor of their number, and sum
            over them in rank order ("fixed") or that of gloo ("gloo"); "": each process is a rank.
    """

    record: str
    first: int
    last: int
    model: str | None = None
    settings: tuple[str, ...] = ()
    row_filter: str | None = None
    edit: str | None = None
    reward: str | None = None
    record_to: str | None = None
    stop_at_difference: bool = False
    config: str | None = None
    locate: bool = True
    virtual: Summation = ""

    @property
    def edits(self) -> tuple[str, ...]:
        """Describe the changes of the recorded rows, a phrase each."""
        phrases = {
            "rows are filtered by": self.row_filter,
            "batches are edited by": self.edit,
            "rewards are computed by": self.reward,
        }
        return tuple(f"{phrase} {value}" for phrase, value in phrases.items() if value)


def replay_config(
    record: Record,
    model: str | None = None,
    settings: Sequence[str] = (),
    file: str | None = None,
    trains: bool = True,
) -> Any:
    """Return the options of the recorded run, changed to leave that run's files alone.

    They are of the config class of its method.

    Args:
        model: current path of the model that the run started from, if it has moved.
        settings: overrides, as `a.b=c`.
        file: config to use instead of the record's.
        trains: own code that computed the steps is needed.

    Raises:
        ReplayError: the user does not allow that code, or it is not there.
        ConfigError: the file cannot be read, an option is unknown, or options contradict each
            other.
    """
    cls = METHODS[record.header.method or "ppo"]
    if file is None:
        tree, source = literal(record.header.config), f"the config of {record.path}"
        if trains:
            put_own_code(tree, record, settings)
    else:
        tree, source = config_to_dict(load_with_notes(["--config", file], cls)[0]), file
    for setting in settings:
        apply_override(tree, setting, cls)
    config = built(tree, cls, source)
    if settings:
        check_config(config)
    use_carried_models(config, record)
    if model is not None:
        # The reference is the model that the run starts from, and the critic is initialised from
        # it with another head.
        for section in (getattr(config, "ref", None), getattr(config, "critic", None)):
            if section is not None and section.path == config.actor.path:
                section.path = model
        config.actor.path = model
        config.tokenizer_path = config.tokenizer_path and model
    if file is None:  # a record does not say where to write
        config.experiment_name = one_part(config.experiment_name)
        config.trial_name = one_part(config.trial_name)
        if not {option_name(setting) for setting in settings} & {"cluster", "cluster.fileroot"}:
            config.cluster.fileroot = fresh_folder()
    return without_side_effects(config)


def is_new_option_at_default(option: str, value: Any, recorded: Mapping[str, Any]) -> bool:
    """Return whether an option is absent from a record's config and `value` is its default.

    The default is the behaviour from before the option existed.
    """
    *sections, name = option.split(".")
    cls: type | None = PPOConfig
    for section in sections:
        recorded = recorded.get(section) or {}
        cls = sections_of(cls).get(section) if cls is not None else None
    fields = {field.name: field for field in dataclasses.fields(cls)} if cls is not None else {}
    if name in recorded or name not in fields:
        return False
    factory = fields[name].default_factory
    default = fields[name].default if factory is dataclasses.MISSING else factory()
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        default = dataclasses.asdict(default)
    return bool(value == default)


def without_side_effects(config: C) -> C:
    """Change the config: separate logs, no checkpoints, nothing sent to other services."""
    config.trial_name += "-replay"
    config.saver.freq_epochs = config.saver.freq_steps = config.saver.freq_secs = None
    config.saver.save_last = False
    config.recover.mode = "disabled"
    config.perf_tracer = None
    config.stats_logger.tensorboard.path = None
    for service in (config.stats_logger.wandb, config.stats_logger.swanlab, config.stats_logger.trackio):
        service.mode = "disabled"
    return config
