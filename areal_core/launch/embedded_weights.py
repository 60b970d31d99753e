"""How an embedded server gets new weights: from a folder, or by broadcast in a group that rank 0 of a trainer forms; and its checksums.

Every method takes the JSON of the route that it answers (`embedded_server.py`), and runs on a thread of its own.
"""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from areal_core.engine.replica import Replica
from areal_core.launch.embedded_wire import BadRequest, succeeded
from areal_core.rollout.interruptible import InterruptibleSampler
from areal_core.rollout.update_group import form_group
from areal_core.rollout.weight_checksums import sha256_of

GROUP_TIMEOUT = timedelta(seconds=300)


class ServedWeights:
    """The weights of a server, and the ways in which they are replaced."""

    def __init__(self, replica: Replica, sampler: InterruptibleSampler) -> None:
        self._replica = replica
        self._sampler = sampler
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._in_session = False

    def load_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        self._sampler.load(read_safetensors(Path(body["model_path"])), body.get("weight_version"))
        return succeeded("Succeeded to update model weights.")

    def rename_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        self._sampler.load(iter(()), body["new_version"])
        return succeeded(f"Weight version updated to {body['new_version']}")

    def check_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("action", "checksum") != "checksum":
            raise BadRequest(f"action is {body['action']!r}; the embedded engine knows 'checksum'")
        rank = {
            "checksums": {name: sha256_of(p) for name, p in self._replica.model.named_parameters()},
            "parallelism_info": [{"role": "target", "tp_rank": 0, "tp_size": 1, "pp_size": 1}],
        }
        return {**succeeded("Success."), "ranks": [rank]}

    def join_group(self, body: dict[str, Any]) -> dict[str, Any]:
        name, world_size = body["group_name"], body["world_size"]
        store = dist.TCPStore(
            body["master_address"],
            int(body["master_port"]),
            world_size,
            wait_for_workers=False,
            timeout=GROUP_TIMEOUT,
        )
        self._groups[name] = form_group(
            store, body["rank_offset"], world_size, body["backend"], name, GROUP_TIMEOUT
        )
        return succeeded("Succeeded to initialize custom process group.")

    def leave_group(self, body: dict[str, Any]) -> dict[str, Any]:
        if (group := self._groups.pop(body["group_name"], None)) is None:
            raise BadRequest(f"no group {body['group_name']!r}")
        dist.destroy_process_group(group)
        return succeeded("Succeeded to destroy custom process group.")

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
            tensors = list(received(self._groups[body["group_name"]], body))
        except RuntimeError as error:  # the other end has gone
            raise BadRequest(f"Failed to receive weights: {error}") from error
        self._sampler.load(iter(tensors), body.get("weight_version"))
        return succeeded("Succeeded to update parameter online.")

    def end_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._in_session:
            raise BadRequest("no weight-update session is open; call begin_weight_update() first")
        self._in_session = False
        return succeeded("Success")


def read_safetensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint folder. Raises `BadRequest` when it holds none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadRequest(f"no safetensors files in {folder}")
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                yield name, tensors.get_tensor(name)


def received(group: dist.ProcessGroup, body: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that rank 0 of the group broadcasts, in order."""
    for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(tensor, src=0, group=group)
        yield name, tensor
