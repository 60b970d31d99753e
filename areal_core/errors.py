"""Errors that several packages raise: in the description of a run, and in starting its processes.

ValueError
├── ConfigError          an option: unknown, of the wrong type, missing, or inconsistent with another one
│   └── AllocationError  the allocation string
├── DatasetError         a data file, a row, or a loader that cannot fill a batch
├── EngineError          what the engine cannot do and a user can fix
│   ├── ModelError         a model that cannot be loaded or sharded
│   ├── RanksError         ranks that cannot be divided as requested
│   ├── DeterminismError   deterministic mode without its requirements
│   └── CheckpointError    a checkpoint that is missing, damaged or of another model
│       └── CheckpointNotWritten   a full or failing disk: a retry may help
├── ImageError           a picture that is damaged, too large, or given in an unknown form
└── RewardError          a reward function that cannot be found or called, or hangs
    └── RewardFailed       it was called with a sample, and returned no finite number
RuntimeError
├── ServerFailed         an inference server ended, or was not ready in time; the message has its last log lines
├── NonFiniteError       a weight, a loss, a gradient or what they are computed from is not finite
└── MiscomputedError     a step was computed to other bits when it was computed again
"""

from pathlib import Path


class ConfigError(ValueError):
    """An option is unknown, of the wrong type, missing, or inconsistent with another one."""


class AllocationError(ConfigError):
    """The allocation string cannot be parsed, or requests something that is not supported."""


class DatasetError(ValueError):
    """A data file cannot be read, a row lacks a field, or a loader cannot fill a batch."""


class ImageError(ValueError):
    """A picture is damaged, too large, or given in an unknown form."""


class RewardError(ValueError):
    """A reward function cannot be found, raised, ran out of time, or returned no finite number."""


class RewardFailed(RewardError):
    """It was called with a sample of the run, and returned no finite number."""


class ServerFailed(RuntimeError):
    """An inference server ended, or was not ready in time; the message has its last log lines."""


class NonFiniteError(RuntimeError):
    """A weight, a loss, a gradient or what they are computed from is not finite."""


class MiscomputedError(RuntimeError):
    """A step was computed to other bits when it was computed again."""


class EngineError(ValueError):
    """An error that a user can fix."""


class ModelError(EngineError):
    """A model that cannot be loaded or sharded."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's text that is not empty, else its type."""
    return next(filter(str.strip, str(error).splitlines()), type(error).__name__).strip()


def load_failure(path: str, error: Exception) -> ModelError:
    where = "is not a folder here" if not Path(path).is_dir() else "could not be loaded by Transformers"
    return ModelError(f"cannot load the model: {path!r} {where} ({first_line(error)})")


class RanksError(EngineError):
    """Ranks that cannot be divided as requested, or a model that does not divide among them."""


class DeterminismError(EngineError):
    """Deterministic mode was requested, and a requirement is missing or was set too late."""


class CheckpointError(EngineError):
    """A checkpoint that is missing, damaged or of another model."""


class CheckpointNotWritten(CheckpointError):
    """The disk was full, or failed, or the checkpoint was cancelled: a retry may help."""
