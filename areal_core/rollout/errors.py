"""Errors between the trainer and an inference engine.

ValueError
  UnsupportedSampling    a sampling option that this engine does not support
  PromptTooLong          no space is left for a new token
  MalformedReply         a server's reply that breaks a rule of its wire format; it names the rule
  MalformedEpisode       a workflow's tensors that cannot become rows of a batch
  WrongServer            an invalid address, or a server of another protocol version or model
  BadName                a name that the name service cannot store
  NoSuchName             an entry of the name service that does not exist
RuntimeError
  NoServers              no inference server is configured or discovered
  ServerDied             a server stopped answering and no other is left
  RequestRefused         a server answered with an error
  WeightUpdateFailed     new weights did not reach every server
  SharingFailed          servers did not release or reacquire the memory of shared devices
  WeightsDiffer          after a weight update a server holds other weights than the trainer
  NothingAccepted        the workflow or the filter rejected every prompt for several batches
  RolloutStuck           a wait that can never end
"""


class UnsupportedSampling(ValueError):
    """A sampling option that this engine does not support."""


class PromptTooLong(ValueError):
    """No space is left for a new token within `max_tokens`."""


class MalformedReply(ValueError):
    """A server's reply that breaks a rule of its wire format; `rule` is the rule's name."""

    def __init__(self, message: str, rule: str = "malformed") -> None:
        super().__init__(message)
        self.rule = rule


class MalformedEpisode(ValueError):
    """A workflow's tensors that cannot become rows of a batch."""


class WrongServer(ValueError):
    """An invalid address, or a server of another protocol version or model than the run's."""


class BadName(ValueError):
    """A name that the name service cannot store."""


class NoSuchName(ValueError):
    """An entry of the name service that does not exist."""


class NoServers(RuntimeError):
    """No inference server is configured or discovered."""


class ServerDied(RuntimeError):
    """A server stopped answering and no other is left; the message holds its last log lines."""


class RequestRefused(RuntimeError):
    """A server answered with an error.

    `status` is its HTTP status, `retry_after_s` the delay that it asked for, in seconds.
    """

    def __init__(self, message: str, status: int, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class WeightUpdateFailed(RuntimeError):
    """New weights did not reach every server; raised on every rank."""


class SharingFailed(RuntimeError):
    """Servers did not release or reacquire the memory of devices that the trainer uses, too."""


class WeightsDiffer(RuntimeError):
    """After a weight update a server holds other weights than the trainer; names the tensors."""


class NothingAccepted(RuntimeError):
    """The workflow or the filter rejected every prompt for several batches."""


class RolloutStuck(RuntimeError):
    """A wait that can never end; the message holds the numbers that contradict each other."""
