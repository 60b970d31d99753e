"""The interface of an engine: requests of token ids; responses of ids, logprobs and versions.

The client of servers, the embedded engine and the scripted one of `areal_core/testing/__init__.py`
implement `InferenceEngine`. A workflow sees only the `EpisodeSampler` of its episode.
"""

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np

from areal_core.rollout.errors import PromptTooLong

TOP_K_OFF = 100_000_000


@dataclass(frozen=True)
class Sampling:
    """Sampling options; the field names are those of the `gconfig` section of a config.

    With `model_logprobs` the log-probs of a completion are those that a trainer computes at
    temperature 1, also where a grammar, a penalty or another temperature has sampled it.
    """

    n_samples: int = 1
    max_new_tokens: int = 16384
    min_new_tokens: int = 0
    max_tokens: int = 32768  # prompt and completion together
    greedy: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = TOP_K_OFF
    stop_token_ids: list[int] = field(default_factory=list)
    stop: list[str] | None = None
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    skip_special_tokens: bool = True
    seed: int | None = None
    # Of one request, not of `gconfig`:
    # further `sampling_params` of SGLang, such as json_schema; other engines refuse them
    server_only: Mapping[str, Any] = field(default_factory=dict)
    # output_logprobs are those of softmax(logits), whatever law has sampled
    model_logprobs: bool = False


OF_A_REQUEST = ("server_only", "model_logprobs")


def sampling_from(gconfig: Any, **changes: Any) -> Sampling:
    """Return a `Sampling` with the attributes of `gconfig`, some of them changed.

    Args:
        gconfig: a config section, such as `config.gconfig`, or a `Sampling`.
        changes: options by name, such as `max_new_tokens=32`.
    """
    names = [f.name for f in fields(Sampling) if f.name not in OF_A_REQUEST]
    return Sampling(**{name: getattr(gconfig, name) for name in names} | changes)


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A request for one completion.

    Attributes:
        input_ids: tokens of the prompt, with `image_token_id` for each vision token of its
            pictures, as Transformers' processors write them.
        sampling: sampling options (`sampling_from`).
        rid: name of the request, unique by default.
        metadata: names the episode (`prompt_id`, `sample_id`, `turn`); seeded engines derive their
            random numbers from it.
        images: the pictures of the prompt in order, encoded.
        image_token_id: -1 for a model of text.
    """

    input_ids: list[int]
    sampling: Sampling
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    metadata: Mapping[str, int] = field(default_factory=dict)
    images: tuple[bytes, ...] = ()
    image_token_id: int = -1

    def num_new_tokens(self) -> int:
        """Return the maximum number of new tokens.

        Raises:
            PromptTooLong: it is 0.
        """
        limit = min(self.sampling.max_tokens - len(self.input_ids), self.sampling.max_new_tokens)
        if limit <= 0:
            raise PromptTooLong(
                f"a prompt of {len(self.input_ids)} tokens leaves no room to sample: max_tokens is "
                f"{self.sampling.max_tokens}, max_new_tokens is {self.sampling.max_new_tokens}; raise them or "
                f"filter the dataset by max_length"
            )
        return limit


@dataclass(frozen=True, kw_only=True)
class ModelResponse:
    """One completion.

    The three output lists have one entry per sampled token, the stop token included.
    """

    input_tokens: list[int]
    output_tokens: list[int]
    # of softmax(logits / temperature), before top-k and top-p; see Sampling.model_logprobs
    output_logprobs: list[float]
    output_versions: list[int]  # version of the weights that sampled the token
    stop_reason: str  # a member of batch.FINISH_REASONS: "stop", "length" or "abort"
    # of all tokens but the last, int16 [tokens - 1, layers, top_k]; None where they are not asked
    routed_experts: np.ndarray | None = None


class TokenSampler(Protocol):
    """The part of an engine that an episode uses."""

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Sample one completion; many calls run concurrently on one event loop."""


class EpisodeSampler(TokenSampler, Protocol):
    """The engine that a workflow gets: it adds the episode's name to every request."""

    @property
    def prompt_id(self) -> int:
        """Prompt of the episode."""

    @property
    def sample_id(self) -> int:
        """Index of the episode among those of its prompt."""


class InferenceEngine(TokenSampler, Protocol):
    """Sample completions with the weights of one version at a time."""

    @property
    def is_paused(self) -> bool:
        """True after `pause` until `resume`."""

    def set_version(self, version: int) -> None:
        """Set the version of the weights that the engine holds from now on."""

    def pause(self) -> None:
        """Stop sampling: requests in flight are held or aborted, and continue after `resume`."""

    def resume(self) -> None:
        """Continue sampling."""

    def close(self) -> None:
        """Release connections and memory."""


class LocalEngine:
    """What an engine without servers has besides its answers, which a pause does not hold up."""

    version: int = 0
    is_paused: bool = False

    def set_version(self, version: int) -> None:
        """Set the version of the weights of later answers."""
        self.version = version

    def pause(self) -> None:
        """Record the pause; answers continue."""
        self.is_paused = True

    def resume(self) -> None:
        """Record the end of the pause."""
        self.is_paused = False

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def seed_of(req: ModelRequest, run_seed: int | None = None) -> int | None:
    """Return the 31-bit seed of a request; None leaves it to the engine.

    It is `sampling.seed` plus the number of the sample, so that the samples of a prompt differ.
    Otherwise it follows from the run's seed and the name of the episode.
    """
    if req.sampling.seed is not None:
        return (req.sampling.seed + req.metadata.get("sample_id", 0)) % 2**31
    return None if run_seed is None else row_seed(run_seed, 0, req) % 2**31


def row_seed(seed: int, version: int, req: ModelRequest) -> int:
    """Return a 63-bit seed from the run's seed, the weights' version and the episode's name.

    The episode's name is the request's metadata, or its id where there is none.
    """
    name = sorted(req.metadata.items()) if req.metadata else req.rid
    digest = hashlib.sha256(repr((seed, version, name)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
