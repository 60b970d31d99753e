"""What an engine is asked and what it answers, in no dialect: ids and logprobs, one a token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Top = tuple[tuple[int, float], ...]  # (id, logprob), the likeliest first
NUM_TOPS = 5


@dataclass(frozen=True)
class Law:
    """How the engine is told to sample. `top_k` is None for all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    max_new_tokens: int = 128


@dataclass(frozen=True)
class Reply:
    """One completion. `logprobs` are those of `output_ids`, `tops` the likeliest tokens there; what the engine did not say is None."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: tuple[Top, ...] | None = None
    version: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Identity:
    """What an engine says of itself; `dtype` and `quantization` are None where it does not say."""

    software: str
    model: str
    dtype: str | None = None
    quantization: str | None = None
    has_adapter: bool = False
    kv_cache_dtype: str | None = None

    def describe(self) -> str:
        """One line."""
        precision = ", ".join(word for word in (self.dtype, self.quantization) if word)
        return f"{self.software} with {self.model}" + (f" ({precision})" if precision else "")


class Engine(Protocol):
    """One server. Every call raises `EngineError` with its address when there is no usable answer."""

    @property
    def address(self) -> str:
        """Where it is."""
        ...

    @property
    def identity(self) -> Identity:
        """What it says of itself."""
        ...

    async def sample(self, prompt_ids: Sequence[int], law: Law) -> Reply:
        """One completion of a prompt, with the logprob of every token under the law's temperature."""
        ...

    async def rescore(self, input_ids: Sequence[int], num_prompt: int) -> tuple[float, ...]:
        """Logprobs at temperature 1 of the tokens after the first `num_prompt`, computed at once, as a prompt is."""
        ...
