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
from areal_core.rollout.types import Sampling
from areal_core.servers.identity import ServerIdentity
from areal_core.servers.reply import Chunk, Scored, json_of, malformed, parse_version, versions_of
from areal_core.servers.server import Server, call
from areal_core.servers.wire import Call, HeldWeights, LastBucket, Routes, Wire, shared_params

SAME_PARAMS = {"presence_penalty", "repetition_penalty", "min_p", "logit_bias"}
GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
NOT_A_NUMBER = -9999.0
FACTS_S = 60.0
DIGITS = 16  # of a checksum, as those of SGLang
REQUEST = "generate-tokens-"  # before the id of a request in its reply
# vLLM empties its cache in a pause, except if it keeps requests; an aborted one is computed again.
PAUSES = {"abort": "abort", "retract": "abort", "in_place": "keep"}


class VLLMWire(Wire):
    """The routes of a vLLM server with the arguments of `launch/vllm_process.py`."""

    engine = "vLLM 0.32"
    releases = ("vLLM", (0, 32, 0), (0, 33, 0), "0.32")  # older ones have no version of their weights
    routes = Routes(
        generate="/inference/v1/generate",
        version="/weight_info",
        alive="/health",
        resume="/resume",
        begin_update="/start_weight_update",
        join_group="/init_weight_transfer_engine",
        checksums="/weight_checker",
        load_adapter="/v1/load_lora_adapter",
        unload_adapter="/v1/unload_lora_adapter",
    )
    token_ids = "token_ids"

    def generate_payload(
        self, input_ids: list[int], sampling: Sampling, num_new_tokens: int, num_sampled: int, rid: str
    ) -> dict[str, Any]:
        """Return the JSON of a request of tokens. Raises `UnsupportedSampling`."""
        params = {
            "max_tokens": num_new_tokens,
            "min_tokens": max(0, sampling.min_new_tokens - num_sampled),
            **shared_params(sampling, seed="seed"),
            "logprobs": 0,
        }
        params |= further_params(sampling.server_only)
        return {"request_id": rid, "token_ids": input_ids, "sampling_params": params}

    def image_fields(self, urls: list[str]) -> dict[str, Any]:
        return {"content_parts": [{"type": "image_url", "url": url} for url in urls]}

    def adapter_fields(self, adapter: str) -> dict[str, Any]:
        return {"model": adapter}

    def experts_fields(self, start: int) -> dict[str, Any]:
        """Raise UnsupportedSampling: only SGLang is asked for experts."""
        raise UnsupportedSampling(
            "routed experts are asked from SGLang only: set rollout.return_routed_experts to false"
        )

    def parsed_generate(self, reply: Any) -> Chunk:
        (choice,) = reply["choices"]
        tokens = [index(token) for token in choice["token_ids"] or ()]
        entries = choice["logprobs"]["content"] or ()
        logprobs = [number(entry["logprob"]) for entry in entries]
        if [index(entry["token_id"]) for entry in entries] != tokens:
            raise MalformedReply(
                f"a {self.routes.generate} reply holds {len(entries)} logprobs for {len(tokens)} tokens, or of "
                "other tokens",
                "counts_agree",
            )
        versions = versions_of(choice["weight_versions"] or (), len(tokens))
        rid = str(reply["request_id"]).removeprefix(REQUEST)
        return Chunk(tokens, logprobs, versions, str(choice["finish_reason"]), rid)

    def score_payload(self, input_ids: list[int], num_prompt: int, rid: str) -> dict[str, Any]:
        """Return the JSON of a prefill; vLLM samples at least one token, which is not used."""
        params = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0}
        return {"request_id": rid, "token_ids": input_ids, "sampling_params": params}

    def parsed_score(self, reply: Any, expected: list[int]) -> Scored:
        rows = reply["prompt_logprobs"][-len(expected) :]
        logprobs = [number(row[str(token)]["logprob"]) for row, token in zip(rows, expected, strict=True)]
        (choice,) = reply["choices"]
        return Scored(logprobs, parse_version(choice["weight_versions"][0]["version"]))

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
                "vllm:dN in its allocation (docs/verbs/serve.md)"
            ) from error

    def pause(self, mode: str) -> Call:
        return Call(f"/pause?mode={PAUSES[mode]}", {})

    def load_folder(self, folder: Path | str, version: int, flush_cache: bool) -> list[Call]:
        load = {"method": "load_checkpoint", "kwargs": {"folder": str(folder)}}
        return [Call("/collective_rpc", load), self.set_version(version)]

    def end_update(self, version: int | None) -> Call:
        """Close an update session; the new version comes with its end."""
        return Call("/finish_weight_update", {} if version is None else {"weight_version": str(version)})

    def group_payload(self, group_info: dict[str, Any]) -> dict[str, Any]:
        return {"init_info": group_info}

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

    def hashes_by_sha256(self, device: str) -> bool:
        """Return True: vLLM hashes on the host, whatever the device."""
        return True

    def parsed_checksums(self, reply: Any) -> HeldWeights:
        """Parse `RANKS:NAME` to a SHA-256, of every rank."""
        checksums: dict[str, list[str]] = {}
        for key, checksum in reply["checksums"].items():
            # A layer that takes adapters holds its weight in an inner layer.
            name = key.rpartition(":")[2].replace(".base_layer.", ".")
            checksums.setdefault(name, []).append(checksum[:DIGITS])
        return HeldWeights(checksums, any(len(of_ranks) > 1 for of_ranks in checksums.values()))

    def parse_loaded(self, body: str) -> set[str]:
        """Return the name in a reply of success, which names no other adapter."""
        found = re.search(r"LoRA adapter '([^']*)' added", body)
        if found is None:
            raise malformed(self.engine, self.routes.load_adapter, ValueError("no adapter was added"), body)
        return {found[1]}


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
