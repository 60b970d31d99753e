"""Errors of the engine that a user can fix.

```
ValueError
`-- EngineError
    |-- ModelError         a model that cannot be loaded or sharded
    |-- RanksError         ranks that cannot be divided as requested
    |-- DeterminismError   deterministic mode without its requirements
    `-- CheckpointError    a checkpoint that is missing, damaged or of another model
        `-- CheckpointNotWritten   a full or failing disk: a retry may help
```
"""


class EngineError(ValueError):
    """An error that a user can fix."""


class ModelError(EngineError):
    """A model that cannot be loaded or sharded."""


class RanksError(EngineError):
    """Ranks that cannot be divided as requested, or a model that does not divide among them."""


class DeterminismError(EngineError):
    """Deterministic mode was requested, and a requirement is missing or was set too late."""


class CheckpointError(EngineError):
    """A checkpoint that is missing, damaged or of another model."""


class CheckpointNotWritten(CheckpointError):
    """The disk was full, or failed, or the checkpoint was cancelled: a retry may help."""
