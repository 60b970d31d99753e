"""Supervised fine-tuning: maximum likelihood of the completions of given rows."""

import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from areal_core.algorithm.alignment import shifted_left
from areal_core.algorithm.sft_loss import sft_loss
from areal_core.batch import Batch, pad_and_concat
from areal_core.config import SFTConfig
from areal_core.engine.checkpoint import save_hf
from areal_core.engine.ranks import leave_ranks
from areal_core.paths import run_folder
from areal_core.telemetry import Stats
from areal_core.trainer import build
from areal_core.trainer.learning import trained_tokens
from areal_core.trainer.recovery import Recovery


class SFTTrainer:
    """A run of supervised fine-tuning on this rank, as a context manager.

    Args:
        train_dataset: rows with `input_ids` and `loss_mask`, lists of int (`get_dataset` with type "sft").
    """

    def __init__(self, config: SFTConfig, train_dataset: Sequence[dict[str, Any]]) -> None:
        self.config = config
        self.total_steps = build.count_steps(config, len(train_dataset))
        self._cleanup = contextlib.ExitStack()
        self.ranks = build.start_process(config)
        self._cleanup.callback(leave_ranks)
        self.tokenizer = build.load_tokenizer(config)
        self.actor = build.build_engine(config.actor, self.ranks, self.total_steps)
        self.stats = Stats()
        self.loader = build.build_loader(config, self.ranks, train_dataset)
        self.saving = build.build_frequency(config.saver, self.ranks, self.loader.steps_per_epoch)
        self.recovery = Recovery(config, self.ranks, self.loader.steps_per_epoch)
        self.first_step = self.recovery.load(self.actor).step
        self.recovery.restore(self.loader)
        self.tracing = build.build_tracing(config, self.ranks, self.stats, continued=self.first_step > 0)
        self._cleanup.callback(self.tracing.close)

    def train(self, stop: Callable[[int], bool] = lambda step: False) -> None:
        """Train to the last step, or the first after which `stop(step)` holds; then write `checkpoints/.../default/final`.

        `stop` is asked on every rank and must answer alike.
        """
        with build.build_loggers(self.config, self.ranks, self.total_steps) as logger:
            for step in range(self.first_step, self.total_steps):
                with self.stats.timing("step"), self.stats.scope("sft"):
                    self._train_step(rows_to_batch([row for _, row in self.loader.next_batch()]))
                stats = self.stats.export()
                logger.commit(step, stats)
                self.tracing.commit(step, stats)
                if self.saving.is_due(step):
                    self.save(f"globalstep{step}")
                self.recovery.save_when_due(step, step + 1, self.actor, self.loader)
                if stop(step):
                    break
        self.save("final")

    def _train_step(self, batch: Batch) -> None:
        every = torch.ones(batch["attention_mask"].shape[0], dtype=torch.bool)
        self.stats.denominator(n_seqs=every, n_tokens=batch["attention_mask"])
        with self.stats.timing("train_step"):
            result = self.actor.train_batch(batch, self._loss, trained_tokens)
        self.actor.step_schedule()
        self.stats.scalar(grad_norm=result.grad_norm, lr=result.lr)

    def _loss(self, logprobs: Tensor, entropy: Tensor, flat: Batch) -> Tensor:
        loss, details = sft_loss(logprobs, flat["loss_mask"])
        self.stats.denominator(n_valid_tokens=flat["loss_mask"].bool())
        self.stats.stat("n_valid_tokens", loss=details["loss"])
        return loss

    def save(self, name: str) -> None:
        """Write the model in Hugging Face format; a collective."""
        save_hf(run_folder(self.config, "checkpoints") / "default" / name, self.actor, self.tokenizer)

    def __enter__(self) -> "SFTTrainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()


def rows_to_batch(rows: Sequence[dict[str, list[int]]]) -> Batch:
    """Rows as a padded batch, `loss_mask` next-token aligned."""
    singles = [
        {
            "input_ids": torch.tensor([row["input_ids"]], dtype=torch.int32),
            "attention_mask": torch.ones(1, len(row["input_ids"]), dtype=torch.bool),
            "loss_mask": torch.tensor([row["loss_mask"]], dtype=torch.int32),
        }
        for row in rows
    ]
    batch = pad_and_concat(singles)
    return batch | {"loss_mask": shifted_left(batch["loss_mask"], 0)}
