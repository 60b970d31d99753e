"""What can go wrong between the trainer and an inference engine.

ValueError
  UnsupportedSampling    a sampling option that this engine cannot honour
  PromptTooLong          no room is left for a new token
  MalformedReply         a server's reply without the fields that its wire format promises
RuntimeError
  NoServers              nobody told the client where the servers are
  ServerDied             a server stopped answering and no other is left
  RequestRefused         a server answered, and said no
  PushFailed             new weights did not reach every server
  NothingAccepted        the workflow rejected every episode of a batch
"""


class UnsupportedSampling(ValueError):
    """A sampling option that this engine cannot honour."""


class PromptTooLong(ValueError):
    """No room is left for a new token within `max_tokens`."""


class MalformedReply(ValueError):
    """A server's reply without the fields that its wire format promises."""


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


class NothingAccepted(RuntimeError):
    """The workflow rejected every episode of a batch."""
