"""The routes of one kind of inference server, as the client, the pool and weight updates use them.

`sglang.py` and `vllm.py` implement it. A wire holds no state and opens no connection, except
where it queries one server: it turns calls into routes and JSON, and replies into typed values.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from areal_core.data.images import data_url
from areal_core.rollout.errors import MalformedReply, RequestRefused, UnsupportedSampling, WrongServer
from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.servers.identity import RunModel, ServerIdentity, check_model, check_release
from areal_core.servers.reply import Chunk, Scored, json_of, malformed
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


@dataclass(frozen=True)
class LastBucket:
    """What comes with the last tensors of a broadcast: until then the weights are mixed."""

    version: int
    flush_cache: bool


@dataclass(frozen=True)
class Routes:
    """The routes of control calls, and the routes of queries."""

    generate: str
    version: str  # GET; its reply has the version of the weights
    alive: str  # GET; answered fast, also while weights are loaded
    resume: str
    begin_update: str  # a server without such sessions answers 404
    join_group: str
    checksums: str  # a server without this route refuses
    load_adapter: str
    unload_adapter: str
    set_version: str = "/update_weight_version"


class Wire(ABC):
    """The routes and JSON of one kind of inference server."""

    engine: str  # and its version
    releases: tuple[str, tuple[int, ...], tuple[int, ...], str]  # name, oldest, too new, in words
    routes: Routes
    token_ids = "input_ids"  # name of the field

    @abstractmethod
    def generate_payload(
        self, input_ids: list[int], sampling: Sampling, num_new_tokens: int, num_sampled: int, rid: str
    ) -> dict[str, Any]:
        """Return the JSON of a request; the last `num_sampled` ids are of the completion."""

    def with_images(self, payload: dict[str, Any], req: ModelRequest) -> dict[str, Any]:
        """Return the JSON of a request, made for `req`, with its pictures.

        The prompt has one placeholder for each picture, which the server expands. Counts in the
        request and in its reply are of expanded tokens.

        Raises:
            UnsupportedSampling: the prompt's placeholders are not those of its pictures.
        """
        prompt, rest = req.input_ids, payload[self.token_ids][len(req.input_ids) :]
        ids = collapsed(prompt, req.image_token_id, len(req.images)) + rest
        return payload | {self.token_ids: ids, **self.image_fields([data_url(one) for one in req.images])}

    @abstractmethod
    def image_fields(self, urls: list[str]) -> dict[str, Any]:
        """Return the fields of pictures, in the order of their placeholders."""

    @abstractmethod
    def adapter_fields(self, adapter: str) -> dict[str, Any]: ...

    @abstractmethod
    def experts_fields(self, start: int) -> dict[str, Any]:
        """Return the fields that ask for the experts of tokens from `start`."""

    @abstractmethod
    def parsed_generate(self, reply: Any) -> Chunk: ...

    @abstractmethod
    def score_payload(self, input_ids: list[int], num_prompt: int, rid: str) -> dict[str, Any]: ...

    @abstractmethod
    def parsed_score(self, reply: Any, expected: list[int]) -> Scored: ...

    @abstractmethod
    def ask_identity(self, server: Server, timeout_s: float = 10.0) -> ServerIdentity:
        """Query the model and options. Raises `WrongServer` or OSError."""

    @abstractmethod
    def pause(self, mode: str) -> Call:
        """Pause generation and hold new requests; `mode` is "abort", "retract" or "in_place"."""

    @abstractmethod
    def load_folder(self, folder: Path | str, version: int, flush_cache: bool) -> list[Call]:
        """Load all weights of a checkpoint folder, as `version`; the calls are made in order."""

    @abstractmethod
    def end_update(self, version: int | None) -> Call:
        """Close the session of a broadcast of `version`, or an interrupted one: None."""

    @abstractmethod
    def group_payload(self, group_info: dict[str, Any]) -> dict[str, Any]: ...

    @abstractmethod
    def receive(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group: str,
        last: LastBucket | None,
    ) -> Call:
        """Receive tensors by broadcast, in order, and load them by name."""

    @abstractmethod
    def hashes_by_sha256(self, device: str) -> bool:
        """Return whether servers on a device hash with SHA-256; otherwise as `words_hash`."""

    @abstractmethod
    def parsed_checksums(self, reply: Any) -> HeldWeights: ...

    @abstractmethod
    def parse_loaded(self, body: str) -> set[str]:
        """Return the names of a server's adapters. Raises `MalformedReply`."""

    def parse_generate(self, body: bytes) -> Chunk:
        """Parse a reply of tokens. Raises `MalformedReply`."""
        with self.parsing(self.routes.generate, body):
            return self.parsed_generate(json_of(body))

    def parse_score(self, body: bytes, expected: list[int]) -> Scored:
        """Parse the reply of a prefill. Raises `MalformedReply`, also if it is of other ids."""
        with self.parsing(self.routes.generate, body):
            return self.parsed_score(json_of(body), expected)

    def parse_checksums(self, body: str) -> HeldWeights:
        """Parse a reply to `checksums`. Raises `MalformedReply`, which names the missing field."""
        with self.parsing(self.routes.checksums, body):
            return self.parsed_checksums(json_of(body))

    def parse_weight_version(self, body: bytes) -> str:
        """Return the version of the weights in a reply. Raises `MalformedReply`."""
        with self.parsing(self.routes.version, body):
            return str(json_of(body)["weight_version"])

    @contextmanager
    def parsing(self, route: str, body: bytes | str) -> Iterator[None]:
        """Turn what a reply of another shape raises into a `MalformedReply` that shows it."""
        try:
            yield
        except MalformedReply:
            raise
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            raise malformed(self.engine, route, error, body) from error

    def check_identity(self, server: Server, identity: ServerIdentity, model: RunModel) -> None:
        """Raise `WrongServer` if it is of another release, or serves another model."""
        name, oldest, too_new, words = self.releases
        check_release(server, name, identity.version, oldest, too_new, words)
        check_model(server, identity, model, "--enable-lora")

    def resume(self) -> Call:
        """Continue generation."""
        return Call(self.routes.resume, {})

    def begin_update(self) -> Call:
        """Open the session of a broadcast."""
        return Call(self.routes.begin_update, {})

    def join_group(
        self, host: str, port: int, rank_offset: int, world_size: int, backend: str, group: str
    ) -> Call:
        group_info = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "backend": backend,
            "group_name": group,
        }
        return Call(self.routes.join_group, self.group_payload(group_info))

    def checksums(self) -> Call:
        return Call(self.routes.checksums, {"action": "checksum"})

    def load_adapter(self, name: str, folder: Path) -> Call:
        return Call(self.routes.load_adapter, {"lora_name": name, "lora_path": str(folder)})

    def unload_adapter(self, name: str) -> Call:
        return Call(self.routes.unload_adapter, {"lora_name": name})

    def set_version(self, version: int | str) -> Call:
        """Set the version of the weights without loading any."""
        return Call(self.routes.set_version, {"new_version": str(version)})


