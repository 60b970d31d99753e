"""Runs inside vLLM's workers: receives weights from the trainer over a process group.

A server imports this file by name (`--worker-extension-cls`), in vLLM's own environment: so it
imports nothing else of this package. It registers the weight-transfer engine `areal`, which vLLM's
routes drive:

    /init_weight_transfer_engine   join the group; rank 0 of it is the trainer
    /start_weight_update           vLLM prepares its parameters for names of a checkpoint
    /update_weights                one bucket: every tensor is received and loaded by name
    /finish_weight_update          vLLM processes what was loaded, and sets the new version
    /shutdown_weight_transfer_engine   leave the group

vLLM's own engines need NCCL; this one also works with gloo.

On the CPU vLLM packs linear weights and frees them. A later reload then leaves the packed ones in
use (the server answers 200 and samples from a mixture), and checksums are those of empty tensors.
So on the CPU linear layers keep their plain weights.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

# Of layers that use their weights as they were loaded.
PLAIN = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


@dataclass
class GroupInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The group to join: this worker's rank is `rank_offset` plus its rank in the server."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str
    group_name: str
    timeout_s: float = 300.0


@dataclass
class BucketInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The tensors of one bucket, in the order in which they are sent."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class GroupTransfer(WeightTransferEngine[GroupInfo, BucketInfo]):  # type: ignore[misc]
    """Receives weights by broadcast from rank 0 of a process group."""

    init_info_cls = GroupInfo
    update_info_cls = BucketInfo
    _group: dist.ProcessGroup | None = None

    def init_transfer_engine(self, init_info: GroupInfo) -> None:
        """Join the group; leave the one before it."""
        self.shutdown()
        timeout = timedelta(seconds=init_info.timeout_s)
        host, port, size = init_info.master_address, init_info.master_port, init_info.world_size
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = TCPStore(host, port, size, is_master=False, timeout=timeout)
        # Private, but the only way to form a group of processes without a common default group.
        name = cast("GroupName", init_info.group_name)
        backend, prefixed = dist.Backend(init_info.backend), PrefixStore(name, store)
        group, _ = _new_process_group_helper(size, rank, [], backend, prefixed, name, timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)  # this process is a member
        _world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
        self._group = group

    def start_weight_update(self) -> None:
        forget_interrupted_load(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Receive and load the tensors of a bucket, one after another.

        After a failure it leaves the group, so that the trainer does not wait in it for a time-out, and
        what is not complete keeps its old weights.
        """
        bucket = zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True)
        try:
            for name, dtype, shape in bucket:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
                dist.broadcast(tensor, src=0, group=self._group)
                self.model.load_weights([(name, tensor)])
        except BaseException:
            self.shutdown()
            forget_interrupted_load(self.model)
            raise

    def finish_weight_update(self) -> None:
        keep_what_was_not_sent(self.model)
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


class WorkerExtension:
    """Added to vLLM's worker class, whose methods it may call."""

    def load_checkpoint(self: Any, folder: str) -> None:
        forget_interrupted_load(self.model_runner.get_model())
        self.reload_weights(weights_path=folder)


def forget_interrupted_load(model: torch.nn.Module) -> None:
    """Put the parameters back that wait for the rest of their weights.

    vLLM keeps the tensors of a load that failed, and would take them for those of the next one: a
    fused layer would be complete before all of its new tensors have arrived.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            _place_kernel_tensors(layer, info)
            info.reset()


def keep_what_was_not_sent(model: torch.nn.Module) -> None:
    """Load what arrived of a layer into its old weights, where a part of them did not arrive.

    An update may have `q_proj` and not `k_proj`, which vLLM fuses: it would take memory without values
    for the rest. Layers whose weights are changed after loading, such as quantised ones and
    experts, are left to vLLM: an update must have all of one.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        method = type(getattr(layer, "quant_method", None))
        if method not in PLAIN or not info.can_load() or not 0 < info.load_numel < info.load_numel_total:
            continue
        arrived = info.loaded_weights
        _place_kernel_tensors(layer, info)
        info.reset()
        for name, arguments in arrived:
            parameter = getattr(layer, name)
            arguments.arguments["param"] = parameter
            _get_original_loader(parameter)(*arguments.args, **arguments.kwargs)


def keep_plain_weights(layer: Any, remove_weight: bool) -> None:
    if layer.weight.ndim == 2:
        layer.cpu_linear = torch.nn.functional.linear
    else:
        packed(layer, remove_weight)


WeightTransferEngineFactory.register_engine("areal", GroupTransfer)
if current_platform.is_cpu():
    packed = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = keep_plain_weights
