"""Validation on the rollout engine of the training prompts, and what runs share that only evaluate.

The latter, of a policy (`evaluation_run.py`) or of a supervised method, leave

{logs}/evaluation/
  samples-0.jsonl     the first model: a JSON object per sample, or per row of a supervised method
  evaluation.json     written last: what was evaluated, and for each model its path and file
"""

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from areal_core.config import EvaluatorConfig, PPOConfig
from areal_core.config.experiment import BaseExperimentConfig
from areal_core.data import get_dataset
from areal_core.data.batch import Batch
from areal_core.data.read import full_batches
from areal_core.engine.model import load_model
from areal_core.errors import ConfigError, ModelError
from areal_core.paths import run_folder
from areal_core.rollout.pipeline import Executor
from areal_core.rollout.workflow import RolloutWorkflow
from areal_core.safety.durable import commit_file
from areal_core.telemetry.stats import Reduce, Stats
from areal_core.trainer.checkpointing import Frequency
from areal_core.trainer.live import log_scalars
from areal_core.trainer.scored_rollouts import SCORE, RewardModel

RESULTS = "evaluation"  # folder next to the logs
SUMMARY = "evaluation.json"
Rows = Sequence[dict[str, Any]]


@dataclass(eq=False)
class Evaluation:
    """This rank's share of the validation rows, and the workflow that they are run through.

    Training prompts in flight continue meanwhile. The weights do not change during a validation, so
    all rows are sampled from the same version.

    Args:
        executor, workflow: None only if `rows` is empty.
        rows: (number, row) of each.
        frequency: the steps after which validation runs.
        stats: receives the rewards under `eval-rollout/`.
        n_samples: samples of each row.
        reward_model: its scores are added to the rewards.
        turn: surrounds the sampling, on every rank.
    """

    executor: Executor | None
    rows: Sequence[tuple[int, dict[str, Any]]]
    frequency: Frequency
    stats: Stats
    workflow: RolloutWorkflow | None = None
    n_samples: int = 1
    reward_model: RewardModel | None = None
    turn: Callable[[], AbstractContextManager[None]] = nullcontext

    def after_step(self, step: int) -> None:
        if self.frequency.is_due(step):
            self.run()

    def run(self) -> None:
        """Sample every row `n_samples` times and record the rewards.

        A collective with a reward model. Raises the exception of an episode, as training does.
        """
        batch = None
        with self.turn():
            if self.rows:
                assert self.executor is not None
                assert self.workflow is not None
                batch = self.executor.rollout_batch(self.rows, self.workflow, n_samples=self.n_samples)
        if self.reward_model is not None:
            batch = self.reward_model.add_scores_of_leader(batch)
        if batch is not None:
            assert self.executor is not None
            log_samples(self.stats, batch, self.executor)


def log_samples(stats: Stats, batch: Batch, executor: Executor) -> None:
    """Record the rewards and lengths of validation samples, and the counts of their prompts."""
    control = executor.control
    log_scalars(stats, executor.scalars, "eval-workflow")
    with stats.scope("eval-rollout"):
        stats.denominator(n_seqs=torch.ones_like(batch["rewards"], dtype=torch.bool))
        stats.stat(
            "n_seqs",
            Reduce.AVG,
            reward=batch["rewards"],
            seq_len=batch["attention_mask"].sum(1).float(),
            no_eos_ratios=(batch["finish_reason"] == 1).float(),
        )
        if SCORE in batch:
            stats.stat("n_seqs", Reduce.AVG, score=batch[SCORE])
        stats.scalar(accepted=control.accepted, rejected=control.rejected, failed=control.failed)


def evaluates_only(config: BaseExperimentConfig) -> bool:
    """Return whether the trainer evaluates and does not train.

    Without an allocation, in a config that a script built, it trains.
    """
    engine = config.rollout.backend if isinstance(config, PPOConfig) else ""
    is_given = config.allocation_mode or engine or config.actor.backend
    return bool(is_given) and config.allocation.kind == "eval"


def evaluated_models(config: BaseExperimentConfig) -> list[str]:
    """Return the models of the run: `evaluator.checkpoints`, or else `actor.path`."""
    return config.evaluator.checkpoints or [config.actor.path]


def evaluated_rows(
    config: BaseExperimentConfig, train: Rows | None, valid: Rows | None, tokenizer: PreTrainedTokenizerBase
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
            "the trainer, or evaluate on the training rows with evaluator.rows=train"
        )
    rows = validation_rows(config, rows, tokenizer)
    if not len(rows):
        raise ConfigError(
            f"evaluator.rows is {options.rows!r} and there are 0 such rows: give a dataset that has some"
        )
    return [(i, rows[i]) for i in range(min(len(rows), options.max_rows or len(rows)))]


def validation_rows(
    config: BaseExperimentConfig, rows: Sequence[dict[str, Any]] | None, tokenizer: PreTrainedTokenizerBase
) -> Sequence[dict[str, Any]]:
    """Return `rows`, or by default those of `config.valid_dataset`.

    Raises:
        ConfigError: there are none, although `evaluator` requests validation.
    """
    if rows is not None:
        return rows
    if config.valid_dataset is None:
        evaluator = config.evaluator
        raise ConfigError(
            f"evaluator.freq_epochs, freq_steps, freq_secs are {evaluator.freq_epochs}, {evaluator.freq_steps}, "
            f"{evaluator.freq_secs} and valid_dataset is None: set valid_dataset, pass valid_dataset to the trainer, "
            f"or set the periods to null"
        )
    return full_batches(get_dataset(config.valid_dataset, tokenizer=tokenizer), config.valid_dataset)


@contextmanager
def complete_model(path: str, config: BaseExperimentConfig, rank: int = 0) -> Iterator[str]:
    """Provide the path of a complete model: a LoRA adapter is merged into `actor.path` in a block.

    The merged model is in the run's folder, which servers can read, too, and removed at the end.

    Raises:
        ModelError: peft is not installed, or the adapter is not of this model.
    """
    if not (Path(path) / "adapter_config.json").is_file():
        yield path
        return
    folder = run_folder(config, "checkpoints") / f"merged-{rank}"
    merge_adapter(path, config.actor.path, folder)
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def merge_adapter(path: str, base: str, folder: Path) -> None:
    """Write the model at `base` with the LoRA adapter at `path` merged in. Raises ModelError."""
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


class EvaluationResults:
    """The folder of an evaluation: a file of lines per model, the summary last."""

    def __init__(self, config: BaseExperimentConfig) -> None:
        self.folder = run_folder(config, "logs") / RESULTS
        self.rows = config.evaluator.rows
        self.done: list[dict[str, Any]] = []
        shutil.rmtree(self.folder, ignore_errors=True)  # results of an earlier evaluation
        self.folder.mkdir(parents=True)

    def add(self, path: str, lines: Sequence[dict[str, Any]], began_s: float, **facts: Any) -> None:
        """Write the lines of the model at `path`, whose evaluation began at `time.monotonic()`."""
        file = f"samples-{len(self.done)}.jsonl"
        commit_file(
            self.folder / file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        )
        self.done.append({"path": path, **facts, "file": file, "seconds": time.monotonic() - began_s})

    def finish(self, **facts: Any) -> None:
        """Write the summary, which completes the results."""
        commit_file(
            self.folder / SUMMARY, json.dumps({"rows": self.rows, **facts, "models": self.done}, indent=2)
        )
