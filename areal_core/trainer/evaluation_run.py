"""A run that only evaluates: the validation rows on one or more models, without an optimizer.

The trainer does this in place of training if the allocation has "eval" in place of a trainer. A
server starts once and loads one checkpoint after another; the embedded engine is built for each. So
every model answers the same prompts with the same sampling options, and results can be compared
prompt by prompt.

{logs}/evaluation/
  samples-0.jsonl     the samples of the first model, a JSON object each, sorted
  evaluation.json     written last: rows, sampling options, and for each model its path and file
"""

import json
import shutil
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from areal_core.batch import Batch
from areal_core.config import EvaluatorConfig, GenerationHyperparameters, PPOConfig
from areal_core.engine.errors import ModelError
from areal_core.engine.model import load_model
from areal_core.engine.ranks import Ranks
from areal_core.errors import ConfigError
from areal_core.launch.job import served_model
from areal_core.paths import run_folder
from areal_core.rollout.fleet.discovery import wait_until_ready
from areal_core.rollout.fleet.wires import wire_of
from areal_core.rollout.loop_thread import LoopThread
from areal_core.rollout.pipeline import Executor
from areal_core.rollout.staleness import StalenessControl
from areal_core.rollout.types import EpisodeSampler, InferenceEngine
from areal_core.rollout.workflow import RolloutWorkflow, text_lines
from areal_core.safety.durable import commit_file
from areal_core.telemetry import Stats
from areal_core.trainer import build_rollouts
from areal_core.trainer.evaluation import log_samples, validation_rows

RESULTS = "evaluation"  # folder next to the logs
SUMMARY = "evaluation.json"
PROGRESS_S = 10.0
Rows = Sequence[dict[str, Any]]


def evaluates_only(config: PPOConfig) -> bool:
    """Return whether the trainer evaluates and does not train.

    Without an allocation, in a config that a script built, it trains.
    """
    is_given = config.allocation_mode or config.rollout.backend or config.actor.backend
    return bool(is_given) and config.allocation.kind == "eval"


def evaluated_models(config: PPOConfig) -> list[str]:
    """Return the models of the run: `evaluator.checkpoints`, or else `actor.path`."""
    return config.evaluator.checkpoints or [config.actor.path]


def evaluated_rows(
    config: PPOConfig, train: Rows | None, valid: Rows | None, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, dict[str, Any]]]:
    """Return the `(number, row)` that `evaluator.rows` and `evaluator.max_rows` select.

    Args:
        train, valid: the datasets that the script gave to the trainer.

    Raises:
        ConfigError: there are none.
    """
    options: EvaluatorConfig = config.evaluator
    rows = train or () if options.rows == "train" else valid
    if rows is None and config.valid_dataset is None:
        raise ConfigError(
            "there are no validation rows: set valid_dataset.path and valid_dataset.type, pass valid_dataset to "
            "PPOTrainer, or evaluate on the training rows with evaluator.rows=train"
        )
    rows = validation_rows(config, rows, tokenizer)
    if not len(rows):
        raise ConfigError(
            f"evaluator.rows is {options.rows!r} and there are 0 such rows: give a dataset that has some"
        )
    return [(i, rows[i]) for i in range(min(len(rows), options.max_rows or len(rows)))]


@dataclass(frozen=True)
class Model:
    """A model that is loaded into `engine`; tokens that it samples have this `version`."""

    path: str
    version: int
    engine: InferenceEngine


def load_models(config: PPOConfig, ranks: Ranks, tokenizer: PreTrainedTokenizerBase) -> Generator[Model]:
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
        with complete_model(path, config.actor.path, merged_folder(config)) as complete:
            of_model = replace(config, actor=replace(config.actor, path=complete))
            engine, _ = build_rollouts.build_embedded(of_model, ranks, tokenizer)
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
                with complete_model(path, config.actor.path, merged_folder(config)) as complete:
                    # a server may have another working directory
                    folder = Path(complete).resolve() if Path(complete).is_dir() else complete
                    for load in pool.wire.load_folder(folder, version, flush_cache=True):
                        pool.post(load)
            client.set_version(version)
            yield Model(path, version, client)


def merged_folder(config: PPOConfig) -> Path:
    """Return the folder of a merged adapter, which servers can read, too."""
    return run_folder(config, "checkpoints") / "merged"


@contextmanager
def complete_model(path: str, base: str, folder: Path) -> Iterator[str]:
    """Provide the path of a complete model: a LoRA adapter is merged into `base` inside the block.

    Args:
        folder: of the merged model; removed at the end.

    Raises:
        ModelError: peft is not installed, or the adapter is not of this model.
    """
    if not (Path(path) / "adapter_config.json").is_file():
        yield path
        return
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ModelError(
            f"{path} is a LoRA adapter and needs the package peft ({error}): pip install 'areal-debug[lora]'"
        ) from error
    try:
        with warnings.catch_warnings(action="error", category=UserWarning):  # of names that do not fit
            adapted = PeftModel.from_pretrained(load_model(base, dtype="auto"), path, torch_device="cpu")
            adapted.merge_and_unload().save_pretrained(folder)
    except (RuntimeError, ValueError, UserWarning) as error:
        raise ModelError(f"the adapter {path} cannot be merged into {base}: {error}") from error
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class SampledWorkflow:
    """A workflow that also keeps a line of each episode, and prints the progress.

    Args:
        num_samples: episodes that are expected.
        prints: whether this process prints.
    """

    def __init__(
        self,
        workflow: RolloutWorkflow,
        tokenizer: PreTrainedTokenizerBase,
        model: str,
        num_samples: int,
        prints: bool,
    ) -> None:
        self.workflow, self.tokenizer = workflow, tokenizer
        self.model, self.num_samples, self.prints = model, num_samples, prints
        self.lines: list[dict[str, Any]] = []
        self._printed_s = time.monotonic()

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
    """

    def __init__(
        self,
        config: PPOConfig,
        ranks: Ranks,
        rows: Sequence[tuple[int, dict[str, Any]]],
        workflow: RolloutWorkflow,
        tokenizer: PreTrainedTokenizerBase,
        prints: bool,
    ) -> None:
        self.config, self.rows, self.workflow = config, rows, workflow
        self.tokenizer, self.prints = tokenizer, prints
        self.sampling: GenerationHyperparameters = build_rollouts.eval_gconfig(config)
        self.max_concurrent = build_rollouts.prompts_at_once(config, ranks)
        self.folder = run_folder(config, "logs") / RESULTS
        self.loop = LoopThread()
        self.done: list[dict[str, Any]] = []
        shutil.rmtree(self.folder, ignore_errors=True)  # results of an earlier evaluation
        self.folder.mkdir(parents=True)

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
        log_samples(stats, batch, executor)
        kept = sorted(sampled.lines, key=lambda line: (line["prompt_id"], line["sample_id"]))
        file = f"samples-{len(self.done)}.jsonl"
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
        commit_file(self.folder / file, text)
        seconds = time.monotonic() - began_s
        self.done.append({"path": model.path, "version": model.version, "file": file, "seconds": seconds})
        return batch

    def finish(self) -> None:
        """Write the summary, which completes the results."""
        options: EvaluatorConfig = self.config.evaluator
        summary = {
            "rows": options.rows,
            "num_rows": len(self.rows),
            "n_samples": self.sampling.n_samples,
            "sampling": asdict(self.sampling),
            "models": self.done,
        }
        commit_file(self.folder / SUMMARY, json.dumps(summary, indent=2))
