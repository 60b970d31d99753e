"""Send a new LoRA adapter to the SGLang servers, through a folder; the base model stays unchanged.

    every rank                     rank 0 only                                     each server
    ---------------------------    ---------------------------------------------   -------------------------------------
    for name, tensor in adapter    adds new servers, drops dead ones
      (full_tensor: collective)    writes the folder
                                   load_lora_adapter NAME-vN                       adds it to the others, keeps sampling
                                   update_weight_version N                         reports N from now on
                                   pause_generation                                aborts requests in flight
                                   unload_lora_adapter, all but the last two
                                   compares the base model, when due               /weights_checker
                                   continue_generation

Each version of the adapter has a name of its own, so a request states which weights sample it,
whatever happens meanwhile. The server's `weight_version` still decides which servers may be used,
and determines the adapter with which an aborted request continues: it is raised once the adapter is
loaded, before requests are aborted. The previous adapter is kept for requests that start before
their client knows the new one.
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
from areal_core.rollout.errors import MalformedReply, RequestRefused, WeightUpdateFailed
from areal_core.rollout.server_pool import ServerPool
from areal_core.rollout.sglang_wire import adapter_name
from areal_core.rollout.weight_check import WeightCheck
from areal_core.rollout.weight_push import NamedTensors, from_rank_0

logger = logging.getLogger(__name__)


class AdapterUpdate:
    """A `WeightUpdate` of `engine.lora.AdapterTensors`, through files in `folder/v{version}`.

    The files are deleted once the servers have loaded them.

    Args:
        pool: the servers; None on ranks other than 0.
        folder: destination of the files; the servers must be able to read it.
        adapter: rank, scale and base model of the adapter.
        name: name of the adapter without its version.
        check: selects the updates after which the base model is compared with
            `adapter.base_model`, where that is a local folder.
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
        self._last = ""  # name of the adapter that was sent last

    def send(self, weights: NamedTensors, version: int) -> None:
        """Send the adapter's tensors as `version`. Collective, see `WeightUpdate.send`."""
        pool = self.pool
        from_rank_0(weights, None if pool is None else lambda tensors: self._send_to(pool, tensors, version))

    def _send_to(self, pool: ServerPool, tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        folder = self.folder / f"v{version}"
        name = adapter_name(self.name, version)
        try:
            pool.refresh()
            write_adapter(folder, tensors, self.adapter)
            self.check.read(read_safetensors(Path(self.adapter.base_model)), pool)
            loaded = self._load(pool, name, folder)
            pool.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
            with pool.paused():
                time.sleep(self.grace_s)
                self._unload(pool, loaded - {name, self._last})
                self.check.compare(pool, version)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._last = name

    def _load(self, pool: ServerPool, name: str, folder: Path) -> set[str]:
        """Load the folder as `name` on every server; return the names of all loaded adapters."""
        payload = {"lora_name": name, "lora_path": str(folder)}
        try:
            replies = pool.post("/load_lora_adapter", payload)
        except RequestRefused:
            # An earlier run, or an interrupted update, has left an adapter of that name; a refusal
            # for any other reason is repeated.
            self._unload(pool, {name})
            replies = pool.post("/load_lora_adapter", payload)
        loaded = [parse_loaded(body) for body in replies.values()]
        for server, names in zip(replies, loaded, strict=True):
            if name not in names:
                raise WeightUpdateFailed(
                    f"{server.address} reports the adapters {sorted(names)} after {name} was loaded"
                )
        return set().union(*loaded)

    def _unload(self, pool: ServerPool, names: Iterable[str]) -> None:
        """Unload the adapters of this run among `names`; a server without one is fine."""
        for name in names:
            if name.startswith(adapter_name(self.name, "")):
                with suppress(RequestRefused):
                    pool.post("/unload_lora_adapter", {"lora_name": name})

    def close(self) -> None:
        """Close the pool."""
        if self.pool is not None:
            self.pool.close()


def parse_loaded(body: str) -> set[str]:
    """Return the names of a server's adapters from its reply to `/load_lora_adapter`.

    Raises:
        MalformedReply: a field is missing; the message names it.
    """
    try:
        return set(json.loads(body)["loaded_adapters"])
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedReply(
            f"a /load_lora_adapter reply is not what SGLang 0.5 sends ({error!r}); it begins {body[:200]!r}"
        ) from error


def read_safetensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a checkpoint folder; nothing if the folder does not exist here."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a dict)
                yield name, tensors.get_tensor(name)
