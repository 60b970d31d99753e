"""Errors of a comparison of logprobs that a user can fix.

ConsistencyError (ValueError)
├── NothingToCompare   no token was sampled, or none has a usable logprob on both sides
├── BadColumn          the length of a column differs from the number of tokens or rows
├── OtherModel         the model is not the one that sampled: its vocabulary or its weights differ
├── BadPrompts         a file of prompts cannot be read, or is empty
└── EngineError        an engine cannot be queried, or its reply is unusable
"""


class ConsistencyError(ValueError):
    """Logprobs cannot be compared as requested."""


class NothingToCompare(ConsistencyError):
    """No token has a logprob on both sides."""


class BadColumn(ConsistencyError):
    """A column does not have one value per token or per sequence."""


class OtherModel(ConsistencyError):
    """The model is not the one that sampled."""


class BadPrompts(ConsistencyError):
    """Prompts cannot be read."""


class EngineError(ConsistencyError):
    """An engine gives no usable reply; the message names its address."""
