"""What the files of a step say about each other, beyond their checksums.

plan ── rows, micro-batches ──> batch <── rows, tokens ── outcome ── version ──> step.json
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from recorder.format import STEP_FILE, BatchEntry, Outcome, Plan, RecordHeader, Recording
from recorder.reader import RecordedStep
from recorder.storage import Storage
from recorder.tensors import read_bytes

Contradiction = tuple[str, str]  # file, and what in it contradicts another


def contradictions(step: RecordedStep, header: RecordHeader) -> Iterator[Contradiction]:
    """Yield what contradicts within a step whose bytes are as recorded. Raises DamagedRecord."""
    manifest = step.manifest
    if manifest.num_ranks != header.num_ranks:
        yield step.name_of(STEP_FILE), f"has {manifest.num_ranks} ranks, the run {header.num_ranks}"
    for name, entry in manifest.batches.items():
        if not describes(step.storage, step.name_of(name), entry):
            yield step.name_of(name), "has a safetensors header with other tensors than step.json"
    for rank in range(manifest.num_ranks):
        arrays = step.batch(rank)
        lengths = np.diff(arrays["cu_seqlens"])
        yield from results_problems(step, rank, header.recording, lengths)
        yield from prompt_problems(step, rank, arrays, lengths)
        yield from text_problems(step, rank, arrays["rewards"].astype(np.float64))
        yield from calls_problems(step, rank, arrays)
        yield from learning_problems(step, rank, arrays["cu_seqlens"])


def results_problems(
    step: RecordedStep, rank: int, recording: Recording, lengths: np.ndarray
) -> Iterator[Contradiction]:
    """Yield what contradicts in plan and outcome of a rank whose rows have these lengths."""
    plan_name, outcome_name = (step.rank_name(kind, rank, "json") for kind in ("plan", "outcome"))
    recorded = [name for name in (plan_name, outcome_name) if name in step.manifest.files]
    wanted = [plan_name, outcome_name] if recording.has_plans else []
    if recorded != wanted and recording.scope != "given":
        what = f"lists {recorded or 'neither plan nor outcome'} with scope {recording.scope}"
        yield step.name_of(STEP_FILE), what
        return
    plan = step.plan(rank) if plan_name in recorded else None
    if plan is not None and recording.scope == "given":  # another trainer's details have any form
        plan = replace(plan, details={})
    for what in () if plan is None else problems_of_plan(step, plan, lengths):
        yield step.name_of(plan_name), what
    if outcome_name in recorded:
        for what in problems_of_outcome(step, step.outcome(rank), plan, lengths):
            yield step.name_of(outcome_name), what


def describes(storage: Storage, file: str, entry: BatchEntry) -> bool:
    head = read_bytes(storage, file, 0, entry.header_bytes).tobytes()
    expected = {
        name: {
            "dtype": tensor.stored,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.offset - len(head), tensor.offset - len(head) + tensor.size_bytes],
        }
        for name, tensor in entry.tensors.items()
    }
    try:
        return int.from_bytes(head[:8], "little") == len(head) - 8 and json.loads(head[8:]) == expected
    except (ValueError, RecursionError):
        return False


def problems_of_plan(step: RecordedStep, plan: Plan, lengths: np.ndarray) -> Iterator[str]:
    if plan.step != step.manifest.step:
        yield f"belongs to step {plan.step}"
    if plan.version > step.manifest.version:
        yield f"begins with weight version {plan.version}, and step.json ends with {step.manifest.version}"
    for number, item in enumerate(plan.details.get("minibatches", ())):
        rows, groups = rows_of(item)
        if sorted(row for group in groups for row in group) != sorted(rows):
            yield f"divides minibatch {number} into micro-batches with other rows"
        if problem := problem_of_rows(rows, len(lengths)):
            yield f"has a minibatch {number} with {problem}"


def rows_of(item: Any) -> tuple[list[int], list[list[int]]]:
    """Return the rows of a minibatch in a plan, and those of its micro-batches."""
    rows: Any = item.get("rows", []) if isinstance(item, dict) else None
    groups: Any = item.get("micro_batches", [rows]) if isinstance(item, dict) else None
    lists = [rows, *groups] if isinstance(groups, list) else [None]
    if not all(isinstance(each, list) and all(type(row) is int for row in each) for each in lists):
        return [-1], []
    return rows, groups


def problem_of_rows(rows: list[int], num_rows: int) -> str | None:
    """Return why a minibatch cannot have these rows, or None."""
    if outside := [row for row in rows if not 0 <= row < num_rows]:
        return f"row {outside[0]}, but the batch has {num_rows} rows"
    row, count = Counter(rows).most_common(1)[0] if rows else (0, 0)
    return f"row {row} {count} times" if count > 1 else None


def problems_of_outcome(
    step: RecordedStep, outcome: Outcome, plan: Plan | None, lengths: np.ndarray
) -> Iterator[str]:
    if outcome.step != step.manifest.step:
        yield f"belongs to step {outcome.step}"
    if outcome.version != step.manifest.version:
        yield f"has weight version {outcome.version}, and step.json {step.manifest.version}"
    trained: dict[int, list[list[int]]] = {}
    for micro in outcome.micro_batches:
        rows = list(micro.rows)
        trained.setdefault(micro.minibatch, []).append(rows)
        if problem := problem_of_rows(rows, len(lengths)):
            yield f"has a micro-batch with {problem}"
        elif micro.num_tokens != (num_tokens := int(lengths[rows].sum())):
            yield f"has a micro-batch of {micro.num_tokens} tokens, whose rows have {num_tokens}"
    minibatches = () if plan is None else plan.details.get("minibatches", ())
    planned = [rows_of(item)[1] for item in minibatches]
    if planned and [trained.get(number) for number in range(len(planned))] != planned:
        yield "has other micro-batches than the plan"


def prompt_problems(
    step: RecordedStep, rank: int, arrays: dict[str, np.ndarray], lengths: np.ndarray
) -> Iterator[Contradiction]:
    for row in np.flatnonzero(arrays.get("prompt_length", lengths) > lengths)[:1]:
        found = arrays["prompt_length"][row]
        yield (
            step.name_of(step.batch_entry(rank)[0]),
            f"has a prompt of {found} tokens in row {row} of {lengths[row]}",
        )


def text_problems(step: RecordedStep, rank: int, rewards: np.ndarray) -> Iterator[Contradiction]:
    """Yield rows of the text whose reward is not that of the batch, float64 [rows]."""
    lines = step.text(rank)
    if lines is None:
        return
    written = np.array([line["reward"] for line in lines], np.float64)
    for row in np.flatnonzero(~((rewards == written) | (np.isnan(rewards) & np.isnan(written))))[:1]:
        name = step.name_of(step.rank_name("text", rank, "jsonl"))
        yield name, f"has reward {written[row]:g} in row {row}, the batch {rewards[row]:g}"


def calls_problems(step: RecordedStep, rank: int, arrays: dict[str, np.ndarray]) -> Iterator[Contradiction]:
    prompts, episodes = arrays["prompt_id"].tolist(), arrays.get("episode", arrays["prompt_id"][:0]).tolist()
    rows = set(zip(prompts, episodes, strict=False))
    for one in step.calls(rank) or ():
        if (one.prompt_id, one.episode) not in rows:
            name = step.name_of(step.rank_name("calls", rank, "jsonl"))
            yield name, f"has episode {one.episode} of prompt {one.prompt_id}, which has no row"
            return


def learning_problems(step: RecordedStep, rank: int, cu_seqlens: np.ndarray) -> Iterator[Contradiction]:
    name = step.rank_name("learning", rank, "safetensors")
    if name not in step.manifest.batches:
        return
    if not np.array_equal(step.learning(rank, ["cu_seqlens"])["cu_seqlens"], cu_seqlens):
        yield step.name_of(name), "has rows of other lengths than the batch"


def prompts_of(step: RecordedStep) -> tuple[list[int], list[Contradiction]]:
    """Return the ids of a step's prompts, ascending, and a sample that is in it twice."""
    columns = [step.batch(rank, ["prompt_id", "sample_id"]) for rank in step.ranks]
    prompts, samples = (np.concatenate([c[key] for c in columns]) for key in ("prompt_id", "sample_id"))
    order = np.lexsort((samples, prompts))  # by prompt, then by sample
    prompts, samples = prompts[order], samples[order]
    is_new = prompts[1:] != prompts[:-1]
    twice = [
        (step.name_of(STEP_FILE), f"has sample {samples[again]} of prompt {prompts[again]} twice")
        for again in np.flatnonzero(~is_new & (samples[1:] == samples[:-1]))[:1]
    ]
    return prompts[np.concatenate([np.ones(min(1, len(prompts)), bool), is_new])].tolist(), twice


@dataclass
class Prompts:
    """The prompts of all steps: one is trained in one step, each of its samples once."""

    steps: list[int] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)

    def add(self, step: int, ids: Sequence[int]) -> None:
        self.steps.append(step)
        self.ids.append(np.array(ids, np.int64))

    def repeated(self) -> Iterator[tuple[int, str]]:
        """Yield each step that has a prompt of an earlier one, with the first such prompt."""
        if not self.ids:
            return
        ids = np.concatenate(self.ids)
        steps = np.repeat(self.steps, [len(each) for each in self.ids])
        order = np.argsort(ids, kind="stable")  # steps ascend among equal ids
        ids, steps = ids[order], steps[order]
        again = np.flatnonzero(ids[1:] == ids[:-1]) + 1
        _, firsts = np.unique(steps[again], return_index=True)
        for index in again[firsts]:
            yield int(steps[index]), f"has prompt {ids[index]}, which step {steps[index - 1]} has, too"
