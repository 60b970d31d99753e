"""The wire of each engine that an allocation may name."""

from areal_core.config.allocation import Allocation
from areal_core.servers.sglang import SGLANG
from areal_core.servers.vllm import VLLM
from areal_core.servers.wire import Wire


def wire_of(allocation: Allocation) -> Wire:
    """Return the routes of the allocation's servers; SGLang's where it has none."""
    return VLLM if allocation.rollout_backend == "vllm" else SGLANG
