"""Prompts one at a time from a loader that gives batches, with a memory: no prompt is lost or doubled when a run is continued."""

from collections import deque
from typing import Any, Protocol

from areal_core.dataset.tokens import Row


class PromptLoader(Protocol):
    """This data-parallel rank's share of the prompts."""

    def next_batch(self) -> list[tuple[int, Row]]:
        """The next `(prompt_id, row)` pairs."""
        ...

    def row(self, prompt_id: int) -> Row:
        """The row of a prompt that was given before."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Feed(Protocol):
    """Where `prepare_batch` takes prompts from; called on the event loop thread."""

    def take(self) -> tuple[int, Row]:
        """The next `(prompt_id, row)`, for ever."""
        ...


class PromptFeed:
    """An executor's `Feed` that takes the prompts of `loader` in order."""

    def __init__(self, loader: PromptLoader) -> None:
        self.loader = loader
        self._waiting: deque[tuple[int, Row]] = deque()

    def take(self) -> tuple[int, Row]:
        if not self._waiting:
            self._waiting.extend(self.loader.next_batch())
        return self._waiting.popleft()

    def state_dict(self, in_flight: list[int]) -> dict[str, Any]:
        """Where to go on so that the prompts `in_flight`, taken and not yet trained on, come again, first."""
        unused = [prompt_id for prompt_id, _ in self._waiting]
        return {"loader": self.loader.state_dict(), "prompts": [*in_flight, *unused]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])
        self._waiting = deque((prompt_id, self.loader.row(prompt_id)) for prompt_id in state["prompts"])
