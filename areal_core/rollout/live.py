"""Batches sampled now: a loader's prompts, run as concurrent episodes on one event loop, in canonical order.

    trainer thread                        rollout thread (event loop)
    next_batch ---- prompts ------------> one task per (prompt, sample) --> engine, reward
        waits for all tasks <------------ rows
    update_weights: all ranks, no episode is running then

The first episode that raises cancels the others, and its exception ends `next_batch`: a bug in a reward is never a
rejected sample.
"""

import asyncio
import threading
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from areal_core.batch import pad_and_concat, sort_canonical
from areal_core.rollout.engine import InferenceEngine
from areal_core.rollout.errors import NothingAccepted
from areal_core.rollout.source import TrainedWeights
from areal_core.rollout.types import ModelRequest, ModelResponse
from areal_core.rollout.weight_push import WeightPush
from areal_core.rollout.workflow import RolloutWorkflow


class PromptLoader(Protocol):
    """This data-parallel rank's share of the prompts."""

    def next_batch(self) -> list[tuple[int, dict[str, Any]]]:
        """The next `(prompt_id, row)` pairs."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class EpisodeEngine:
    """The engine as one episode sees it: stamps the requests with the episode's name and the count of its turns."""

    def __init__(self, engine: InferenceEngine, prompt_id: int, sample_id: int) -> None:
        self.prompt_id = prompt_id
        self.sample_id = sample_id
        self._engine = engine
        self._turn = 0

    @property
    def version(self) -> int:
        return self._engine.version

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        name = {"prompt_id": self.prompt_id, "sample_id": self.sample_id, "turn": self._turn}
        self._turn += 1
        return await self._engine.agenerate(replace(req, metadata={**name, **req.metadata}))


class LiveRollouts:
    """A `RolloutSource` that samples with an inference engine.

    Args:
        loader: gives the prompts of each step.
        workflow: runs one episode.
        engine: samples tokens.
        push: brings new weights to the engine; None when the engine reads the trainer's own.
        n_samples: episodes per prompt.
        max_concurrent: most episodes at a time; None for no limit.
    """

    def __init__(
        self,
        loader: PromptLoader,
        workflow: RolloutWorkflow,
        engine: InferenceEngine,
        push: WeightPush | None = None,
        *,
        n_samples: int = 1,
        max_concurrent: int | None = None,
    ) -> None:
        self.loader = loader
        self.workflow = workflow
        self.engine = engine
        self.push = push
        self.n_samples = n_samples
        self.max_concurrent = max_concurrent
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()

    def next_batch(self, step: int, version: int) -> dict[str, Tensor]:
        """Samples the next prompts. Raises the first exception of any episode, with a note that names it."""
        rows = self._run(self._episodes(self.loader.next_batch()))
        if not rows:
            raise NothingAccepted(
                f"the workflow rejected every episode of step {step} (version {version}): "
                f"let it accept more, or look at the rewards of this step's prompts"
            )
        return sort_canonical(pad_and_concat(rows))

    def update_weights(self, engine: TrainedWeights, version: int) -> None:
        # Collective: every rank enters the push, though only rank 0 talks to the servers.
        if self.push is not None:
            self.push.push(engine.named_full_tensors(), version)
        self.engine.set_version(version)

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state["loader"])

    def close(self) -> None:
        if self.push is not None:
            self.push.close()
        self.engine.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Any) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    async def _episodes(self, prompts: list[tuple[int, dict[str, Any]]]) -> list[dict[str, Tensor]]:
        names = [(prompt_id, sample_id) for prompt_id, _ in prompts for sample_id in range(self.n_samples)]
        data = dict(prompts)
        room = asyncio.Semaphore(self.max_concurrent or len(names))
        tasks = [asyncio.create_task(self._episode(room, p, s, data[p])) for p, s in names]
        try:
            episodes = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        # An episode of several rows (one per turn, say) owns as many sample ids as the longest one has rows.
        stride = max((len(rows["input_ids"]) for rows in episodes if rows is not None), default=1)
        return [
            stamp(rows, prompt_id, sample_id * stride)
            for (prompt_id, sample_id), rows in zip(names, episodes, strict=True)
            if rows is not None
        ]

    async def _episode(
        self, room: asyncio.Semaphore, prompt_id: int, sample_id: int, data: dict[str, Any]
    ) -> dict[str, Tensor] | None:
        async with room:
            try:
                return await self.workflow.arun_episode(
                    EpisodeEngine(self.engine, prompt_id, sample_id), data
                )
            except Exception as error:
                error.add_note(f"in the episode of prompt {prompt_id}, sample {sample_id}")
                raise


def stamp(rows: dict[str, Tensor], prompt_id: int, first_sample_id: int) -> dict[str, Tensor]:
    """Adds `prompt_id` int64 [n] and `sample_id` int32 [n], counted from the first, to the n rows of an episode."""
    num_rows = len(rows["input_ids"])
    return {
        **rows,
        "prompt_id": torch.full((num_rows,), prompt_id, dtype=torch.int64),
        "sample_id": torch.arange(first_sample_id, first_sample_id + num_rows, dtype=torch.int32),
    }
