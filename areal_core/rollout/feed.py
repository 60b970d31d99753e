"""Prompts one at a time from a loader of batches; a resumed run neither loses nor repeats one."""

from collections import deque
from typing import Any, Protocol

from areal_core.dataset.tokens import Row


class PromptLoader(Protocol):
    """This data-parallel rank's share of the prompts."""

    def next_batch(self) -> list[tuple[int, Row]]:
        """Return the next `(prompt_id, row)` pairs."""
        ...

    def row(self, prompt_id: int) -> Row:
        """Return the row of a prompt that `next_batch` returned before."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, as JSON types."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        ...


class Feed(Protocol):
    """The source of prompts of `prepare_batch`; called on the event loop thread."""

    def take(self) -> tuple[int, Row]:
        """Return the next `(prompt_id, row)`; never exhausted."""
        ...


class PromptFeed:
    """A `Feed` of the prompts of `loader`, in order."""

    def __init__(self, loader: PromptLoader) -> None:
        self.loader = loader
        self._waiting: deque[tuple[int, Row]] = deque()

    def take(self) -> tuple[int, Row]:
        """Return the next `(prompt_id, row)`."""
        if not self._waiting:
            self._waiting.extend(self.loader.next_batch())
        return self._waiting.popleft()

    def state_dict(self, in_flight: list[int]) -> dict[str, Any]:
        """Return a state to continue from, in which the prompts `in_flight` come again first.

        These are the prompts that were taken and not trained on yet.
        """
        unused = [prompt_id for prompt_id, _ in self._waiting]
        return {"loader": self.loader.state_dict(), "prompts": [*in_flight, *unused]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.loader.load_state_dict(state["loader"])
        self._waiting = deque((prompt_id, self.loader.row(prompt_id)) for prompt_id in state["prompts"])
