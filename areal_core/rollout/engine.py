"""The seam to whatever samples tokens: the SGLang client, the embedded engine and the scripted one implement it."""

from typing import Protocol

from areal_core.rollout.types import ModelRequest, ModelResponse


class InferenceEngine(Protocol):
    """Samples completions with the weights of one version at a time."""

    @property
    def is_paused(self) -> bool:
        """Whether `pause` was called, and `resume` was not."""
        ...

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        ...

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Samples one completion; many calls run concurrently on one event loop."""
        ...

    def set_version(self, version: int) -> None:
        """Tells which weights the engine holds from now on."""
        ...

    def pause(self) -> None:
        """Stops sampling: requests in flight are held or cut, and go on after `resume`."""
        ...

    def resume(self) -> None:
        """Lets sampling go on."""
        ...

    def close(self) -> None:
        """Releases connections and memory."""
        ...
