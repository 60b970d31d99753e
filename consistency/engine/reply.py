"""Requests to and replies of an engine, independent of its API: ids with one logprob per token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Top = tuple[tuple[int, float], ...]  # (id, logprob), most likely first
NUM_TOPS = 5


@dataclass(frozen=True)
class SamplingParams:
    """Sampling options of a request; `top_k` None is no limit."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    max_new_tokens: int = 128


@dataclass(frozen=True)
class Pictures:
    """Encoded images of a prompt; each run of `placeholder` among its ids is one of them."""

    images: tuple[bytes, ...]
    placeholder: int


@dataclass(frozen=True)
class Reply:
    """One completion.

    `logprobs` belong to `output_ids`, `tops` are the most likely tokens at each position. Fields
    that the engine did not report are None.

    The rest says again, in another way, what was sent or returned: `num_prompt` and `num_output`
    tokens as counted, `ids` as listed apart from the logprobs, `text`, `finish` (stop, length,
    abort), `matched` (the token that stopped), `sent_id` and `returned_id` of the request.
    """

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: tuple[Top, ...] | None = None
    version: int | None = None
    cached_tokens: int | None = None
    num_prompt: int | None = None
    num_output: int | None = None
    ids: tuple[int, ...] | None = None
    text: str | None = None
    finish: str | None = None
    matched: int | None = None
    sent_id: str | None = None
    returned_id: str | None = None


@dataclass(frozen=True)
class EngineIdentity:
    """Identity that an engine reports; unknown fields are None."""

    software: str
    model: str
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None

    def describe(self) -> str:
        """Return one line."""
        precision = ", ".join(name for name in (self.dtype, self.quantization) if name)
        return f"{self.software} with {self.model}" + (f" ({precision})" if precision else "")


class Engine(Protocol):
    """One server. Every call raises `EngineError` with its address without a usable reply."""

    @property
    def address(self) -> str:
        """Base URL."""
        ...

    @property
    def identity(self) -> EngineIdentity:
        """Identity that the server reports."""
        ...

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, pictures: Pictures | None = None
    ) -> Reply:
        """Sample one completion, with the logprob of every token at the temperature of `params`."""
        ...

    async def rescore(
        self, input_ids: Sequence[int], num_prompt: int, pictures: Pictures | None = None
    ) -> tuple[float, ...]:
        """Compute prefill logprobs at temperature 1 of the tokens after the prompt."""
        ...
