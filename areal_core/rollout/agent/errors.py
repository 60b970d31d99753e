"""What can go wrong between an agent and the proxy that it talks to.

ValueError
  AgentError
    NotAnAgent       an object without `async def run(self, data, **extra_kwargs)`
    WrongReward      a run returned something that is no reward: text, NaN, the id of no completion
    NoCompletion     a run ended without one call to the model
    AgentStalled     a run made no call for longer than its session may be idle
    UnsafeProxy      the proxy would listen to other machines with a key that anybody can guess
    UnreachableProxy the proxy cannot listen where it should
  BadRequest         what a client sent; carries the HTTP status
"""


class AgentError(ValueError):
    """An agent that cannot be run, or whose result cannot be used."""


class NotAnAgent(AgentError):
    """An object without `async def run(self, data, **extra_kwargs)`."""


class WrongReward(AgentError):
    """A run returned something that is no reward."""


class NoCompletion(AgentError):
    """A run ended without one call to the model."""


class AgentStalled(AgentError):
    """A run made no call for longer than its session may be idle."""


class UnsafeProxy(AgentError):
    """The proxy would listen to other machines with a key that anybody can guess."""


class UnreachableProxy(AgentError):
    """The proxy cannot listen where it should."""


class BadRequest(ValueError):
    """What a client sent cannot be answered; `status` is the HTTP status of the refusal."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
