"""A new adapter for the SGLang servers, through a folder; the model beneath stays as it is.

    every rank                     rank 0 only                                     each server
    ---------------------------    ---------------------------------------------   -------------------------------------
    for name, tensor in adapter    takes in new servers, drops dead ones
      (full_tensor: collective)    writes the folder
                                   load_lora_adapter NAME-vN                       keeps it beside the others, samples on
                                   update_weight_version N                         says so from now on
                                   pause_generation                                cuts what is in flight
                                   unload_lora_adapter, all but the last two
                                   compares the model beneath, when it is time     /weights_checker
                                   continue_generation

The adapter of a version has a name of its own, so a request says by which weights it is sampled, whatever happens meanwhile. The
server's `weight_version` stays the truth about who may be asked, and tells a request that was cut which adapter to go on with: it is
raised when the adapter is there, before the cut. The adapter before is kept for requests that begin before their client knows of the
new one.
"""

import json
import logging
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from areal_core.engine.lora import Adapter, write_adapter
from areal_core.rollout.errors import MalformedReply, PushFailed, RequestRefused
from areal_core.rollout.server_pool import ServerPool
from areal_core.rollout.sglang_wire import adapter_name
from areal_core.rollout.weight_check import WeightCheck
from areal_core.rollout.weight_push import NamedTensors, from_rank_0

logger = logging.getLogger(__name__)


class AdapterPush:
    """A `WeightPush` that takes `engine.lora.AdapterTensors`, writes them into `folder/v{version}`, has servers load and deletes them.

    Args:
        pool: the servers; None on ranks other than 0.
        folder: where to write; the servers must see it.
        adapter: what the tensors are.
        name: of the adapter, before its version.
        check: which pushes are followed by a comparison of the model beneath with `adapter.base_model`, where that is a folder here.
        grace_s: seconds for which the servers stay paused.
    """

    def __init__(
        self,
        pool: ServerPool | None,
        folder: Path,
        adapter: Adapter,
        name: str,
        *,
        check: WeightCheck | None = None,
        grace_s: float = 0.0,
    ) -> None:
        self.pool = pool
        self.folder = folder
        self.adapter = adapter
        self.name = name
        self.check = check or WeightCheck(every=0)
        self.grace_s = grace_s
        self._last = ""  # name of the adapter that was pushed last

    def push(self, weights: NamedTensors, version: int) -> None:
        from_rank_0(weights, None if self.pool is None else lambda tensors: self._send(tensors, version))

    def _send(self, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        folder = self.folder / f"v{version}"
        name = adapter_name(self.name, version)
        try:
            self.pool.refresh()
            write_adapter(folder, tensors, self.adapter)
            self.check.read(read_safetensors(Path(self.adapter.base_model)), self.pool)
            loaded = self._load(name, folder)
            self.pool.post(
                "/update_weight_version", {"new_version": str(version), "abort_all_requests": False}
            )
            with self.pool.paused():
                time.sleep(self.grace_s)
                self._unload(loaded - {name, self._last})
                self.check.compare(self.pool, version)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._last = name

    def _load(self, name: str, folder: Path) -> set[str]:
        """Loads the folder as `name` everywhere; the names of all adapters that some server has then."""
        payload = {"lora_name": name, "lora_path": str(folder)}
        try:
            replies = self.pool.post("/load_lora_adapter", payload)
        except RequestRefused:
            # An earlier run, or a push that broke off, has left one of that name; for any other reason it is refused again.
            self._unload({name})
            replies = self.pool.post("/load_lora_adapter", payload)
        loaded = [parse_loaded(body) for body in replies.values()]
        for server, names in zip(replies, loaded, strict=True):
            if name not in names:
                raise PushFailed(
                    f"{server.address} says that it has the adapters {sorted(names)} after {name} was loaded"
                )
        return set().union(*loaded)

    def _unload(self, names: Iterable[str]) -> None:
        """Unloads adapters of this run's name; fine where there is none."""
        for name in names:
            if name.startswith(adapter_name(self.name, "")):
                with suppress(RequestRefused):
                    self.pool.post("/unload_lora_adapter", {"lora_name": name})

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def parse_loaded(body: str) -> set[str]:
    """The names of a server's adapters, from its reply to `/load_lora_adapter`. Raises `MalformedReply` with what was missing."""
    try:
        return set(json.loads(body)["loaded_adapters"])
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedReply(
            f"a /load_lora_adapter reply is not what SGLang 0.5 sends ({error!r}); it begins {body[:200]!r}"
        ) from error


def read_safetensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint folder; none where it is not here."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                yield name, tensors.get_tensor(name)
