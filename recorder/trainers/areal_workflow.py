"""Upstream AReaL 1.x: record the trajectories of a workflow, and replay them without an engine.

    trainer.train(workflow=Recorded(workflow, "runs/r"))
    trainer.train(workflow=Replayed("runs/r"))

A workflow does not know which step trains on its trajectory. A step of the record has those that
ended while the engine held one weight version, which is the number of the step: with
`max_head_offpolicyness=0` exactly the step's batch, together with trajectories that a filter
rejected afterwards; in asynchronous training, the version may be older than that of the step.
"""

import functools
import itertools
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby
from typing import Any

import numpy as np
import torch
from areal import workflow_context
from areal.api import RolloutWorkflow
from areal.experimental.openai.types import InteractionWithTokenLogpReward
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from recorder.errors import RecordError
from recorder.reader import Record, RecordedStep, open_record
from recorder.trainers.guarded import Guarded, folder_of_rank, rank_of_process
from recorder.trainers.sample import FINISH_REASONS, Sample, as_numpy

PER_TOKEN = {"loss_mask": np.int32, "logprobs": np.float32, "versions": np.int32}
EPISODE = "episode"  # the score that numbers the episodes of a task, each of one or more rows


class Recorded(RolloutWorkflow):  # type: ignore[misc]  # AReaL is rarely installed
    """A workflow of AReaL whose trajectories are recorded; those of evaluations are not.

    The first failure of the recording is one sentence on stderr; the run continues without it.

    Args:
        workflow: a workflow, or the import path of its class.
        folder: None: AREAL_DEBUG_RECORD names it. Each process has a record of its own: FOLDER, and
            FOLDER-rankN for other processes than the first. A record in it is continued.
        workflow_kwargs: arguments of the class, if `workflow` is a path.
        tokenizer: decodes the text of the trajectories, in the background.
    """

    def __init__(
        self,
        workflow: Any,
        folder: str | os.PathLike[str] | None = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
    ) -> None:
        if isinstance(workflow, str):
            module, _, name = workflow.rpartition(".")
            workflow = getattr(import_module(module), name)(**(workflow_kwargs or {}))
        self.workflow = workflow
        # a full queue drops a step: waiting for the disk would stop the loop of all trajectories
        self.recording = Guarded(
            "areal", folder, rank=rank_in_job(), last=self._record, tokenizer=tokenizer, when_slow="drop"
        )
        self.started = itertools.count()
        self.pending: dict[int, list[Episode]] = defaultdict(list)  # by weight version

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        """Run the workflow, and keep a copy of its trajectory until the engine's next version."""
        number = next(self.started)
        result = await self.workflow.arun_episode(engine, data)
        context = workflow_context.get()
        if result and not context.is_eval:
            self.recording.attempt(
                "a trajectory", lambda: self._keep(number, context.task_id, result, engine.get_version())
            )
        return result

    def _keep(self, number: int, task: int | None, result: Mapping[str, Any], version: int) -> None:
        """Record the versions before this one, and keep the trajectory. Raises RecordError."""
        self._record(before=version)
        rows, dropped = rows_of(result)
        task = -1 - number if task is None else task  # called by something else than an executor
        self.pending[version].append(Episode(number, task, rows, dropped))

    def _record(self, before: int = sys.maxsize) -> None:
        """Record the pending trajectories of the versions before one, of all without."""
        for version in sorted(version for version in self.pending if version < before):
            episodes = sorted(self.pending.pop(version), key=lambda episode: episode.number)
            self.recording.step(
                version,
                functools.partial(grouped, episodes),
                version=version + 1,
                not_recorded={name for episode in episodes for name in episode.dropped},
            )


class Replayed(RolloutWorkflow):  # type: ignore[misc]
    """A workflow of AReaL that returns recorded trajectories, in their order, and calls no engine.

    A task gets the trajectories of a recorded task, whatever its data.

    Args:
        folder: that `Recorded` was given; each process reads its own record.

    Raises:
        RecordError: there is no record, or it cannot be read.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = folder_of_rank(folder, rank_in_job())
        self.recorded = recorded_tasks(open_record(self.folder))
        self.episodes: dict[int, Iterator[dict[str, Tensor]]] = {}
        self.calls = itertools.count()

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Return the next trajectory of the task; None if the recorded task has no further one.

        Returns:
            Padded tensors by name: per token [rows, T], `rewards` float32 [rows].

        Raises:
            RecordError: all recorded tasks are used, or tokens are not in the record.
        """
        task_id = workflow_context.get().task_id
        task = -1 - next(self.calls) if task_id is None else task_id
        if task not in self.episodes:
            following = next(self.recorded, None)
            if following is None:
                raise RecordError(
                    f"{self.folder} has no further trajectories: set total_train_steps to its number of steps"
                )
            self.episodes[task] = iter(following)
        return next(self.episodes[task], None)


@dataclass(frozen=True)
class Episode:
    """A trajectory: number in the order of starts, task, rows, and names of what they lack."""

    number: int
    task: int
    rows: list[Sample]
    dropped: set[str]


def rank_in_job() -> int:
    flag = "--worker-index"
    return int(sys.argv[sys.argv.index(flag) + 1]) if flag in sys.argv[:-1] else rank_of_process()


