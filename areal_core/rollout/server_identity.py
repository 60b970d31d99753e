"""What a server says of itself, and whether a run may use it: `/server_info` and `/model_info` against the run's model.

A server that was pushed to by disk names the pushed folder as its model in `/model_info`; `/server_info` keeps the one it was
started with. Neither names the size of the vocabulary, so sizes are compared where the server's `config.json` can be read here.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.rollout.errors import MalformedReply, RequestRefused, WrongServer
from areal_core.rollout.servers import Server, call

OLDEST = (0, 5, 0)  # older ones do not name the version of their weights in a reply
TOO_NEW = (0, 6, 0)  # the wire format is read from 0.5.23
ASK_TIMEOUT_S = 5.0
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")


@dataclass(frozen=True)
class ServerIdentity:
    """What a server serves."""

    version: str  # of SGLang, or the one whose routes are spoken
    model_path: str  # that it was started with
    architectures: tuple[str, ...]
    weight_version: str  # "default" until it is pushed to
    device: str  # "cpu" or "cuda"
    dtype: str  # "auto" where the model's config decides
    serves_adapters: bool


def ask_identity(server: Server, timeout_s: float = 10.0) -> ServerIdentity:
    """Asks a server.

    Raises:
        WrongServer: it has no such routes: too old, or no SGLang.
        OSError: it does not answer.
    """
    try:
        model = call(server, "GET", "/model_info", timeout_s=timeout_s)
        started = call(server, "GET", "/server_info", timeout_s=timeout_s)
        return parse_identity(model, started)
    except (MalformedReply, RuntimeError) as error:
        raise WrongServer(
            f"{server.address} is no SGLang server that this version can use ({error}); start one with sglang 0.5, "
            f"or with areal-debug serve"
        ) from error


def parse_identity(model_info: str, server_info: str) -> ServerIdentity:
    """Parses the two replies. Raises `MalformedReply` with what was missing."""
    try:
        model, started = json.loads(model_info), json.loads(server_info)
        return ServerIdentity(
            str(started["version"]),
            str(started["model_path"]),
            tuple(model["architectures"] or ()),
            str(model["weight_version"]),
            str(started["device"]),
            str(started["dtype"]),
            bool(started["enable_lora"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedReply(
            f"/model_info or /server_info is not what SGLang 0.5 sends: {error!r}"
        ) from error


def weight_version(server: Server, timeout_s: float = 5.0) -> str:
    """The version of the weights that a server holds. Raises `OSError`, `RequestRefused` or `MalformedReply`."""
    body = call(server, "GET", "/model_info", timeout_s=timeout_s)
    try:
        return str(json.loads(body)["weight_version"])
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedReply(
            f"{server.address}/model_info names no weight_version: {body[:200]!r}"
        ) from error


def ask_version(server: Server) -> str | None:
    """The same; None when a server does not say."""
    try:
        return weight_version(server, ASK_TIMEOUT_S)
    except (OSError, MalformedReply, RequestRefused):
        return None


@dataclass(frozen=True)
class RunModel:
    """The model that a run trains, as its checkpoint folder describes it."""

    path: str
    config: dict[str, Any]  # config.json; empty where the path is a hub name
    needs_adapters: bool = False  # the run pushes adapters to servers of this model


def run_model(path: str, *, needs_adapters: bool = False) -> RunModel:
    """Reads `config.json` of a checkpoint folder."""
    file = Path(path) / "config.json"
    return RunModel(path, json.loads(file.read_text()) if file.is_file() else {}, needs_adapters)


def check_identity(server: Server, identity: ServerIdentity, model: RunModel) -> None:
    """Raises `WrongServer`, one sentence, when the server speaks another version or serves another model."""
    release = tuple(int(number) for number in re.findall(r"\d+", identity.version)[:3])
    if release < OLDEST or release >= TOO_NEW:
        wrong = "too old" if release < OLDEST else "newer than this version knows"
        raise WrongServer(
            f"the server at {server.address} is SGLang {identity.version}, which is {wrong}: use 0.5 (0.5.23 is tested)"
        )
    wanted = tuple(model.config["architectures"] or ()) if "architectures" in model.config else ()
    if wanted and identity.architectures and wanted != identity.architectures:
        raise WrongServer(
            f"the server at {server.address} serves {identity.model_path}, a {' '.join(identity.architectures)}, and the "
            f"run trains {model.path}, a {' '.join(wanted)}: start the server with the run's model"
        )
    served = run_model(identity.model_path).config
    for name in SIZES:
        if name in served and name in model.config and served[name] != model.config[name]:
            raise WrongServer(
                f"the server at {server.address} serves {identity.model_path} with {name} {served[name]}, and the run trains "
                f"{model.path} with {name} {model.config[name]}: start the server with the run's model"
            )
    if model.needs_adapters and not identity.serves_adapters:
        raise WrongServer(
            f"the server at {server.address} was started without --enable-lora, and the run pushes adapters: start it with them, "
            "or set rollout.use_lora and sglang.enable_lora to false"
        )
    if not same_model(identity.model_path, model.path):
        raise WrongServer(
            f"the server at {server.address} serves {identity.model_path}, and the run trains {model.path}: start the server "
            f"with the run's model, or give both paths the same last part if they hold the same files"
        )


def why_not(server: Server, model: RunModel | None) -> str:
    """Why a server that has come may not serve a run; "" when it may."""
    try:
        if model is not None:
            check_identity(server, ask_identity(server), model)
    except (OSError, WrongServer) as error:
        return str(error)
    return ""


def same_model(one: str, other: str) -> bool:
    """Whether two paths or hub names can mean the same model: machines may mount one folder in different places."""
    return Path(one).resolve() == Path(other).resolve() or Path(one).name == Path(other).name
