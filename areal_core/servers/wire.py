"""The routes of one kind of inference server, as the client, the pool and weight updates use them.

`sglang.py` implements it for SGLang. A wire holds no state and opens no connection, except
where it queries one server: it turns calls into routes and JSON, and replies into typed values.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from areal_core.rollout.errors import MalformedReply, RequestRefused, WrongServer
from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.servers.identity import RunModel, ServerIdentity
from areal_core.servers.reply import Chunk, Scored
from areal_core.servers.server import Server, call

ASK_TIMEOUT_S = 2.5
AGAIN_TIMEOUT_S = 0.5  # of a server that has not answered before


@dataclass(frozen=True)
class Call:
    """A control request: the route of a POST, and its JSON."""

    path: str
    payload: dict[str, Any]


@dataclass(frozen=True)
class HeldWeights:
    """The checksums of one server: by parameter, 16 hex digits from each rank that holds it."""

    checksums: dict[str, list[str]]
    is_sharded: bool  # tensor parallel: a rank holds slices of tensors


class Wire(Protocol):
    """The routes of one kind of inference server."""

    @property
    def generate_path(self) -> str:
        """Route of a request of tokens."""
        ...

    def generate_payload(
        self, input_ids: list[int], sampling: Sampling, num_new_tokens: int, num_sampled: int, rid: str
    ) -> dict[str, Any]:
        """Return the JSON of a request; the last `num_sampled` ids are of the completion."""
        ...

    def with_images(self, payload: dict[str, Any], req: ModelRequest) -> dict[str, Any]:
        """Return the JSON of a request, made for `req`, with its pictures.

        Raises:
            UnsupportedSampling: the server cannot read them.
        """
        ...

    def adapter_fields(self, adapter: str) -> dict[str, Any]: ...

    def experts_fields(self, start: int) -> dict[str, Any]: ...

    def parse_generate(self, body: bytes) -> Chunk:
        """Parse a reply. Raises `MalformedReply`."""
        ...

    def score_payload(self, input_ids: list[int], num_prompt: int, rid: str) -> dict[str, Any]: ...

    def parse_score(self, body: bytes, expected: list[int]) -> Scored:
        """Parse its reply. Raises `MalformedReply` if they belong to other ids than `expected`."""
        ...

    def ask_identity(self, server: Server, timeout_s: float = 10.0) -> ServerIdentity:
        """Query the model and options. Raises `WrongServer` or OSError."""
        ...

    def check_identity(self, server: Server, identity: ServerIdentity, model: RunModel) -> None:
        """Raise `WrongServer` if it is of another release, or serves another model."""
        ...

    @property
    def version_path(self) -> str:
        """Route of a GET whose reply has the version of the weights."""
        ...

    @property
    def alive_path(self) -> str:
        """Route of a GET that is answered fast, also while weights are loaded."""
        ...

    def parse_weight_version(self, body: bytes) -> str:
        """Return the version in a reply of `version_path`. Raises `MalformedReply`."""
        ...

    def pause(self, mode: str) -> Call:
        """Pause generation, and hold new requests."""
        ...

    def resume(self) -> Call:
        """Continue generation."""
        ...

    def load_folder(self, folder: Path | str, version: int, flush_cache: bool) -> list[Call]:
        """Load all weights of a checkpoint folder, as `version`; the calls are made in order."""
        ...

    def begin_update(self) -> Call:
        """Open the session of a broadcast; a server without such sessions answers 404."""
        ...

    def end_update(self, version: int | None) -> Call:
        """Close the session of a broadcast of `version`, or an interrupted one: None."""
        ...

    def join_group(
        self, host: str, port: int, rank_offset: int, world_size: int, backend: str, group: str
    ) -> Call: ...

    def receive(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group: str,
        last: "LastBucket | None",
    ) -> Call:
        """Receive tensors by broadcast, in order, and load them by name."""
        ...

    def checksums(self) -> Call:
        """Return checksums of all weights; a server without this route refuses."""
        ...

    def hashes_by_sha256(self, device: str) -> bool:
        """Return whether servers on a device hash with SHA-256; otherwise as `words_hash`."""
        ...

    def parse_checksums(self, body: str) -> HeldWeights:
        """Parse a reply to `checksums`. Raises `MalformedReply`."""
        ...

    def load_adapter(self, name: str, folder: Path) -> Call: ...

    def parse_loaded(self, body: str) -> set[str]: ...

    def unload_adapter(self, name: str) -> Call: ...

    def set_version(self, version: int) -> Call:
        """Set the version of the weights without loading any."""
        ...


@dataclass(frozen=True)
class LastBucket:
    """What comes with the last tensors of a broadcast: until then the weights are mixed."""

    version: int
    flush_cache: bool


def shared_params(sampling: Sampling) -> dict[str, Any]:
    """Return the sampling parameters to which SGLang and vLLM give the same names."""
    params = {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "frequency_penalty": sampling.frequency_penalty,
    }
    return params | ({"stop": sampling.stop} if sampling.stop else {})


def weight_version(server: Server, wire: Wire, timeout_s: float = ASK_TIMEOUT_S) -> str:
    """Query the version of the weights that a server holds.

    Raises:
        OSError, RequestRefused, MalformedReply: no answer, an error, or no version in the reply.
    """
    return wire.parse_weight_version(call(server, "GET", wire.version_path, timeout_s=timeout_s).encode())


def ask_version(server: Server, wire: Wire, timeout_s: float = ASK_TIMEOUT_S) -> str | None:
    """Query the version of the weights, as `weight_version`; None without a valid answer."""
    try:
        return weight_version(server, wire, timeout_s)
    except (OSError, MalformedReply, RequestRefused):
        return None


def is_alive(server: Server, wire: Wire, timeout_s: float = ASK_TIMEOUT_S) -> bool:
    """Return whether a server answers, also while it loads weights."""
    try:
        call(server, "GET", wire.alive_path, timeout_s=timeout_s)
    except (OSError, RequestRefused):
        return False
    return True


def rejection_reason(server: Server, wire: Wire, model: RunModel | None) -> str:
    """Return the reason why a discovered server may not serve a run; "" if it may."""
    try:
        if model is not None:
            wire.check_identity(server, wire.ask_identity(server), model)
    except (OSError, WrongServer) as error:
        return str(error)
    return ""
