"""The wire of each engine that an allocation may name."""

from areal_core.allocation import Allocation
from areal_core.rollout.fleet.wire import Wire
from areal_core.sglang.wire import SGLANG
from areal_core.vllm.wire import VLLM


def wire_of(allocation: Allocation) -> Wire:
    """Return the routes of the allocation's servers; SGLang's where it has none."""
    return VLLM if allocation.rollout_backend == "vllm" else SGLANG
