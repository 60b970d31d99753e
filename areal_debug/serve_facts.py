"""What a running server says of itself, and what of it is worth a second look before an agent is debugged against it.

Everything is read back from the server (`/server_info`, `/model_info`), not taken from the command line: servers change what
they were asked for.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.rollout.servers import Server, call

SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ServerFacts:
    """A server as it runs; None where it does not say. `model_sampling` is what the model's folder asks for."""

    address: str
    version: str
    model_path: str
    weight_version: str
    context_length: int | None
    dtype: str
    device: str
    multimodal: bool | None
    tensor_size: int
    attention_backend: str | None
    chunked_prefill_size: int | None
    sampling_defaults: str | None  # "model": requests without temperature take the model's; "openai": 1.0
    model_sampling: dict[str, float]
    num_cache_tokens: int | None


def read_facts(server: Server) -> ServerFacts:
    """Asks a healthy server. Raises `RequestRefused` or `OSError`."""
    return parse_facts(
        server.address,
        json.loads(call(server, "GET", "/server_info", timeout_s=10.0)),
        json.loads(call(server, "GET", "/model_info", timeout_s=10.0)),
    )


def parse_facts(address: str, server: dict[str, Any], model: dict[str, Any]) -> ServerFacts:
    """The replies of `/server_info` and `/model_info`; what a version does not send is None."""
    model_path = str(model["model_path"])
    return ServerFacts(
        address=address,
        version=f"{server.get('engine', 'sglang')} {server.get('version', '?')}",
        model_path=model_path,
        weight_version=str(model.get("weight_version", "?")),
        context_length=server.get("context_length")
        or model_json(model_path, "config").get("max_position_embeddings"),
        dtype=str(server.get("dtype", "?")),
        device=str(server.get("device", "?")),
        multimodal=model.get("has_image_understanding"),
        tensor_size=int(server.get("tp_size", 1)),
        attention_backend=server.get("attention_backend"),
        chunked_prefill_size=server.get("chunked_prefill_size"),
        sampling_defaults=server.get("sampling_defaults"),
        model_sampling={
            name: value
            for name, value in model_json(model_path, "generation_config").items()
            if name in SAMPLING_NAMES and value is not None
        },
        num_cache_tokens=server.get("max_total_num_tokens"),
    )


def model_json(model_path: str, name: str) -> dict[str, Any]:
    """A JSON file of the model's folder; empty where the folder or the file is not on this machine."""
    file = Path(model_path) / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def stored_dtype(model_path: str) -> str | None:
    """The data type that a checkpoint's config names; None where it names none."""
    config = model_json(model_path, "config")
    return config.get("dtype") or config.get("torch_dtype")


def worth_checking(facts: ServerFacts) -> list[str]:
    """Settings that surprise people, a sentence each; empty when there is none."""
    config = model_json(facts.model_path, "config")
    stored = stored_dtype(facts.model_path)
    longest = config.get("max_position_embeddings")
    notes = []
    if facts.sampling_defaults == "model" and facts.model_sampling:
        listed = ", ".join(f"{name} {value:g}" for name, value in facts.model_sampling.items())
        notes.append(
            f"a request that does not say how to sample gets the model's own defaults ({listed}); training sends its own values"
        )
    if facts.context_length and longest and facts.context_length < longest:
        notes.append(f"sequences are cut at {facts.context_length:,} tokens; the model takes {longest:,}")
    if stored and facts.dtype not in ("auto", stored):
        notes.append(f"the weights are stored as {stored} and served as {facts.dtype}")
    if "vision_config" in config and not facts.multimodal:
        notes.append(
            "the model can see images and this server takes text only: add --enable-multimodal after --"
        )
    if facts.chunked_prefill_size is not None and facts.chunked_prefill_size > 0:
        notes.append(
            f"prompts are read in chunks of {facts.chunked_prefill_size:,} tokens, which moves logprobs in the last digits; "
            "training serves with --chunked-prefill-size -1"
        )
    return notes