def grouped(episodes: list[Episode]) -> list[Sample]:
    """Return all rows, with their task as the group and the number of their episode in it."""
    counts: dict[int, int] = defaultdict(int)
    rows: list[Sample] = []
    for episode in episodes:
        scores = {EPISODE: float(counts[episode.task])}
        rows += [replace(row, group=episode.task, scores=scores) for row in episode.rows]
        counts[episode.task] += 1
    return rows


def rows_of(result: Mapping[str, Any]) -> tuple[list[Sample], set[str]]:
    """Return copies of a trajectory's rows, and the names of what they lack.

    `result` is a dict of tensors [B, T] and [B], or one of interactions. Raises RecordError.
    """
    if not all(isinstance(value, InteractionWithTokenLogpReward) for value in result.values()):
        return rows_of_tensors(result)
    rows: list[Sample] = []
    dropped: set[str] = set()
    for interaction in result.values():
        row, missing = row_of_interaction(interaction)
        rows.append(row)
        dropped |= missing
    return rows, dropped


def row_of_interaction(interaction: Any) -> tuple[Sample, set[str]]:
    """Return one call of an agent; only its text where an outside server generated it."""
    text, answers = None, interaction.output_message_list
    if answers:
        text = json.dumps(interaction.messages, default=str), str(answers[0]["content"])
    if not interaction.has_tensor_data:
        return Sample(tokens=None, reward=interaction.reward, text=text), set()
    rows, dropped = rows_of_tensors(interaction.to_tensor_dict())
    response = interaction.model_response
    return replace(
        rows[0],
        reward=interaction.reward,  # the tensors have 0 where it is None
        finish_reason=None if response is None else FINISH_REASONS.get(response.stop_reason),
        text=text,
    ), dropped


def rows_of_tensors(tensors: Mapping[str, Any]) -> tuple[list[Sample], set[str]]:
    """Return copies of the rows of padded tensors. Raises RecordError without tokens or a mask."""
    if missing := {"input_ids", "attention_mask"} - tensors.keys():
        raise RecordError(f"the trajectory has no {' and no '.join(sorted(missing))}")
    lengths = tensors["attention_mask"].bool().sum(dim=1).tolist()
    shape = tuple(tensors["input_ids"].shape)
    extras = [
        name
        for name, value in tensors.items()
        if isinstance(value, Tensor)
        and tuple(value.shape[:2]) == shape
        and name not in {"input_ids", "attention_mask", *PER_TOKEN}
    ]
    recorded = {"input_ids", "attention_mask", "rewards", *PER_TOKEN, *extras}

    def array(name: str, row: int, dtype: type | None = None) -> np.ndarray:
        return as_numpy(tensors[name][row, : lengths[row]], name, dtype).copy()

    rows = []
    for row in range(len(lengths)):
        values = {name: array(name, row, dtype) for name, dtype in PER_TOKEN.items() if name in tensors}
        mask = values.get("loss_mask")
        rows.append(
            Sample(
                tokens=array("input_ids", row, np.int32),
                loss_mask=mask,
                logprobs=values.get("logprobs"),
                versions=values.get("versions"),
                reward=float(tensors["rewards"][row]) if "rewards" in tensors else None,
                prompt_length=int(mask.argmax()) if mask is not None and mask.any() else None,
                extras={name: array(name, row) for name in extras},
            )
        )
    return rows, tensors.keys() - recorded


def recorded_tasks(record: Record) -> Iterator[list[dict[str, Tensor]]]:
    for number in record.steps:
        step = record.step(number)
        for rank in step.ranks:
            yield from tasks_of(step, rank)


def tasks_of(step: RecordedStep, rank: int) -> Iterator[list[dict[str, Tensor]]]:
    """Yield the trajectories of each task of a step. Raises RecordError for unknown tokens."""
    if not step.known(rank, "input_ids").all():
        raise RecordError(f"step {step.manifest.step} has rows without tokens, which cannot be replayed")
    batch, tensors = step.batch(rank), step.batch_entry(rank)[1].tensors
    names = [
        name for name, entry in tensors.items() if entry.axis == "token" and step.known(rank, name).all()
    ]
    rewards = batch["rewards"] if step.known(rank, "rewards").all() else None
    task_of, episode_of = batch["prompt_id"], batch[f"scores.{EPISODE}"]
    for _, rows in groupby(range(len(task_of)), lambda row: task_of[row]):
        yield [
            trajectory(batch, names, rewards, list(group))
            for _, group in groupby(rows, lambda row: episode_of[row])
        ]


def trajectory(
    batch: Mapping[str, np.ndarray], names: list[str], rewards: np.ndarray | None, rows: list[int]
) -> dict[str, Tensor]:
    """Return rows as upstream's padded tensors, [B, T] and [B]."""
    ends = batch["cu_seqlens"]

    def padded(values: np.ndarray) -> Tensor:
        tensors = [torch.from_numpy(values[ends[row] : ends[row + 1]].copy()) for row in rows]
        return pad_sequence(tensors, batch_first=True)

    result = {name: padded(batch[name]) for name in names}
    result["attention_mask"] = padded(np.ones(ends[-1], np.bool_))
    return result if rewards is None else result | {"rewards": torch.from_numpy(rewards[rows])}
