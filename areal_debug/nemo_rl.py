"""NeMo-RL: record what its logger would dump as JSONL, at a fraction of the cost.

    logger = Recorded(logger, "runs/r")  # after setup(...), before grpo_train(...)

`log_batched_dict_as_jsonl` of a training step is recorded instead of dumped; everything else goes
to NeMo-RL's logger. Once recording has ended because of a failure, its dump is used again.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_debug.guarded import Guarded
from recorder.errors import RecordError
from recorder.trainers.sample import Sample, as_numpy

TRAIN_FILE = re.compile(r"train_data_step(\d+)\.jsonl")
LEARNING = {"advantages": "advantages", "prev_logprobs": "prox_logp"}
RECORDED = {"content", "rewards", "filtered_rewards", "input_lengths", "token_ids", "token_loss_mask"}
RECORDED |= {"sample_loss_mask", "generation_logprobs", *LEARNING}


class Recorded:
    """A NeMo-RL logger around another one, which records instead of dumping JSONL files.

    The first failure of the recording is one sentence on stderr; from that step on, the files are
    dumped again.

    Args:
        logger: the one that `setup` returned.
        folder: None: AREAL_DEBUG_RECORD names it. A record in it is continued.
        config: `master_config.model_dump()`, or the dict that older versions have.
        dump: also dump the JSONL files.
    """

    def __init__(
        self,
        logger: Any,
        folder: str | os.PathLike[str] | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        dump: bool = False,
    ) -> None:
        self.logger, self.config, self.dump = logger, config, dump
        self.recording = Guarded("nemo-rl", folder, last=self._record)
        self.pending: tuple[int, dict[str, Any], str] | None = None  # waits for the step's metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self.logger, name)

    def log_batched_dict_as_jsonl(self, to_log: Mapping[str, Any], filename: str) -> None:
        """Keep the data of a training step until its metrics come; dump everything else."""
        self._record()
        match = TRAIN_FILE.fullmatch(filename)
        if match and not self.recording.ended:
            self.pending = int(match[1]), dict(to_log), filename
        if self.pending is None or self.dump:
            self.logger.log_batched_dict_as_jsonl(to_log, filename)

    def log_metrics(self, metrics: dict[str, Any], step: int, prefix: str | None = "", **others: Any) -> None:
        if self.pending is not None and (step, prefix) == (self.pending[0], "train"):
            self._record(metrics)
        self.logger.log_metrics(metrics, step, prefix, **others)

    def finish(self) -> None:
        """End the recording, then the logger."""
        self._record()
        self.recording.end()
        self.logger.finish()

    def _record(self, metrics: Mapping[str, Any] | None = None) -> None:
        """Record the pending step, or dump it if it cannot be recorded.

        Step N of NeMo-RL, which counts from 1, is step N - 1 of the record.
        """
        if self.pending is None:
            return
        (number, columns, filename), self.pending = self.pending, None
        self.recording.step(
            number - 1,
            lambda: samples_of(columns),
            not_recorded=columns.keys() - RECORDED,
            config=self.config,
            stats=metrics,
        )
        if self.recording.ended and not self.dump:
            self.logger.log_batched_dict_as_jsonl(columns, filename)


def samples_of(columns: Mapping[str, Any]) -> list[Sample]:
    """Return the samples of a batch: columns by name, whose lists are padded to the longest row.

    Raises RecordError for columns of different lengths.
    """
    if "input_lengths" not in columns:
        raise RecordError(f"the batch has no input_lengths, only {', '.join(sorted(columns))}")
    lengths = [int(length) for length in columns["input_lengths"]]
    # with dynamic sampling, `rewards` are those of all samples, also of the ones not trained on
    rewards = columns.get("filtered_rewards", columns.get("rewards"))
    columns = {**columns, "rewards": rewards} if rewards is not None else columns
    for name in RECORDED & columns.keys() - {"filtered_rewards"}:
        if len(columns[name]) != len(lengths):
            raise RecordError(f"{name} has {len(columns[name])} rows, input_lengths {len(lengths)}")
    return [parse_row(columns, row, length) for row, length in enumerate(lengths)]


def parse_row(columns: Mapping[str, Any], row: int, length: int) -> Sample:
    """Return one sample. Rows with equal prompts are a group, as for NeMo-RL's own baseline."""

    def per_token(name: str, dtype: type) -> np.ndarray | None:
        return as_numpy(columns[name][row][:length], name, dtype) if name in columns else None

    tokens, mask = per_token("token_ids", np.int32), per_token("token_loss_mask", np.int32)
    first = None if mask is None or not mask.any() else int(mask.argmax())
    if mask is not None and "sample_loss_mask" in columns:
        mask = mask * int(columns["sample_loss_mask"][row])
    learning = {name: per_token(column, np.float32) for column, name in LEARNING.items()}
    return Sample(
        tokens=tokens,
        loss_mask=mask,
        logprobs=per_token("generation_logprobs", np.float32),
        reward=float(columns["rewards"][row]) if "rewards" in columns else None,
        group=None if tokens is None or first is None else tokens[:first].tobytes(),
        prompt_length=first,
        text=("", text_of(columns["content"][row])) if "content" in columns else None,
        learning={name: values for name, values in learning.items() if values is not None},
    )


def text_of(content: str | Sequence[Any]) -> str:
    """Return the conversation, which is not split into prompt and completion."""
    return content if isinstance(content, str) else json.dumps(content, default=str)
