"""What the engine says when a user's input cannot work.

```
ValueError
`-- EngineError
    |-- ModelError         a model that cannot be loaded or sharded
    |-- RanksError         ranks that cannot share the work as asked
    |-- DeterminismError   deterministic mode without what it needs
    `-- CheckpointError    a checkpoint that is missing, damaged or of another model
        `-- CheckpointNotWritten   a full disk, or one that fails: trying again may help
```
"""


class EngineError(ValueError):
    """Anything that a user can mend."""


class ModelError(EngineError):
    """A model that cannot be loaded or sharded."""


class RanksError(EngineError):
    """Ranks that cannot share the work as asked: too few of them, or a model that does not divide among them."""


class DeterminismError(EngineError):
    """Deterministic mode was asked for, and something it needs is missing or came too late."""


class CheckpointError(EngineError):
    """A checkpoint that is missing, damaged or of another model."""


class CheckpointNotWritten(CheckpointError):
    """The disk was full, or failed: no mistake of the user, and trying again may help."""
