"""The interface to an inference engine.

The SGLang client, the embedded engine and the scripted one implement it.
"""

from typing import Protocol

from areal_core.rollout.types import ModelRequest, ModelResponse


class TokenSampler(Protocol):
    """The part of an engine that an episode uses."""

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        ...

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one completion; many calls run concurrently on one event loop."""
        ...


class EpisodeSampler(TokenSampler, Protocol):
    """The engine that a workflow gets: it adds the episode's name to every request."""

    @property
    def prompt_id(self) -> int:
        """Prompt of the episode."""
        ...

    @property
    def sample_id(self) -> int:
        """Index of the episode among those of its prompt."""
        ...


class InferenceEngine(TokenSampler, Protocol):
    """Sample completions with the weights of one version at a time."""

    @property
    def is_paused(self) -> bool:
        """True after `pause` until `resume`."""
        ...

    def set_version(self, version: int) -> None:
        """Set the version of the weights that the engine holds from now on."""
        ...

    def pause(self) -> None:
        """Stop sampling: requests in flight are held or aborted, and continue after `resume`."""
        ...

    def resume(self) -> None:
        """Continue sampling."""
        ...

    def close(self) -> None:
        """Release connections and memory."""
        ...
