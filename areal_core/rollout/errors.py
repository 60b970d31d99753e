"""What can go wrong between the trainer and an inference engine.

ValueError
  UnsupportedSampling    a sampling option that this engine cannot honour
  PromptTooLong          no room is left for a new token
  MalformedReply         a server's reply without the fields that its wire format promises
  MalformedEpisode       a workflow's tensors that cannot become rows of a batch
RuntimeError
  NoServers              nobody told the client where the servers are
  ServerDied             a server stopped answering and no other is left
  RequestRefused         a server answered, and said no
  PushFailed             new weights did not reach every server
  WeightsDiffer          after a push a server holds other weights than the trainer
  NothingAccepted        the workflow or the filter rejected every prompt for several batches
  RolloutStuck           what is waited for can never come
"""


class UnsupportedSampling(ValueError):
    """A sampling option that this engine cannot honour."""


class PromptTooLong(ValueError):
    """No room is left for a new token within `max_tokens`."""


class MalformedReply(ValueError):
    """A server's reply without the fields that its wire format promises."""


class MalformedEpisode(ValueError):
    """A workflow's tensors that cannot become rows of a batch."""


class WrongServer(ValueError):
    """No address of a server, or one that speaks another version of the protocol or serves another model than the run's."""


class BadName(ValueError):
    """A name that the name service cannot hold."""


class NameTaken(ValueError):
    """An entry of the name service that is there already."""


class NoSuchName(ValueError):
    """An entry of the name service that is not there."""


class NoServers(RuntimeError):
    """Nobody told the client where the servers are."""


class ServerDied(RuntimeError):
    """A server stopped answering and no other is left; the message holds its last log lines."""


class RequestRefused(RuntimeError):
    """A server answered, and said no; `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class PushFailed(RuntimeError):
    """New weights did not reach every server; raised on every rank."""


class WeightsDiffer(RuntimeError):
    """After a push a server holds other weights than the trainer; the message names the tensors."""


class NothingAccepted(RuntimeError):
    """The workflow or the filter rejected every prompt for several batches."""


class RolloutStuck(RuntimeError):
    """What is waited for can never come; the message holds the numbers that contradict each other."""
