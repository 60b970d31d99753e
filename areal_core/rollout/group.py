"""A prompt in flight with all its samples: started, accepted and consumed as a unit."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from areal_core.batch import Batch
from areal_core.dataset.tokens import Row
from areal_core.rollout.episode import EpisodeEngine, assemble
from areal_core.rollout.workflow import RolloutWorkflow

AcceptFn = Callable[[Batch], bool]  # all rows of one prompt -> whether to train on them


@dataclass(frozen=True)
class Plan:
    """The episodes of a prompt: `n_samples` of a workflow, all dropped unless `should_accept`."""

    workflow: RolloutWorkflow
    n_samples: int = 1
    should_accept: AcceptFn | None = None


@dataclass(eq=False)
class Group:
    """One prompt in flight, or finished."""

    task_id: int
    prompt_id: int
    data: Row
    plan: Plan
    from_feed: bool = False
    version: int = -1  # at the start; once finished, that of the oldest token
    task: asyncio.Task[None] | None = None
    episodes: list[EpisodeEngine] = field(default_factory=list)
    rows: list[Batch | None] | None = None  # per episode; None unless accepted

    def batch(self) -> Batch | None:
        """Return the accepted rows in canonical order; None if the prompt was not accepted."""
        return None if self.rows is None else assemble([(self.prompt_id, self.rows)])


def is_accepted(prompt_id: int, rows: Sequence[Batch | None], plan: Plan) -> bool:
    """Return `should_accept` of a prompt's rows.

    Its exception gets a note that names the prompt.
    """
    if plan.should_accept is None:
        return True
    try:
        return bool(plan.should_accept(assemble([(prompt_id, rows)])))
    except Exception as error:
        error.add_note(f"in should_accept_fn for prompt {prompt_id}")
        raise
