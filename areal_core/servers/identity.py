"""The model that a server serves, and whether it is the run's.

Servers report no size of the vocabulary, so sizes are compared where the server's `config.json` can
be read here.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_core.rollout.errors import WrongServer
from areal_core.servers.server import Server

Release = tuple[int, ...]
# Fields of config.json that must agree between the server's model and the run's.
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")


@dataclass(frozen=True)
class ServerIdentity:
    """The model and options that a server reports."""

    version: str  # of the engine, or of the engine whose routes the server implements
    model_path: str  # the model with which it was started
    architectures: tuple[str, ...]
    weight_version: str  # "default" before the first weight update
    device: str  # "cpu" or "cuda"
    dtype: str  # "auto" if the model's config defines it
    serves_adapters: bool | None  # None if the server does not report it
    num_devices: int = 1  # that one copy of the model is split over


@dataclass(frozen=True)
class RunModel:
    """The model that a run trains, as described by its checkpoint folder."""

    path: str
    config: dict[str, Any]  # config.json; empty where the path is a hub name
    needs_adapters: bool = False  # the run sends adapters to servers of this model

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids of the model; None if it is not known."""
        return self.config.get("vocab_size", self.config.get("text_config", {}).get("vocab_size"))


def run_model(path: str, *, needs_adapters: bool = False) -> RunModel:
    """Read `config.json` of a checkpoint folder."""
    file = Path(path) / "config.json"
    return RunModel(path, json.loads(file.read_text()) if file.is_file() else {}, needs_adapters)


def check_release(
    server: Server, engine: str, version: str, oldest: Release, too_new: Release, tested: str
) -> None:
    """Raise `WrongServer` if the server's release is older or newer than the known ones."""
    release = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if not oldest <= release < too_new:
        wrong = "too old" if release < oldest else "newer than this version knows"
        raise WrongServer(
            f"the server at {server.address} is {engine} {version}, which is {wrong}: use {tested}"
        )


def check_model(server: Server, identity: ServerIdentity, model: RunModel, adapters_flag: str) -> None:
    """Raise `WrongServer` if the server serves another model.

    Args:
        adapters_flag: the engine's option for adapters, for the message.
    """
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
    if model.needs_adapters and identity.serves_adapters is False:
        raise WrongServer(
            f"the server at {server.address} was started without {adapters_flag}, and the run sends adapters: start it with that option, "
            "or set rollout.use_lora and sglang.enable_lora to false"
        )
    if not same_model(identity.model_path, model.path):
        raise WrongServer(
            f"the server at {server.address} serves {identity.model_path}, and the run trains {model.path}: start the server "
            f"with the run's model, or give both paths the same last component if they hold the same files"
        )


def same_model(one: str, other: str) -> bool:
    """Return whether two paths or hub names can mean the same model.

    Machines may mount one folder in different places, so equal last components suffice.
    """
    return Path(one).resolve() == Path(other).resolve() or Path(one).name == Path(other).name
