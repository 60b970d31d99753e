"""Errors between an agent and the proxy that it calls.

ValueError
  AgentError
    NotAnAgent       an object without `async def run(self, data, **extra_kwargs)`
    WrongReward      a run returned an invalid reward: text, NaN, an unknown completion id
    NoCompletion     a run ended without one call to the model
    AgentStalled     a run made no call for longer than its session may be idle
    UnsafeProxy      the proxy would listen to other machines with a guessable key
    UnreachableProxy the proxy cannot listen on its host and port
  BadRequest         an invalid request of a client, with the HTTP status
Exception
  EpisodeFailed      for agents to raise: the model has failed the episode
"""


class AgentError(ValueError):
    """An agent that cannot be run, or whose result cannot be used."""


class NotAnAgent(AgentError):
    """An object without `async def run(self, data, **extra_kwargs)`."""


class WrongReward(AgentError):
    """A run returned an invalid reward."""


class NoCompletion(AgentError):
    """A run ended without one call to the model."""


class AgentStalled(AgentError):
    """A run made no call for longer than its session may be idle."""


class UnsafeProxy(AgentError):
    """The proxy would listen to other machines with a guessable key."""


class UnreachableProxy(AgentError):
    """The proxy cannot listen on its host and port."""


class BadRequest(ValueError):
    """A request of a client cannot be answered; `status` is the HTTP status of the error."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class EpisodeFailed(Exception):
    """Raise it in an agent when the model has failed the episode, with what it did wrong.

    The last answered call gets `rollout.agent.failed_reward`, as if `run` had returned it, and the
    run continues. Before the first answered call it is an error of the code, as any exception.
    """
