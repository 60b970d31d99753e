"""Errors that several packages raise: in the description of a run, and in starting its processes.

ValueError
├── ConfigError          an option: unknown, of the wrong type, missing, or inconsistent with another one
│   └── AllocationError  the allocation string
├── DatasetError         a data file, a row, or a loader that cannot fill a batch
├── ImageError           a picture that is damaged, too large, or given in an unknown form
└── RewardError          a reward function that cannot be found, fails, hangs, or returns no finite number
RuntimeError
├── ServerFailed         an inference server ended, or was not ready in time; the message has its last log lines
└── NonFiniteError       a weight, a loss, a gradient or what they are computed from is not finite
"""


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


class ServerFailed(RuntimeError):
    """An inference server ended, or was not ready in time; the message has its last log lines."""


class NonFiniteError(RuntimeError):
    """A weight, a loss, a gradient or what they are computed from is not finite."""
