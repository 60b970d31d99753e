"""slime and miles: `rollout_data/{rollout_id}.pt`, a `torch.save` of a dict of samples.

A sample is a `Sample.to_dict()`: `tokens` are prompt and response; `loss_mask` and
`rollout_log_probs` cover the response only. miles adds members and keeps the layout.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recorder.errors import ForeignFormat
from recorder.importers.foreign import Foreign, Step, completion_sample, files_in_order, member, optional
from recorder.importers.unpickle import first_strings, load_pickle
from recorder.trainers.sample import ABORT, FINISH_REASONS, Sample

MEMBERS = {"rollout_id", "samples"}
NOTES = (
    "advantages are not in the file: they are computed again from the rewards, by group",
    "slime normalises rewards over n adjacent samples; here samples with one group_index are a group",
    "weights and optimizer are not in the file: choose the model for a replay",
)


def recognises(path: Path) -> bool:
    """Return whether the path is a file with `rollout_id` and `samples`, or a folder of such files.

    The files may also be in its subfolder `rollout_data`.
    """
    files = rollout_files(path)
    return bool(files) and files[0].suffix == ".pt" and first_strings(files[0]) >= MEMBERS


def is_rollout(document: Any) -> bool:
    """Return whether the document has the members of a slime rollout."""
    return isinstance(document, dict) and document.keys() >= MEMBERS


def rollout_files(path: Path) -> list[Path]:
    """List the training rollouts in order, without those for evaluation."""
    folder = path / "rollout_data" if (path / "rollout_data").is_dir() else path
    return [file for file in files_in_order(folder, "*.pt") if not file.stem.startswith("eval_")]


def read(path: Path) -> Foreign:
    """Read all rollouts. Raises ForeignFormat, UnsafePickle."""
    steps = []
    for file in rollout_files(path):
        document = load_pickle(file)
        if not is_rollout(document):
            raise ForeignFormat(f"{file} is not a slime rollout: it lacks rollout_id or samples")
        samples = [
            parse_sample(sample, f"{file}, sample {number}")
            for number, sample in enumerate(document["samples"])
        ]
        steps.append(Step(f"rollout {document['rollout_id']}", samples))
    return Foreign("slime", steps, NOTES)


def parse_sample(document: Mapping[str, Any], where: str) -> Sample:
    """Parse one sample."""
    tokens = np.asarray(member(document, "tokens", where), np.int64)
    size = member(document, "response_length", where)
    mask = optional(document, "loss_mask", np.ones(size, np.int32))
    if optional(document, "remove_sample", False):
        mask = np.zeros(size, np.int32)
    status = status_of(optional(document, "status", "completed"))
    prompt = optional(document, "prompt", "")
    return completion_sample(
        tokens[: len(tokens) - size],
        tokens[len(tokens) - size :],
        loss_mask=mask,
        logprobs=optional(document, "rollout_log_probs"),
        reward=reward_of(optional(document, "reward"), where),
        group=optional(document, "group_index", where),
        finish_reason=FINISH_REASONS.get(status, ABORT),
        versions=version_of(optional(document, "weight_versions"), size),
        text=(prompt if isinstance(prompt, str) else str(prompt), optional(document, "response", "")),
        where=where,
    )


def status_of(status: Any) -> str:
    """Return the status as text; some versions store an enum."""
    return str(status.arguments[0]) if not isinstance(status, str) else status


def reward_of(reward: Any, where: str) -> float | None:
    """Return the reward, a number or a dict of one. Raises ForeignFormat if a dict has several."""
    if not isinstance(reward, dict):
        return None if reward is None else float(reward)
    if len(reward) != 1:
        raise ForeignFormat(
            f"{where} has rewards {sorted(reward)}: slime picks one with --reward-key; keep only that one"
        )
    return float(next(iter(reward.values())))


def version_of(versions: Any, size: int) -> np.ndarray | None:
    """Return the weight version of each token, or None if the sample has several versions.

    slime lists one version per turn, but not where turns end.
    """
    found = {str(version) for version in versions} if versions is not None else set()
    (version,) = found if len(found) == 1 else ("",)
    return np.full(size, int(version)) if version.isdigit() else None
