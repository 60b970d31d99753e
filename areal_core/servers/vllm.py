"""vLLM's routes and JSON, as of 0.32. Implements `servers.wire.Wire`.

Requests of tokens go to `/inference/v1/generate`. Its replies name the weight version of each
token. A log-prob that is not a number arrives as -9999, and is one that is not a number here.

vLLM loads weights and sets their version by separate calls, in a pause, so no token is sampled in
between. A failed load leaves its model without weights: the next request ends the server.
"""

import math
import re
from collections.abc import Mapping
from operator import index
from pathlib import Path
from typing import Any

from areal_core.rollout.errors import MalformedReply, UnsupportedSampling, WrongServer
from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.servers.identity import RunModel, ServerIdentity, check_model, check_release
from areal_core.servers.reply import (
    Chunk,
    Scored,
    json_of,
    malformed,
    parse_version,
    parse_weight_version,
    versions_of,
)
from areal_core.servers.server import Server, call
from areal_core.servers.wire import Call, HeldWeights, LastBucket, shared_params

OLDEST, TOO_NEW = (0, 32, 0), (0, 33, 0)  # older ones have no version of their weights
SAME_PARAMS = {"presence_penalty", "repetition_penalty", "min_p", "logit_bias"}
GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
ENGINE = "vLLM 0.32"
NOT_A_NUMBER = -9999.0
FACTS_S = 60.0
DIGITS = 16  # of a checksum, as those of SGLang
REQUEST = "generate-tokens-"  # before the id of a request in its reply
# vLLM empties its cache in a pause, except if it keeps requests; an aborted one is computed again.
PAUSES = {"abort": "abort", "retract": "abort", "in_place": "keep"}


class VLLMWire:
    """The routes of a vLLM server that `vllm.start` started, or one with its arguments."""

    generate_path = "/inference/v1/generate"
    version_path = "/weight_info"
    alive_path = "/health"

    def generate_payload(
        self, input_ids: list[int], sampling: Sampling, num_new_tokens: int, num_sampled: int, rid: str
    ) -> dict[str, Any]:
        """Return the JSON of a request of tokens. Raises `UnsupportedSampling`."""
        params = {
            "max_tokens": num_new_tokens,
            "min_tokens": max(0, sampling.min_new_tokens - num_sampled),
            **shared_params(sampling),
            "logprobs": 0,
        }
        params |= further_params(sampling.server_only)
        return {"request_id": rid, "token_ids": input_ids, "sampling_params": params}

    def with_images(self, payload: dict[str, Any], req: ModelRequest) -> dict[str, Any]:
        """Raise `UnsupportedSampling`: vLLM's route of tokens takes pixels, not pictures."""
        raise UnsupportedSampling(
            "the request has images, and vLLM's route of token ids takes none: use sglang in allocation_mode"
        )

    def adapter_fields(self, adapter: str) -> dict[str, Any]:
        return {"model": adapter}

    def experts_fields(self, start: int) -> dict[str, Any]:
        """Raise UnsupportedSampling: only SGLang is asked for experts."""
        raise UnsupportedSampling(
            "routed experts are asked from SGLang only: set rollout.return_routed_experts to false"
        )

    def parse_generate(self, body: bytes) -> Chunk:
        """Parse a reply of tokens.

        Raises:
            MalformedReply: a field is missing, or the lists differ in length.
        """
        try:
            reply = json_of(body)
            rid = str(reply["request_id"]).removeprefix(REQUEST)
            (choice,) = reply["choices"]
            tokens = [index(token) for token in choice["token_ids"] or ()]
            entries = choice["logprobs"]["content"] or ()
            logprobs = [number(entry["logprob"]) for entry in entries]
            ids = [index(entry["token_id"]) for entry in entries]
            versions = versions_of(choice["weight_versions"] or (), len(tokens))
            finish = str(choice["finish_reason"])
        except MalformedReply:
            raise
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise malformed(ENGINE, self.generate_path, error, body) from error
        if ids != tokens:
            raise MalformedReply(
                f"a {self.generate_path} reply holds {len(ids)} logprobs for {len(tokens)} tokens, or of other tokens",
                "counts_agree",
            )
        return Chunk(tokens, logprobs, versions, finish, rid)

    def score_payload(self, input_ids: list[int], num_prompt: int, rid: str) -> dict[str, Any]:
        """Return the JSON of a prefill; vLLM samples at least one token, which is not used."""
        params = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0}
        return {"request_id": rid, "token_ids": input_ids, "sampling_params": params}

    def parse_score(self, body: bytes, expected: list[int]) -> Scored:
        """Parse the reply of a prefill: for each position, the id and its log-prob.

        Raises:
            MalformedReply: a field is missing, or the log-probs are of other ids.
        """
        try:
            reply = json_of(body)
            rows = reply["prompt_logprobs"][-len(expected) :]
            logprobs = [number(row[str(token)]["logprob"]) for row, token in zip(rows, expected, strict=True)]
            (choice,) = reply["choices"]
            version = parse_version(choice["weight_versions"][0]["version"])
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise malformed(ENGINE, self.generate_path, error, body) from error
        return Scored(logprobs, version)

    def ask_identity(self, server: Server, timeout_s: float = 10.0) -> ServerIdentity:
        """Query the identity of a server.

        Raises:
            WrongServer: it lacks the routes, or was started with other options.
            OSError: it does not answer.
        """
        try:
            version = call(server, "GET", "/version", timeout_s=timeout_s)
            # Its first reply takes seconds, in which it collects facts of its machine.
            started = call(
                server, "GET", "/server_info?config_format=json", timeout_s=max(timeout_s, FACTS_S)
            )
            held = self.parse_weight_version(
                call(server, "GET", "/weight_info", timeout_s=timeout_s).encode()
            )
            return parse_identity(version, started, held)
        except (MalformedReply, RuntimeError) as error:
            raise WrongServer(
                f"{server.address} is not a vLLM server that this version can use ({error}); let the run start it, with "
                "vllm:dN in its allocation (docs/vllm.md)"
            ) from error

    def check_identity(self, server: Server, identity: ServerIdentity, model: RunModel) -> None:
        """Raise `WrongServer` if the server is of another vLLM release or serves another model."""
        check_release(server, "vLLM", identity.version, OLDEST, TOO_NEW, "0.32")
        check_model(server, identity, model, "--enable-lora")

    def parse_weight_version(self, body: bytes) -> str:
        """Return the version in a reply of `/weight_info`. Raises `MalformedReply`."""
        return parse_weight_version(ENGINE, self.version_path, body)

    def pause(self, mode: str) -> Call:
        """Pause generation."""
        return Call(f"/pause?mode={PAUSES[mode]}", {})

    def resume(self) -> Call:
        """Continue generation."""
        return Call("/resume", {})

    def load_folder(self, folder: Path | str, version: int, flush_cache: bool) -> list[Call]:
        load = {"method": "load_checkpoint", "kwargs": {"folder": str(folder)}}
        return [Call("/collective_rpc", load), self.set_version(version)]

    def begin_update(self) -> Call:
        return Call("/start_weight_update", {})

    def end_update(self, version: int | None) -> Call:
        """Close an update session; the new version comes with its end."""
        return Call("/finish_weight_update", {} if version is None else {"weight_version": str(version)})

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
        return Call("/init_weight_transfer_engine", {"init_info": group_info})

    def receive(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group: str,
        last: LastBucket | None,
    ) -> Call:
        """Receive tensors by broadcast."""
        return Call("/update_weights", {"update_info": {"names": names, "dtypes": dtypes, "shapes": shapes}})

    def checksums(self) -> Call:
        """Return checksums of all weights."""
        return Call("/weight_checker", {"action": "checksum"})

    def hashes_by_sha256(self, device: str) -> bool:
        """Return True: vLLM hashes on the host, whatever the device."""
        return True

    def parse_checksums(self, body: str) -> HeldWeights:
        """Parse a reply of `/weight_checker`: `RANKS:NAME` to a SHA-256, of every rank.

        Raises `MalformedReply`, which names the missing field.
        """
        try:
            checksums: dict[str, list[str]] = {}
            for key, checksum in json_of(body)["checksums"].items():
                # A layer that takes adapters holds its weight in an inner layer.
                name = key.rpartition(":")[2].replace(".base_layer.", ".")
                checksums.setdefault(name, []).append(checksum[:DIGITS])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise malformed(ENGINE, "/weight_checker", error, body) from error
        return HeldWeights(checksums, any(len(of_ranks) > 1 for of_ranks in checksums.values()))

    def load_adapter(self, name: str, folder: Path) -> Call:
        return Call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def parse_loaded(self, body: str) -> set[str]:
        """Return the name in a reply of success, which names no other adapter."""
        found = re.search(r"LoRA adapter '([^']*)' added", body)
        if found is None:
            raise malformed(ENGINE, "/v1/load_lora_adapter", ValueError("no adapter was added"), body)
        return {found[1]}

    def unload_adapter(self, name: str) -> Call:
        return Call("/v1/unload_lora_adapter", {"lora_name": name})

    def set_version(self, version: int) -> Call:
        """Set the weight version."""
        return Call("/update_weight_version", {"new_version": str(version)})


