"""The properties of a running server, and settings to check before an agent is debugged against it.

Everything is read from the server (`/server_info`, `/model_info`), not from the command line:
servers change what was requested.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.servers.server import Server, call

SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ServerFacts:
    """A server as it runs; None where it reports nothing.

    `model_sampling` is from the model's folder. `sampling_defaults` is "model" if requests without
    a temperature get the model's, "openai" if they get 1.0.
    """

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
    sampling_defaults: str | None
    model_sampling: dict[str, float]
    num_cache_tokens: int | None


def read_facts(server: Server) -> ServerFacts:
    """Query a healthy server. Raises `RequestRefused` or `OSError`."""
    return parse_facts(
        server.address,
        json.loads(call(server, "GET", "/server_info", timeout_s=10.0)),
        json.loads(call(server, "GET", "/model_info", timeout_s=10.0)),
    )


def parse_facts(address: str, server: dict[str, Any], model: dict[str, Any]) -> ServerFacts:
    """Parse the replies of `/server_info` and `/model_info`; missing fields are None."""
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
    """Read a JSON file of the model's folder; empty if it is not on this machine."""
    file = Path(model_path) / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return found


def stored_dtype(model_path: str) -> str | None:
    """Return the data type in a checkpoint's config, or None."""
    config = model_json(model_path, "config")
    return config.get("dtype") or config.get("torch_dtype")


def worth_checking(facts: ServerFacts) -> list[str]:
    """Return settings that are often not intended, one sentence each."""
    config = model_json(facts.model_path, "config")
    stored = stored_dtype(facts.model_path)
    longest = config.get("max_position_embeddings")
    notes = []
    if facts.sampling_defaults == "model" and facts.model_sampling:
        listed = ", ".join(f"{name} {value:g}" for name, value in facts.model_sampling.items())
        notes.append(
            f"a request without sampling parameters gets the model's own defaults ({listed}); training sends its own values"
        )
    if facts.context_length and longest and facts.context_length < longest:
        notes.append(
            f"sequences are truncated at {facts.context_length:,} tokens; the model supports {longest:,}"
        )
    if stored and facts.dtype not in ("auto", stored):
        notes.append(f"the weights are stored as {stored} and served as {facts.dtype}")
    if "vision_config" in config and not facts.multimodal and not facts.version.startswith("embedded"):
        notes.append(
            "the model supports images and this server takes text only: add --enable-multimodal after --"
        )
    if facts.chunked_prefill_size is not None and facts.chunked_prefill_size > 0:
        notes.append(
            f"prompts are prefilled in chunks of {facts.chunked_prefill_size:,} tokens, which changes the last digits of logprobs; "
            "training serves with --chunked-prefill-size -1"
        )
    return notes
