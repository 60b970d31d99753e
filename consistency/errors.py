"""What can be wrong with a comparison of logprobs that a user can mend.

ConsistencyError (ValueError)
├── NothingToCompare   no token was sampled, or none has a usable logprob on both sides
├── BadColumn          a column has another length than the tokens it speaks of
├── UnknownGate        a gate names a metric that does not exist, or no number
├── StaleScores        saved scores belong to another model, temperature or step
├── OtherTokenizer     sampled ids are beyond the model's vocabulary
├── BadPrompts         a file of prompts cannot be read, or has none
└── EngineError        an engine cannot be asked, or answers what cannot be used
"""


class ConsistencyError(ValueError):
    """Logprobs cannot be compared as asked."""


class NothingToCompare(ConsistencyError):
    """No token has a logprob on both sides."""


class BadColumn(ConsistencyError):
    """A column does not have one value per token, or per sequence."""


class UnknownGate(ConsistencyError):
    """A gate that cannot be checked."""


class StaleScores(ConsistencyError):
    """Scores on disk that answer another question."""


class OtherTokenizer(ConsistencyError):
    """Engine and model do not share a tokenizer."""


class BadPrompts(ConsistencyError):
    """Prompts that cannot be read."""


class EngineError(ConsistencyError):
    """An engine that gives no usable answer; names its address."""