VLLM = VLLMWire()


def further_params(server_only: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters that have SGLang's names by vLLM's, which ignores names it does not know.

    Raises UnsupportedSampling.
    """
    if unknown := sorted(set(server_only) - SAME_PARAMS - set(GRAMMARS)):
        raise UnsupportedSampling(f"{', '.join(unknown)} cannot be sampled by vLLM: leave it out")
    same = {name: value for name, value in server_only.items() if name in SAME_PARAMS}
    grammar = {GRAMMARS[name]: value for name, value in server_only.items() if name in GRAMMARS}
    return same | ({"structured_outputs": grammar} if grammar else {})


def number(logprob: Any) -> float:
    """Return a log-prob of a reply."""
    return math.nan if logprob <= NOT_A_NUMBER else logprob + 0.0


def parse_identity(version: str, server_info: str, weight_version: str) -> ServerIdentity:
    """Parse the two replies. Raises `MalformedReply`: a field is missing, or an option differs."""
    try:
        started = json_of(server_info)["vllm_config"]
        model = started["model_config"]
        transfer = (started["weight_transfer_config"] or {}).get("backend")
        mode = model["logprobs_mode"]
        identity = ServerIdentity(
            str(json_of(version)["version"]),
            str(model["model"]),
            (),
            weight_version,
            str(started["device_config"]["device"]),
            str(model["dtype"]).removeprefix("torch."),
            started["lora_config"] is not None,
            started["parallel_config"]["tensor_parallel_size"]
            * started["parallel_config"]["pipeline_parallel_size"],
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MalformedReply(f"/server_info is not what vLLM 0.32 sends: {error!r}") from error
    if mode != "processed_logprobs":
        raise MalformedReply(
            f"its --logprobs-mode is {mode}; training needs processed_logprobs, those of the distribution that is sampled from"
        )
    if transfer != "areal":
        raise MalformedReply(f"the backend of its --weight-transfer-config is {transfer}, and must be areal")
    return identity
