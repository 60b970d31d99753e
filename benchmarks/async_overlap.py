"""Wall time of synchronous and asynchronous training, compared with what the overlap allows.

    python benchmarks/async_overlap.py [--steps 12] [--train-s 0.25] [--ahead 0 1 2 4]

Lengths of completions have a long tail. Generation and training only sleep (two cores cannot
overlap real work), for the same times in every run. The bound is computed: the same pipeline on an
event loop with a virtual clock, where only sleeping takes time. Prints one line per setting and one
JSON line; the goal is at least 0.9 of the computed speed-up at each.
"""

import argparse
import asyncio
import json
import math
import random
import time

from areal_core.data.batch import Batch
from areal_core.rollout.episodes import Plan
from areal_core.rollout.pipeline import Executor, Pipeline
from areal_core.rollout.staleness import StalenessControl
from areal_core.rollout.types import ModelRequest, Sampling, TokenSampler
from areal_core.rollout.workflow import episode_tensors
from areal_core.testing import ScriptedEngine
from areal_core.trainer.live import LiveRollouts

GOAL = 0.9
BATCH_SIZE, N_SAMPLES, MAX_CONCURRENT = 8, 4, 16


def duration_s(request: ModelRequest) -> float:
    """Return a log-normal duration around 60 ms: one in a hundred takes ten times as long."""
    name = (request.metadata["prompt_id"], request.metadata["sample_id"])
    return 0.06 * math.exp(random.Random(str(name)).gauss(0, 1))


class OneCompletion:
    """A workflow of one completion, without a reward."""

    async def arun_episode(self, engine: TokenSampler, data: dict[str, int]) -> Batch:
        request = ModelRequest(input_ids=[data["number"]], sampling=Sampling())
        return episode_tensors(await engine.agenerate(request), 0.0)


class Numbers:
    """Prompts 0, 1, ...: a loader and a feed."""

    def __init__(self) -> None:
        self.num_taken = 0

    def take(self) -> tuple[int, dict[str, int]]:
        self.num_taken += 1
        return self.num_taken - 1, {"number": self.num_taken - 1}

    def next_batch(self) -> list[tuple[int, dict[str, int]]]:
        return [self.take()]


def measured_s(ahead: int, num_steps: int, train_s: float) -> float:
    """Return the seconds of a run through the executor's thread."""
    control = StalenessControl(BATCH_SIZE, MAX_CONCURRENT, ahead, num_steps)
    executor = Executor(ScriptedEngine(duration_s=duration_s), control)
    rollouts = LiveRollouts(executor, Numbers(), OneCompletion(), n_samples=N_SAMPLES)
    began = time.perf_counter()
    for step in range(num_steps):
        rollouts.next_batch(step, step)
        time.sleep(train_s)
        rollouts.update_weights(None, step + 1)
    elapsed_s = time.perf_counter() - began
    rollouts.close()
    return elapsed_s


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to its next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now_s = max(self.now_s, self._scheduled[0].when())
        super()._run_once()


def computed_s(ahead: int, num_steps: int, train_s: float) -> float:
    """Return the seconds of the same run if only sleeping took time."""

    async def run() -> float:
        engine = ScriptedEngine(duration_s=duration_s)
        pipeline = Pipeline(engine, StalenessControl(BATCH_SIZE, MAX_CONCURRENT, ahead, num_steps))
        feed, plan = Numbers(), Plan(OneCompletion(), N_SAMPLES)
        for step in range(num_steps):
            await pipeline.prepare(feed, plan, None)
            await asyncio.sleep(train_s)
            engine.set_version(step + 1)
            await pipeline.set_version(step + 1)
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--train-s", type=float, default=0.25)
    parser.add_argument("--ahead", type=int, nargs="+", default=[0, 1, 2, 4])
    options = parser.parse_args()
    rows = []
    for ahead in options.ahead:
        times = (options.steps, options.train_s)
        rows.append(
            {"ahead": ahead, "measured_s": measured_s(ahead, *times), "computed_s": computed_s(ahead, *times)}
        )
        for kind in ("measured", "computed"):
            rows[-1][f"{kind}_speedup"] = rows[0][f"{kind}_s"] / rows[-1][f"{kind}_s"]
        print("  ".join(f"{name} {value:.3g}" for name, value in rows[-1].items()), flush=True)
    reached = min(row["measured_speedup"] / row["computed_speedup"] for row in rows)
    print(
        json.dumps(
            {
                "settings": rows,
                "least_share_of_speedup": round(reached, 3),
                "goal": GOAL,
                "reached": reached >= GOAL,
            }
        )
    )


if __name__ == "__main__":
    main()