def shared_params(sampling: Sampling, seed: str) -> dict[str, Any]:
    """Return the sampling parameters that have one name in SGLang and vLLM, and the seed."""
    params = {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "frequency_penalty": sampling.frequency_penalty,
    }
    params |= {"stop": sampling.stop} if sampling.stop else {}
    return params | ({seed: sampling.seed} if sampling.seed is not None else {})


def weight_version(server: Server, wire: Wire, timeout_s: float = ASK_TIMEOUT_S) -> str:
    """Query the version of the weights that a server holds.

    Raises:
        OSError, RequestRefused, MalformedReply: no answer, an error, or no version in the reply.
    """
    return wire.parse_weight_version(call(server, "GET", wire.routes.version, timeout_s=timeout_s).encode())


def ask_version(server: Server, wire: Wire, timeout_s: float = ASK_TIMEOUT_S) -> str | None:
    """Query the version of the weights, as `weight_version`; None without a valid answer."""
    try:
        return weight_version(server, wire, timeout_s)
    except (OSError, MalformedReply, RequestRefused):
        return None


def is_alive(server: Server, wire: Wire, timeout_s: float = ASK_TIMEOUT_S) -> bool:
    """Return whether a server answers, also while it loads weights."""
    try:
        call(server, "GET", wire.routes.alive, timeout_s=timeout_s)
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


def collapsed(input_ids: Sequence[int], image_token_id: int, num_images: int) -> list[int]:
    """Return ids with one placeholder in place of each run of them, which is one picture.

    Raises:
        UnsupportedSampling: there are more or fewer runs than pictures.
    """
    found: list[int] = []
    for key, run in groupby(input_ids, key=lambda token: token == image_token_id):
        found += [image_token_id] if key else list(run)
    if (num_runs := found.count(image_token_id)) != num_images:
        raise UnsupportedSampling(
            f"a prompt has {num_runs} runs of image tokens and {num_images} images: a server needs another "
            "token between two images, as chat templates write it"
        )
    return found
