"""NeMo-RL: record what its logger would dump as JSONL, at a fraction of the cost; import its dumps.

    logger = Recorded(logger, "runs/r")  # after setup(...), before grpo_train(...)

`log_batched_dict_as_jsonl` of a training step is recorded instead of dumped; everything else goes
to NeMo-RL's logger. Once recording has ended because of a failure, its dump is used again.

A dump is `train_data_step{N}.jsonl`, a JSON object per sample; values are lists of one. Lists are
padded to the longest of the batch and cut with `input_lengths`; all are aligned to the token
itself. Versions before 0.6 write text, rewards and log-probs, and no tokens: there the log-probs
are of tokens that are not known, and left out.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import ForeignFormat, RecordError
from recorder.trainers.foreign import (
    BY_MASK,
    BY_PROMPT,
    NO_VERSIONS_OR_REASONS,
    NO_WEIGHTS,
    TEXT_ONLY,
    Foreign,
    Source,
    lines_of,
    member,
    number_or_none,
    optional,
    prompt_group,
    read_files,
    sequence_sample,
)
from recorder.trainers.guarded import Guarded
from recorder.trainers.sample import Sample, as_numpy

TRAIN_FILE = r"train_data_step(\d+)\.jsonl"
NOTES = (
    BY_PROMPT,
    "the first message of a conversation counts as the text of the prompt",
    NO_VERSIONS_OR_REASONS,
    NO_WEIGHTS,
)
NO_TOKENS = (TEXT_ONLY, "log-probs of tokens that are not in the file are left out")
LEARNING = {"advantages": "advantages", "prev_logprobs": "prox_logp"}
PER_TOKEN = ("token_ids", "token_loss_mask", "generation_logprobs", *LEARNING)
RECORDED = {"content", "rewards", "filtered_rewards", "input_lengths", "sample_loss_mask", *PER_TOKEN}


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
        match = re.fullmatch(TRAIN_FILE, filename)
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
    # with dynamic sampling, `rewards` are those of all samples, also of the ones not trained on
    dropped = {"rewards"} if "filtered_rewards" in columns else set()
    known = {name: columns[name] for name in RECORDED & columns.keys() - dropped}
    num_rows = len(columns["input_lengths"])
    for name, values in known.items():
        if len(values) != num_rows:
            raise RecordError(f"{name} has {len(values)} rows, input_lengths {num_rows}")
    rows = ({name: values[row] for name, values in known.items()} for row in range(num_rows))
    return [recorded_row(row, f"row {number}") for number, row in enumerate(rows)]


def recorded_row(row: dict[str, Any], where: str) -> Sample:
    """Return a sample with its conversation as text, not split into prompt and completion."""
    content = row.pop("content", None)
    arrays = {name: as_numpy(row[name], name) for name in PER_TOKEN if name in row}
    text = content if isinstance(content, str) else json.dumps(content, default=str)
    return parse_row(row | arrays, None if content is None else ("", text), where)


def read(source: Source, files: Sequence[Path]) -> Foreign:
    """Read one step per file. Raises ForeignFormat."""
    found = read_files("nemo-rl", (), files, lines_of(dumped_row))
    text_only = any(sample.tokens is None for step in found.steps for sample in step.samples)
    return replace(found, notes=[*NOTES, *(NO_TOKENS if text_only else (BY_MASK,)), *found.notes])


def dumped_row(wrapped: Mapping[str, Any], where: str) -> Sample:
    row = {
        name: value[0] if isinstance(value, list) and len(value) == 1 else value
        for name, value in wrapped.items()
    }
    text = text_of(member(row, "content", where))
    member(row, "rewards", where)
    if "token_ids" not in row:
        reward = number_or_none(optional(row, "filtered_rewards", row["rewards"]), f"{where}, reward")
        return Sample(tokens=None, reward=reward, group=text[0] if text else None, text=text)
    return parse_row(row, text, where)


def parse_row(row: Mapping[str, Any], text: tuple[str, str] | None, where: str) -> Sample:
    """Return a sample, whose values per token may be padded.

    Rows with equal prompts are a group, as for NeMo-RL's own baseline.
    """
    length = member(row, "input_lengths", where)
    sizes = [len(row[name]) for name in PER_TOKEN if row.get(name) is not None]
    if not isinstance(length, int | np.integer) or not 0 <= length <= max(sizes, default=length):
        raise ForeignFormat(
            f"{where}: input_lengths is {length!r}, with values for {max(sizes, default=0)} tokens"
        )

    def column(name: str) -> Any:
        values = optional(row, name)
        return None if values is None else np.asarray(values[:length])  # the rest is padding

    tokens, mask = column("token_ids"), column("token_loss_mask")
    reward = number_or_none(optional(row, "filtered_rewards", optional(row, "rewards")), f"{where}, reward")
    if tokens is None or mask is None:  # what there is, without a place in the text
        return Sample(
            tokens=None, loss_mask=mask, logprobs=column("generation_logprobs"), reward=reward, text=text
        )
    mask = mask != 0
    return sequence_sample(
        tokens,
        mask & (optional(row, "sample_loss_mask", 1) != 0),
        logprobs=column("generation_logprobs"),
        learning={name: column(key) for key, name in LEARNING.items()},
        reward=reward,
        group=prompt_group(tokens, mask),
        prompt_length=int(mask.argmax()) if mask.any() else None,
        text=text,
        where=where,
    )


def text_of(content: Any) -> tuple[str, str] | None:
    """Return the first message of a conversation, and the others; None without messages of text."""
    messages = [content] if isinstance(content, str) else content
    if not isinstance(messages, list) or not messages or not all(isinstance(m, str) for m in messages):
        return None
    return messages[0], "".join(messages[1:])
