"""States of data sources resharded to another number of ranks: no prompt is lost or repeated."""

from typing import Any

from areal_core.dataset.loader import PromptOrder

State = dict[str, Any]


def reshard(states: list[State], num_ranks: int) -> list[State]:
    """Return the states of `num_ranks` sources, from those of all data-parallel ranks of a run.

    The sources of replays have no state. The state of a loader is the same on all ranks. With live
    rollouts some ranks may be ahead, and all have prompts in flight: the prompts that the run has
    not trained on yet are distributed round-robin, in the run's order.
    """
    if not states[0]:
        return [{}] * num_ranks
    if "loader" not in states[0]:
        return [states[0]] * num_ranks
    loaders = [state["loader"] for state in states]
    most = max(loader["num_batches"] for loader in loaders)
    order = PromptOrder(**{name: value for name, value in loaders[0].items() if name != "num_batches"})
    waiting = {prompt_id for state in states for prompt_id in state["prompts"]}
    for rank, loader in enumerate(loaders):
        for batch in range(loader["num_batches"], most):
            waiting.update(order.prompt_ids(batch)[rank :: len(loaders)])
    counts = [state.get("counts", {}) for state in states]
    return [
        {
            "loader": loaders[0] | {"num_batches": most},
            "prompts": sorted(waiting)[rank::num_ranks],
            "counts": {
                name: _share(sum(of_rank[name] for of_rank in counts), rank, num_ranks) for name in counts[0]
            },
        }
        for rank in range(num_ranks)
    ]


def _share(total: int, rank: int, num_ranks: int) -> int:
    return total // num_ranks + (rank < total % num_ranks)
