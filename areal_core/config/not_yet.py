"""Options of upstream that load but are not supported: one table, so none is ignored silently."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any


@dataclass(frozen=True)
class NotYet:
    """An option that loads, but whose feature is not supported.

    `harmless` lists the values that change nothing. Any other is refused or, if it cannot affect
    training, noted.
    """

    option: str
    harmless: tuple[Any, ...]
    instead: str
    refused: bool = True


NOT_YET = (
    NotYet("gconfig.use_beam_search", (False,), "only sampling is supported: set it to false"),
    NotYet("*.use_kernels", (False,), "kernels are not fetched from the hub: set it to false; use_liger has fused ones"),
    NotYet("*.enable_tree_training", (False,), "tree training is not supported: set it to false"),
    NotYet("*.fsdp.shard_vision_across_sp", (False,), "vision models are not supported: set it to false"),
    NotYet("rollout.return_routed_experts", (False,), "routing is not replayed: set it to false"),
    NotYet("sglang.enable_ep_moe", (False,), "SGLang 0.5.23 has no such flag: use sglang.ep_size"),
    NotYet("sglang.enable_deepep_moe", (False,), "SGLang 0.5.23 has no such flag: set it to false"),
    NotYet("sglang.enable_fast_load", (False,), "SGLang 0.5.23 has no such flag: set it to false"),
    NotYet("sglang.torchao_config", ("",), "SGLang 0.5.23 has no such flag: leave it empty"),
    NotYet("sglang.cuda_graph_max_bs", (None,), "SGLang 0.5.23 calls it sglang.cuda_graph_max_bs_decode"),
    NotYet("sglang.cuda_graph_bs", (None,), "SGLang 0.5.23 calls it sglang.cuda_graph_bs_decode"),
    NotYet("train_dataset.drop_last", (True,), "only full batches are trained: set it to true"),
    NotYet("actor.log_agent_stats", (False,), "agents' own statistics are not logged", refused=False),
    NotYet("*.pad_to_maximum", (False,), "micro-batches are not padded; results do not change", refused=False),
    NotYet("*.fsdp.optim_step_prefetch_layers", (1,), "the states of a layer are fetched when it is stepped", refused=False),
    NotYet("memory_profiler", (None,), "memory snapshots are not written", refused=False),
    NotYet("cluster.name_resolve.type", ("nfs",), "names are files below its nfs_record_root", refused=False),
    NotYet("vllm", (None,), "there is no vLLM client; the section is ignored", refused=False),
    NotYet("stats_logger.swanlab.mode", ("disabled", None), "use stats.jsonl, TensorBoard, Weights & Biases or Trackio", refused=False),
)  # fmt: skip


def not_yet(values: dict[str, Any], refused: bool) -> Iterator[str]:
    """Yield one sentence for each option whose value requests a feature that is not supported."""
    for row in NOT_YET:
        if row.refused != refused:
            continue
        for name, value in values.items():
            if fnmatch(name, row.option) and value not in row.harmless:
                shown = "given" if dataclasses.is_dataclass(value) or isinstance(value, dict) else repr(value)
                yield f"{name} is {shown}, which is not available: {row.instead}"
