"""A run that only evaluates: samples of the validation rows by one or more models, no optimizer.

The trainer does this in place of training if the allocation has "eval" in place of a trainer. A
server starts once and loads one checkpoint after another; the embedded engine is built for each. So
every model answers the same prompts with the same sampling options, and results can be compared
prompt by prompt.

With a section `reward_model` each sample also has the score of that model. The folder of results is
in `evaluation.py`.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from areal_core.config import GenerationHyperparameters, PPOConfig
from areal_core.data.batch import Batch
from areal_core.data.processor import VisionProcessor
from areal_core.engine.ranks import Ranks
from areal_core.launch.job import served_model
from areal_core.rollout.loop_thread import LoopThread
from areal_core.rollout.pipeline import Executor
from areal_core.rollout.staleness import StalenessControl
from areal_core.rollout.types import EpisodeSampler, InferenceEngine
from areal_core.rollout.workflow import RolloutWorkflow, text_lines
from areal_core.servers.discovery import wait_until_ready
from areal_core.servers.wires import wire_of
from areal_core.telemetry.stats import Stats
from areal_core.trainer import build_rollouts
from areal_core.trainer.evaluation import EvaluationResults, complete_model, evaluated_models, log_samples
from areal_core.trainer.scored_rollouts import SCORE, RewardModel

PROGRESS_S = 10.0


@dataclass(frozen=True)
class Model:
    """A model that is loaded into `engine`; tokens that it samples have this `version`."""

    path: str
    version: int
    engine: InferenceEngine


def load_models(
    config: PPOConfig, ranks: Ranks, tokenizer: PreTrainedTokenizerBase, processor: VisionProcessor | None
) -> Generator[Model]:
    """Load one model of the run after another; each stays until the next one is requested.

    Raises:
        NoServers, ServerDied, WrongServer: of the servers.
        RequestRefused: every server refuses a checkpoint, for example of other shapes.
        ModelError: the embedded engine cannot load it.
    """
    if config.allocation.has_servers:
        yield from load_on_servers(config)
        return
    for number, path in enumerate(evaluated_models(config)):
        with complete_model(path, config) as complete:
            of_model = replace(config, actor=replace(config.actor, path=complete))
            engine, _ = build_rollouts.build_embedded(of_model, ranks, tokenizer, processor)
        engine.set_version(number)
        with closing(engine):
            yield Model(path, number, engine)


def load_on_servers(config: PPOConfig) -> Generator[Model]:
    """Load the models on the run's servers.

    Version 0 is that of the model that the servers were started with, and of no other: a later run
    on the same servers relies on it.
    """
    discovery = build_rollouts.discover_servers(config)
    build_rollouts.continue_generation(discovery.configured, wire_of(config.allocation).resume())
    servers = wait_until_ready(discovery, config.rollout.setup_timeout)
    pool = build_rollouts.build_pool(config, servers, discovery)
    client = build_rollouts.build_client(config, servers, discovery, knows_versions=True)
    with closing(client), closing(pool):
        pool.check_model()
        started_with = Path(served_model(config).path)
        for number, path in enumerate(evaluated_models(config)):
            version = number + 1
            if number == 0 and Path(path).resolve() == started_with.resolve():
                version = 0
                pool.load_first_weights(version)
            else:
                with complete_model(path, config) as complete:
                    # a server may have another working directory
                    folder = Path(complete).resolve() if Path(complete).is_dir() else complete
                    for load in pool.wire.load_folder(folder, version, flush_cache=True):
                        pool.post(load)
            client.set_version(version)
            yield Model(path, version, client)


@dataclass(eq=False)
class SampledWorkflow:
    """A workflow that also keeps a line of each episode, and prints the progress.

    Args:
        num_samples: episodes that are expected.
        prints: whether this process prints.
    """

    workflow: RolloutWorkflow
    tokenizer: PreTrainedTokenizerBase
    model: str
    num_samples: int
    prints: bool
    lines: list[dict[str, Any]] = field(default_factory=list, init=False)
    _printed_s: float = field(default_factory=time.monotonic, init=False)

    async def arun_episode(self, engine: EpisodeSampler, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Run the workflow's episode, and keep its line."""
        rows = await self.workflow.arun_episode(engine, data)
        if rows is not None:
            self.lines.append(episode_line(rows, engine, self.tokenizer))
            if self.prints and time.monotonic() - self._printed_s > PROGRESS_S:
                self._printed_s = time.monotonic()
                mean = sum(line["reward"] for line in self.lines) / len(self.lines)
                counts = f"{len(self.lines):,} of {self.num_samples:,} samples"
                print(f"{self.model}: {counts}, mean reward {mean:.3g}", flush=True)
        return rows


