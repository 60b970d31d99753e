"""Weight updates of an embedded server, from a folder or by broadcast; and weight checksums.

Every method takes the JSON body of the route that it answers (`http_server.py`), and runs on its
own thread. Rank 0 of the trainer forms the process group.

An adapter is merged into the weights, so there is one at a time: a new one replaces the last when
the weights get a new version, or when a request names it. A request that names another one, or
none, is refused, as SGLang refuses an adapter that is not loaded.
"""

import json
from collections.abc import Collection, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal_core.embedded.engine import InterruptibleSampler
from areal_core.embedded.replica import Replica
from areal_core.embedded.wire import BadRequest, succeeded, take
from areal_core.engine.lora import FILE_PREFIX, merged_weight
from areal_core.servers.update_group import form_group
from areal_core.servers.verification import sha256_of
from areal_core.servers.weight_update import read_safetensors

GROUP_TIMEOUT = timedelta(seconds=300)


class ServedWeights:
    """The weights of a server and the routes that update them."""

    def __init__(self, replica: Replica, sampler: InterruptibleSampler) -> None:
        self._replica = replica
        self._sampler = sampler
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._in_session = False
        self._adapter: str | None = None
        self._adapter_of: dict[str, str | None] = {}  # by version
        self._beneath: dict[str, Tensor] = {}  # the weights that the adapter was merged into
        # An adapter that was loaded and is not merged yet.
        self._next: tuple[str, dict[str, Tensor]] | None = None

    def load_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        self._sampler.load(
            tensors_of(Path(take(body, "model_path", str))), take(body, "weight_version", str, None)
        )
        self._adapter, self._next, self._beneath = None, None, {}
        return succeeded("Succeeded to update model weights.")

    def load_adapter(self, body: dict[str, Any]) -> dict[str, Any]:
        name, folder = take(body, "lora_name", str), Path(take(body, "lora_path", str))
        if name == self._adapter:
            raise BadRequest(f"Failed to load LoRA adapter {name} because it is already loaded")
        layers, scaling = read_adapter(folder)
        held = dict(self._replica.model.named_parameters())
        if unknown := set(layers) - set(held):
            raise BadRequest(
                f"the model has no {', '.join(sorted(unknown))}, of which {folder} is an adapter"
            )
        self._beneath |= {n: held[n].detach().clone() for n in layers if n not in self._beneath}
        self._next = (
            name,
            {n: merged_weight(self._beneath[n], *parts, scaling) for n, parts in layers.items()},
        )
        return {**succeeded(""), "loaded_adapters": {name: str(folder)}}

    def unload_adapter(self, body: dict[str, Any]) -> dict[str, Any]:
        if (name := take(body, "lora_name", str)) != self._adapter:
            raise BadRequest(f"LoRA with name {name} does not exist")
        self._merge(None, {}, None)
        return {**succeeded(""), "loaded_adapters": {}}

    def _merge(self, name: str | None, merged: dict[str, Tensor], version: str | None) -> None:
        self._sampler.load(iter((self._beneath | merged).items()), version, in_flight="abort")
        self._adapter, self._next = name, None
        self._adapter_of[self._sampler.version] = name

    def check_adapter(self, name: str | None, versions: Collection[str] = ()) -> None:
        """Raise `BadRequest` unless the adapter is merged now, or was in all of `versions`."""
        if self._next is not None and self._next[0] == name:
            self._merge(*self._next, None)
        held = {self._adapter_of.get(version) for version in versions} or {self._adapter}
        if held != {name}:
            raise BadRequest(f"the request names the LoRA adapter {name}, and the server has {self._adapter}")

    def rename_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        version = take(body, "new_version", str)
        if self._next is not None:
            self._merge(*self._next, version)
        else:
            self._sampler.load(iter(()), version)
            self._adapter_of[self._sampler.version] = self._adapter
        return succeeded(f"Weight version updated to {version}")

    def check_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("action", "checksum") != "checksum":
            raise BadRequest(f"action is {body['action']!r}; the embedded engine supports 'checksum'")
        held = dict(self._replica.model.named_parameters()) | self._beneath
        rank = {
            "checksums": {name: sha256_of(tensor) for name, tensor in held.items()},
            "parallelism_info": [{"role": "target", "tp_rank": 0, "tp_size": 1, "pp_size": 1}],
        }
        return {**succeeded("Success."), "ranks": [rank]}

    def join_group(self, body: dict[str, Any]) -> dict[str, Any]:
        name, world_size = take(body, "group_name", str), take(body, "world_size", int)
        # Documented by torch, but not in its __all__.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            take(body, "master_address", str),
            take(body, "master_port", int),
            world_size,
            wait_for_workers=False,
            timeout=GROUP_TIMEOUT,
        )
        self._groups[name] = form_group(
            store, take(body, "rank_offset", int), world_size, take(body, "backend", str), name, GROUP_TIMEOUT
        )
        return succeeded("Succeeded to initialize custom process group.")

    def leave_group(self, body: dict[str, Any]) -> dict[str, Any]:
        name = take(body, "group_name", str)
        if (group := self._groups.pop(name, None)) is None:
            raise BadRequest(f"no group {name!r}")
        dist.destroy_process_group(group)
        return succeeded("Succeeded to destroy custom process group.")

    def _group(self, name: str) -> dist.ProcessGroup:
        if name not in self._groups:
            raise BadRequest(f"no group {name!r}")
        return self._groups[name]

    def begin_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._in_session:
            raise BadRequest("a weight-update session is already open; call end_weight_update() first")
        self._in_session = True
        return succeeded("Success")

    def load_from_group(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._in_session:
            raise BadRequest(
                "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        try:
            tensors = list(received(self._group(take(body, "group_name", str)), body))
        except RuntimeError as error:  # the other end is gone
            raise BadRequest(f"Failed to receive weights: {error}") from error
        self._sampler.load(iter(tensors), take(body, "weight_version", str, None))
        return succeeded("Succeeded to update parameter online.")

    def end_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._in_session:
            raise BadRequest("no weight-update session is open; call begin_weight_update() first")
        self._in_session = False
        return succeeded("Success")


def tensors_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint folder. Raises `BadRequest` if there is none."""
    if not any(folder.glob("*.safetensors")):
        raise BadRequest(f"no safetensors files in {folder}")
    return read_safetensors(folder)


def read_adapter(folder: Path) -> tuple[dict[str, tuple[Tensor, Tensor]], float]:
    """Return (A, B) by the name of the adapted weight, and the factor on B A.

    Raises `BadRequest`.
    """
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        scaling = config["lora_alpha"] / config["r"]
    except (OSError, KeyError, ValueError) as error:
        raise BadRequest(f"{folder} has no adapter_config.json of a LoRA adapter: {error!r}") from error
    tensors = {name.removeprefix(FILE_PREFIX): tensor for name, tensor in tensors_of(folder)}
    layers = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    if set(tensors) != {f"{layer}.lora_{part}.weight" for layer in layers for part in "AB"}:
        raise BadRequest(f"{folder} contains other tensors than lora_A.weight and lora_B.weight of layers")
    return {
        f"{layer}.weight": (tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"])
        for layer in layers
    }, scaling


def received(group: dist.ProcessGroup, body: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that rank 0 of the group broadcasts, in order."""
    names, dtypes, shapes = (take(body, name, list) for name in ("names", "dtypes", "shapes"))
    if not len(names) == len(dtypes) == len(shapes):
        raise BadRequest("names, dtypes and shapes must be lists of the same length")
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if not isinstance(dtype := getattr(torch, str(dtype), None), torch.dtype):
            raise BadRequest(f"the dtype of {name} is not one of torch")
        tensor = torch.empty(shape, dtype=dtype)
        dist.broadcast(tensor, src=0, group=group)
        yield name, tensor
