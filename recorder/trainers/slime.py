"""slime and miles: `rollout_data/{rollout_id}.pt`, a `torch.save` of a dict of samples.

A sample is a `Sample.to_dict()`: `tokens` are prompt and response; `loss_mask` and
`rollout_log_probs` cover the response only. miles adds members and keeps the layout. The inputs to
the loss are in `train_data/`: one file per rollout with `samples`, or one per rank with columns.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import ForeignFormat, UnfinishedFile
from recorder.trainers.file_pictures import pictures_in
from recorder.trainers.foreign import (
    FROM_REWARDS,
    NO_WEIGHTS,
    Foreign,
    Source,
    completion_sample,
    finish_reason_of,
    member,
    number_or_none,
    optional,
    read_files,
    values_of_inputs,
    with_cut_off,
)
from recorder.trainers.guarded import Guarded
from recorder.trainers.recorder import to_number
from recorder.trainers.sample import LEARNING as INPUTS
from recorder.trainers.sample import Sample
from recorder.trainers.unpickle import first_strings, is_cut_off, load_pickle

MEMBERS = {"rollout_id", "samples"}
OF_TRAINING = {"dp_shards", "format_version"}  # of what a training step was given: other files
NOTES = (
    "slime normalises rewards over n adjacent samples; here samples with one group_index are a group",
    NO_WEIGHTS,
)
LEARNING = {
    "advantages": "advantages",
    "returns": "returns",
    "log_probs": INPUTS["old_logprobs"],
    "ref_log_probs": INPUTS["ref_logprobs"],
    "values": "values",
    "entropy": INPUTS["entropies"],
}
CONTEXT_PARALLEL = "inputs to the loss of context-parallel ranks are slices, and not imported"


def find(source: Source) -> list[Path]:
    """Return the rollouts for training, and files beside them that are cut off."""
    files = [file for file in source.named(r".*\.pt") if not file.name.startswith("eval_")]
    found = [file for file in files if is_rollout(first_strings(file))]
    return with_cut_off(found, files, is_cut_off)


def is_rollout(names: set[Any]) -> bool:
    return names >= MEMBERS and not names & OF_TRAINING


def read(source: Source, files: Sequence[Path]) -> Foreign:
    """Read one step per file. Raises ForeignFormat, UnsafePickle."""
    trained: dict[Path, list[Path]] = {}
    for file in source.named(r"\d+(_\d+)?\.pt", "train_data"):
        trained.setdefault(file.parents[1] / file.stem.split("_")[0], []).append(file)

    def read_file(file: Path, notes: list[str]) -> list[Sample]:
        return read_rollout(file, trained.get(file.parents[1] / file.stem, []), notes)

    return read_files("slime", NOTES, files, read_file, step="rollout {}")


def read_rollout(file: Path, trained: Sequence[Path], notes: list[str]) -> list[Sample]:
    document = load_pickle(file)
    if not isinstance(document, dict) or not is_rollout(set(document)):
        raise ForeignFormat(f"{file} is not a slime rollout: it lacks rollout_id or samples")
    found = list(document["samples"])
    learning = learning_of(trained, notes)
    notes += [] if learning else [FROM_REWARDS]
    return [
        with_learning(
            replace(
                parse_sample(sample, f"{file}, sample {number}"),
                **pictures_in(sample.get("multimodal_train_inputs"), sample.get("multimodal_inputs"), notes),
            ),
            learning.get(("position", number)) or learning.get(("index", sample.get("index"))) or {},
        )
        for number, sample in enumerate(found)
    ]


def learning_of(files: Sequence[Path], notes: list[str]) -> dict[tuple[str, Any], Mapping[str, Any]]:
    """Return what the samples of a rollout were trained with, by position or index."""
    found: dict[tuple[str, Any], Mapping[str, Any]] = {}
    for file in files:
        try:
            document = load_pickle(file)
        except UnfinishedFile as error:
            notes.append(f"{error}: it is left out")
            continue
        for sample in trained_samples(document, file, notes):
            position, index = (optional(sample, name) for name in ("rollout_position", "sample_index"))
            found["index" if position is None else "position", index if position is None else position] = (
                sample
            )
    return found


def trained_samples(document: Any, file: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    if not isinstance(document, dict) or not document.keys() & {"samples", "rollout_data"}:
        raise ForeignFormat(f"{file} is not of slime's training: it lacks samples or rollout_data")
    if "samples" in document:
        return list(document["samples"])
    if document.get("cp_size", 1) > 1:
        notes.append(CONTEXT_PARALLEL)
        return []
    columns = document["rollout_data"]
    names = [name for name in ("tokens", *LEARNING) if optional(columns, name) is not None]
    return [
        {name: columns[name][row] for name in names} | {"sample_index": index}
        for row, index in enumerate(optional(columns, "sample_indices", []))
    ]


def with_learning(sample: Sample, trained: Mapping[str, Any]) -> Sample:
    if sample.tokens is None or not np.array_equal(optional(trained, "tokens", ()), sample.tokens):
        return sample
    before = np.zeros(sample.prompt_length or 0, np.float32)
    values = {
        name: np.concatenate([before, np.asarray(trained[key], np.float32)])
        for key, name in LEARNING.items()
        if optional(trained, key) is not None
    }
    whole = {name: array for name, array in values.items() if len(array) == sample.num_tokens}
    return replace(sample, learning={**sample.learning, **whole})


def parse_sample(
    document: Mapping[str, Any], where: str, reward_key: str | None = None, is_chosen: bool = False
) -> Sample:
    """Parse one sample; `reward_key` chooses one of several rewards, if `is_chosen` also none."""
    tokens = np.asarray(member(document, "tokens", where))
    size = int(member(document, "response_length", where))
    if not 0 <= size <= len(tokens):
        raise ForeignFormat(f"{where}: response_length is {size}, and there are {len(tokens)} tokens")
    mask = optional(document, "loss_mask", np.ones(size, np.int32))
    if optional(document, "remove_sample", False):
        mask = np.zeros(size, np.int32)
    prompt = optional(document, "prompt")
    reward, scores = rewards_of(optional(document, "reward"), where, reward_key, is_chosen)
    return completion_sample(
        tokens[: len(tokens) - size],
        tokens[len(tokens) - size :],
        loss_mask=mask,
        logprobs=optional(document, "rollout_log_probs"),
        reward=reward,
        scores=scores,
        group=optional(document, "group_index"),
        finish_reason=finish_reason_of(status_of(optional(document, "status"))),
        versions=version_of(optional(document, "weight_versions"), size),
        learning={"teacher_logp": optional(document, "teacher_log_probs")},
        extras={
            name: values_of_inputs(document[key], len(tokens), f"{where}, {key}")
            for key, name in PER_INPUT.items()
            if optional(document, key) is not None
        },
        text=(prompt if isinstance(prompt, str) else str(prompt or ""), optional(document, "response", "")),
        where=where,
    )


def status_of(status: Any) -> str | None:
    """Return the status as text; some versions store an enum."""
    return status if status is None or isinstance(status, str) else str(status.arguments[0])


def rewards_of(
    reward: Any, where: str, key: str | None = None, is_chosen: bool = False
) -> tuple[float | None, dict[str, float | None]]:
    """Return the reward, a number or a dict of one, and what else it was made of.

    Raises ForeignFormat if a dict has several and none is chosen.
    """
    if not isinstance(reward, Mapping):
        return number_or_none(reward, f"{where}, reward"), {}
    scores = {
        str(name): number_or_none(value, f"{where}, reward")
        for name, value in reward.items()
        if value is None or isinstance(value, int | float)
    }
    if is_chosen:  # by the run
        return scores.get(key or ""), scores
    chosen = key or (next(iter(scores)) if len(reward) == len(scores) == 1 else "")
    if chosen not in scores:
        raise ForeignFormat(
            f"{where} has rewards {sorted(map(str, reward))}: slime picks one with --reward-key; keep only that one"
        )
    return scores[chosen], scores if len(scores) > 1 else {}


def version_of(versions: Any, size: int) -> np.ndarray | None:
    """Return the weight version of each token, or None if the sample has several versions.

    slime lists one version per turn, but not where turns end.
    """
    found = {str(version) for version in versions} if versions is not None else set()
    (version,) = found if len(found) == 1 else ("",)
    return np.full(size, int(version)) if version.isdecimal() else None


# what a sample has: recorded and imported alike
SAMPLE = (
    *("tokens", "response_length", "loss_mask", "remove_sample", "prompt", "response", "status", "reward"),
    *("rollout_log_probs", "teacher_log_probs", "group_index", "weight_versions"),
    *("rollout_routed_experts", "rollout_indexer_topk"),
)
# [T - 1, layers, k]: the last token was never an input
PER_INPUT = {"rollout_routed_experts": "routed_experts", "rollout_indexer_topk": "indexer_topk"}
NOT_RECORDED = ("multimodal_inputs", "multimodal_train_inputs", "rollout_top_p_token_ids", "opd_reverse_kl")


def record(
    rollout_id: int,
    args: Any,
    samples: Sequence[Any],
    rollout_extra_metrics: Mapping[str, Any] | None,
    rollout_time: float,
) -> bool:
    """Record the samples of a rollout; return False, which keeps the default log.

    `samples` are slime's or miles' `Sample`s, or nested lists of them; `args` is the namespace of
    the run.
    """
    rows = list(flat(samples))
    recording = recording_of("miles" if rows and type(rows[0]).__module__.startswith("miles") else "slime")
    recording.step(
        rollout_id,
        lambda: [
            parse_sample(document_of(row), f"sample {number}", args.reward_key, is_chosen=True)
            for number, row in enumerate(rows)
        ],
        not_recorded=[name for name in NOT_RECORDED if any(has(row, name) for row in rows)],
        config=args,
        stats={**(rollout_extra_metrics or {}), "rollout_time": rollout_time},
    )
    return False


@functools.cache
def recording_of(trainer: str) -> Guarded:
    return Guarded(trainer)


def flat(samples: Any) -> Iterator[Any]:
    """Yield the samples of nested lists."""
    for item in samples:
        yield from flat(item) if isinstance(item, list) else (item,)


def has(sample: Any, member: str) -> bool:
    """Return whether a sample has a value, which one of the two frameworks may not know."""
    return getattr(sample, member, None) is not None


def document_of(sample: Any) -> dict[str, Any]:
    """Return a sample as `Sample.to_dict()` has it; what a framework does not know is None."""
    document = {name: getattr(sample, name, None) for name in SAMPLE}
    reward, prompt = document["reward"], document["prompt"]
    if isinstance(reward, Mapping):
        document["reward"] = {name: to_number(value) for name, value in reward.items()}
    document["status"] = sample.status.value
    return document | {"prompt": prompt if isinstance(prompt, str) else str(prompt)}