def episode_line(rows: Batch, engine: EpisodeSampler, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Describe an episode in JSON types.

    Of several rows, such as an agent's, the reward is that of the first, which is the return of the
    whole episode; the completion is that of the last.
    """
    lines = text_lines(rows, tokenizer)
    return {
        "prompt_id": engine.prompt_id,
        "sample_id": engine.sample_id,
        "reward": lines[0]["reward"],
        "finish_reason": lines[-1]["finish_reason"],
        "num_sampled": sum(line["num_sampled"] for line in lines),
        "prompt": lines[0]["prompt"],
        "completion": lines[-1]["completion"],
    }


class EvaluationRun:
    """The rows, the workflow and the results of a run that only evaluates.

    Args:
        rows: (number, row) of each.
        prints: whether this process prints.
        reward_model: adds its `score` to the line of each sample; the rewards stay.
    """

    def __init__(
        self,
        config: PPOConfig,
        ranks: Ranks,
        rows: Sequence[tuple[int, dict[str, Any]]],
        workflow: RolloutWorkflow,
        tokenizer: PreTrainedTokenizerBase,
        prints: bool,
        reward_model: RewardModel | None = None,
    ) -> None:
        self.config, self.rows, self.workflow = config, rows, workflow
        self.tokenizer, self.prints, self.reward_model = tokenizer, prints, reward_model
        self.sampling: GenerationHyperparameters = build_rollouts.eval_gconfig(config)
        self.max_concurrent = build_rollouts.prompts_at_once(config, ranks)
        self.results = EvaluationResults(config)
        self.loop = LoopThread()

    def __enter__(self) -> "EvaluationRun":
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.close()

    def sample(self, model: Model, stats: Stats) -> Batch:
        """Sample every row with a model, write the samples, and return the rows of all episodes.

        Raises the exception of an episode, as training does.
        """
        began_s = time.monotonic()
        executor = Executor(
            model.engine,
            StalenessControl(1, self.max_concurrent, build_rollouts.NO_LIMIT),
            loop=self.loop,
            max_failures=self.config.rollout.max_failures,
            check_format=self.config.rollout.check_trajectory_format,
        )
        executor.set_version(model.version)
        expected = len(self.rows) * self.sampling.n_samples
        sampled = SampledWorkflow(self.workflow, self.tokenizer, model.path, expected, self.prints)
        if self.prints:
            print(f"{model.path}: {len(self.rows):,} prompts, {expected:,} samples", flush=True)
        batch = executor.rollout_batch(self.rows, sampled, n_samples=self.sampling.n_samples)
        lines = sorted(sampled.lines, key=lambda line: (line["prompt_id"], line["sample_id"]))
        if self.reward_model is not None:
            batch = self.reward_model.score(batch)
            names = zip(batch["prompt_id"].tolist(), batch["sample_id"].tolist(), strict=True)
            # of an episode of several rows the last one's stays, as the completion
            scores = dict(zip(names, batch[SCORE].tolist(), strict=True))
            lines = [line | {"score": scores[line["prompt_id"], line["sample_id"]]} for line in lines]
        log_samples(stats, batch, executor)
        self.results.add(model.path, lines, began_s, version=model.version)
        return batch

    def finish(self) -> None:
        """Write the summary, which completes the results."""
        facts: dict[str, Any] = {"n_samples": self.sampling.n_samples, "sampling": asdict(self.sampling)}
        if self.config.reward_model is not None:
            facts["reward_model"] = self.config.reward_model.path
        self.results.finish(num_rows=len(self.rows), **facts)
