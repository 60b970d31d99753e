"""The order in which the rules are applied: what explains more comes first, `unknown` last."""

from types import ModuleType

from hangdoctor.rules import (
    checkpoint_stall,
    cleanup_deadlock,
    collective_mismatch,
    dataloader_stall,
    external_wait,
    init_deadlock,
    lock_deadlock,
    missing_rank,
    nccl_timeout,
    p2p_shape_mismatch,
    partial_exception,
    straggler_or_not_hung,
    unknown,
)

RULES: tuple[ModuleType, ...] = (
    straggler_or_not_hung,
    missing_rank,
    init_deadlock,
    cleanup_deadlock,
    lock_deadlock,
    dataloader_stall,
    partial_exception,
    checkpoint_stall,
    external_wait,
    p2p_shape_mismatch,
    collective_mismatch,
    nccl_timeout,
    unknown,
)
