"""SGLang's routes and JSON, as of 0.5.23. Implements `servers.wire.Wire`.

A server's identity comes from `/server_info` and `/model_info`. After a weight update by disk
`/model_info` names the folder of that update as the model; `/server_info` keeps the one with which
the server was started.
"""

from base64 import b64decode
from operator import index
from pathlib import Path
from typing import Any

import numpy as np

from areal_core.rollout.errors import MalformedReply, WrongServer
from areal_core.rollout.types import Sampling
from areal_core.servers.identity import ServerIdentity
from areal_core.servers.reply import Chunk, Scored, json_of, parse_version, versions_of
from areal_core.servers.server import Server, call
from areal_core.servers.wire import Call, HeldWeights, LastBucket, Routes, Wire, shared_params

WEIGHTS, CACHE = "weights", "kv_cache"  # parts of a server's memory that can be released


class SGLangWire(Wire):
    """The routes of an SGLang server."""

    engine = "SGLang 0.5"
    # Older ones do not report the version of their weights; the wire format is that of 0.5.23.
    releases = ("SGLang", (0, 5, 0), (0, 6, 0), "0.5 (0.5.23 is tested)")
    routes = Routes(
        generate="/generate",
        version="/model_info",
        alive="/model_info",
        resume="/continue_generation",
        begin_update="/begin_weight_update",
        join_group="/init_weights_update_group",
        checksums="/weights_checker",
        load_adapter="/load_lora_adapter",
        unload_adapter="/unload_lora_adapter",
    )

    def generate_payload(
        self, input_ids: list[int], sampling: Sampling, num_new_tokens: int, num_sampled: int, rid: str
    ) -> dict[str, Any]:
        """Return the JSON of a `/generate` request."""
        params = {
            "max_new_tokens": num_new_tokens,
            "min_new_tokens": max(0, sampling.min_new_tokens - num_sampled),
            **shared_params(sampling, seed="sampling_seed"),
            **sampling.server_only,
        }
        return {
            "rid": rid,
            "input_ids": input_ids,
            "sampling_params": params,
            "return_logprob": True,
            "stream": False,
        }

    def image_fields(self, urls: list[str]) -> dict[str, Any]:
        return {"image_data": urls}

    def adapter_fields(self, adapter: str) -> dict[str, Any]:
        return {"lora_path": adapter}

    def experts_fields(self, start: int) -> dict[str, Any]:
        """Return the fields that ask for experts; see `SGLangConfig`."""
        return {"return_routed_experts": True, "routed_experts_start_len": start}

    def parsed_generate(self, reply: Any) -> Chunk:
        meta = reply["meta_info"]
        finish, rid = meta["finish_reason"], str(meta["id"])
        if finish["type"] == "abort" and not meta.get("output_token_logprobs"):  # before its first token
            return Chunk([], [], [], "abort", rid)
        logprobs = [entry[0] + 0.0 for entry in meta["output_token_logprobs"]]
        tokens = [index(entry[1]) for entry in meta["output_token_logprobs"]]
        count = int(meta["completion_tokens"])
        spans = meta.get("weight_versions") or [
            {"version": meta.get("weight_version", ""), "start": 0, "end": count}
        ]
        versions = versions_of(spans, count)
        encoded = meta.get("routed_experts")
        experts = None if encoded is None else np.frombuffer(b64decode(encoded, validate=True), "<i4")
        if len(tokens) != count:
            raise MalformedReply(
                f"a /generate reply holds {len(tokens)} logprobs for {count} tokens", "counts_agree"
            )
        return Chunk(tokens, logprobs, versions, str(finish["type"]), rid, experts)

    def score_payload(self, input_ids: list[int], num_prompt: int, rid: str) -> dict[str, Any]:
        """Return the JSON of a prefill, whose log-probs SGLang never scales by a temperature."""
        return {
            "rid": rid,
            "input_ids": input_ids,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 0},
            "return_logprob": True,
            # The first row of the reply has no predecessor in the slice and is null.
            "logprob_start_len": num_prompt - 1,
        }

    def parsed_score(self, reply: Any, expected: list[int]) -> Scored:
        meta = reply["meta_info"]
        rows = meta["input_token_logprobs"][-len(expected) :]
        logprobs, ids = [row[0] + 0.0 for row in rows], [index(row[1]) for row in rows]
        # SGLang 0.5.23 reports the last id of the vocabulary as 0 here, with the right log-prob.
        if len(ids) != len(expected) or any(x not in (y, 0) for x, y in zip(ids, expected, strict=True)):
            raise MalformedReply(f"{len(ids)} scored tokens are not the {len(expected)} that were sent")
        return Scored(logprobs, parse_version(str(meta.get("weight_version", ""))))

    def ask_identity(self, server: Server, timeout_s: float = 10.0) -> ServerIdentity:
        """Query the identity of a server.

        Raises:
            WrongServer: it lacks the routes: too old, or not SGLang.
            OSError: it does not answer.
        """
        try:
            model = call(server, "GET", "/model_info", timeout_s=timeout_s)
            started = call(server, "GET", "/server_info", timeout_s=timeout_s)
            return parse_identity(model, started)
        except (MalformedReply, RuntimeError) as error:
            raise WrongServer(
                f"{server.address} is not an SGLang server that this version can use ({error}); start one with sglang 0.5, "
                f"or with areal-debug serve"
            ) from error

    def pause(self, mode: str) -> Call:
        """Pause generation; `mode` is "abort", "retract" or "in_place"."""
        return Call("/pause_generation", {"mode": mode})

    def flush_cache(self) -> Call:
        """Empty the prefix cache; refused while a request is running."""
        return Call("/flush_cache", {})

    def release_memory(self) -> Call:
        """Release the device memory of weights and cache; SGLang ends if a request is running."""
        return Call("/release_memory_occupation", {"tags": [CACHE, WEIGHTS]})

    def resume_memory(self, tag: str) -> Call:
        """Allocate the memory of `WEIGHTS` or `CACHE` again; its contents are lost."""
        return Call("/resume_memory_occupation", {"tags": [tag]})

    def load_folder(self, folder: Path | str, version: int, flush_cache: bool) -> list[Call]:
        payload = {"model_path": str(folder), "weight_version": str(version), "flush_cache": flush_cache}
        return [Call("/update_weights_from_disk", payload)]

    def end_update(self, version: int | None) -> Call:
        """Close an update session; the version came with the last tensors."""
        return Call("/end_weight_update", {})

    def group_payload(self, group_info: dict[str, Any]) -> dict[str, Any]:
        return group_info

    def receive(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group: str,
        last: LastBucket | None,
    ) -> Call:
        """Receive tensors by broadcast."""
        payload: dict[str, Any] = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group}
        payload["flush_cache"] = last is not None and last.flush_cache
        if last is not None:
            payload["weight_version"] = str(last.version)
        return Call("/update_weights_from_distributed", payload)

    def hashes_by_sha256(self, device: str) -> bool:
        """Return whether it is a CPU; a GPU hashes in its own memory."""
        return device == "cpu"

    def parsed_checksums(self, reply: Any) -> HeldWeights:
        checksums: dict[str, list[str]] = {}
        for rank in reply["ranks"]:
            for name, checksum in rank["checksums"].items():
                checksums.setdefault(name, []).append(checksum)
        infos = [info for rank in reply["ranks"] for info in rank["parallelism_info"]]
        return HeldWeights(checksums, any(info["tp_size"] > 1 for info in infos))

    def parse_loaded(self, body: str) -> set[str]:
        with self.parsing(self.routes.load_adapter, body):
            return set(json_of(body)["loaded_adapters"])

    def set_version(self, version: int | str) -> Call:
        return Call(self.routes.set_version, {"new_version": str(version), "abort_all_requests": False})


SGLANG = SGLangWire()


def parse_identity(model_info: str, server_info: str) -> ServerIdentity:
    """Parse the two replies. Raises `MalformedReply`, which names the missing field."""
    try:
        model, started = json_of(model_info), json_of(server_info)
        return ServerIdentity(
            str(started["version"]),
            str(started["model_path"]),
            tuple(model["architectures"] or ()),
            str(model["weight_version"]),
            str(started["device"]),
            str(started["dtype"]),
            None if started.get("enable_lora") is None else bool(started["enable_lora"]),
            int(started.get("tp_size", 1)),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise MalformedReply(
            f"/model_info or /server_info is not what SGLang 0.5 sends: {error!r}"
        ) from error
