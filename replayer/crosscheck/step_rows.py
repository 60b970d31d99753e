"""One recorded step as padded float64 matrices of the rows of all ranks, next-token aligned.

The record is read in a confined child (`read_confined`), which sends arrays: what computes with
them needs torch and other people's packages, and never sees the files.
"""

import base64
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from areal_core.data.routed_experts import ROUTED_EXPERTS
from recorder import Record, RecordedStep, StepNotRecorded, open_record
from recorder.confine import in_child
from replayer.crosscheck.options import TABLE
from replayer.own_code import by_name
from replayer.step_weights import Folder, read_folder, shown_version, start_version

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

LEARNING = (
    *("advantages", "total_rewards", "kl_rewards", "prox_logp", "ref_logp", "values", "current_logp"),
    *("teacher_logp", "entropy", "returns"),
)
LENGTH = "prompt_length"
NEEDED = ("prompt_id", "loss_mask", "finish_reason", "rewards")
# Names of the loss, with and without KL and entropy, and of the gradient norm of a step's only update.
LOSS_NAMES, OF_POLICY, NORM_NAMES = (TABLE["names"][of] for of in ("loss", "loss of the policy", "norm"))


@dataclass(frozen=True)
class Update:
    """An optimizer step: its rows of `StepRows`, and what the trainer recorded of it.

    `same_weights`: it starts from the weights that the step started from. `with_kl`: the loss
    includes the KL to the reference and the entropy, if they are in it.
    """

    rows: npt.NDArray[np.int64]
    loss: float | None
    grad_norm: float | None
    same_weights: bool = True
    with_kl: bool = True


@dataclass(frozen=True)
class Origin:
    """What a record says about the run of a step.

    `starts_from_model`: the step starts from the weights at `model_path`, whose files were
    `model_files`. `is_shown`: the record shows that the folder given has them.
    `has_own_logprobs`: `prox_logp` is of the trainer, not the engine's.
    """

    path: str
    config: dict[str, Any]
    trainer: str | None
    model_path: str | None
    model_files: dict[str, Any]
    starts_from_model: bool
    is_shown: bool = True
    has_own_logprobs: bool = True


@dataclass(frozen=True)
class StepRows:
    """The rows of a step, [N], and their tokens, [N, T].

    Attributes:
        place: rank, row, prompt_id and sample_id of each row, [N, 4].
        unknown: those of `NEEDED` that some rows lack.
        mask: position t describes token t + 1, as in all matrices.
        tensors: matrices by name: `logprobs` (of the sampling policy), and those of `LEARNING` that
            were recorded; nan where a value is not known.
        stats: over all ranks.
        prompts: tokens of each row before its completion, -1 where that is not known.
        noise: how far `current_logp` may be from the log-probs of the recorded run.
        experts: `routed_experts` that the run computed with, [N, T, layers, width].
    """

    origin: Origin
    step: int
    place: npt.NDArray[np.int64]
    input_ids: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    rewards: Floats
    finish_reason: npt.NDArray[np.int64]
    unknown: tuple[str, ...]
    mask: Bools
    tensors: dict[str, Floats]
    updates: tuple[Update, ...]
    stats: dict[str, float]
    prompts: npt.NDArray[np.int64]
    noise: float = 0.0
    experts: npt.NDArray[Any] | None = None

    @cached_property
    def groups(self) -> npt.NDArray[np.int64]:
        """Number of each row's prompt, [N], from 0."""
        return np.unique(self.place[:, 2], return_inverse=True)[1].astype(np.int64)

    @cached_property
    def trajectories(self) -> npt.NDArray[np.int64]:
        """The last row of each row's trajectory, [N]: the prompt of a later turn begins with the turns before it."""
        last, own = np.arange(len(self.lengths)), self.lengths
        for row in np.argsort(-own, kind="stable").tolist():
            prompt = self.input_ids[row, : max(self.prompts[row], 0)]
            is_free = (
                (self.groups == self.groups[row]) & (own <= len(prompt)) & (last == np.arange(len(last)))
            )
            for other in np.flatnonzero(is_free).tolist():
                if np.array_equal(self.input_ids[other, : own[other]], prompt[: own[other]]):
                    last[other] = last[row]
        return last

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Numbers that are easily taken for that of the tokens that count, by name."""
        padded, after = self.lengths.max() * len(self.lengths), int((self.lengths - self.prompts).sum())
        found = {"tokens of all rows": int(self.lengths.sum()), "positions of the padded rows": int(padded)}
        return found | ({"tokens after the prompts": after} if (self.prompts > 0).all() else {})

    @cached_property
    def fills(self) -> Bools:
        """Whether a row is another one again, without a token that counts: it only fills a batch up, [N]."""
        rows = [
            (*place, *ids.tolist()) for place, ids in zip(self.place[:, 2:3], self.input_ids, strict=True)
        ]
        counts = Counter(rows)
        return np.array([counts[row] > 1 for row in rows]) & ~self.mask.any(1)


def read_confined(path: str, step: int | None, model: str | None = None) -> StepRows:
    """Read a step, by default the first, in a confined child. Raises what `read_rows` does."""
    folder = None if model is None else read_folder(model)

    def read() -> Any:
        return msgspec.to_builtins(
            read_rows(open_record(path), step, folder),
            enc_hook=lambda of: (str(of.dtype), of.shape, base64.b64encode(of.tobytes()).decode()),
        )

    def array(_: Any, value: Any) -> npt.NDArray[Any]:
        return np.frombuffer(base64.b64decode(value[2]), value[0]).reshape(value[1]).copy()

    return msgspec.convert(in_child(read, [path]), StepRows, dec_hook=array)


def read_rows(record: Record, step: int | None, given: Folder | None = None) -> StepRows:
    """Read a step of a record, by default the first.

    Args:
        given: the folder that should have the weights that the step starts from.

    Raises:
        ValueError: there is no step, or no token in its loss mask.
        StepNotRecorded, DamagedRecord: of the record.
    """
    if not record.steps:
        raise ValueError(f"{record.path} has no finished step: there is nothing to check")
    step = record.steps[0] if step is None else step
    recorded = record.step(step)
    ranks = range(recorded.manifest.num_ranks)
    batches = [recorded.batch(rank) for rank in ranks]
    learning: list[dict[str, npt.NDArray[Any]]] = []
    for number in ranks:
        file = recorded.manifest.batches.get(recorded.rank_name("learning", number, "safetensors"))
        entries = {} if file is None else file.tensors
        keys = [key for key in LEARNING if key in entries and entries[key].axis == "token"]
        learning.append(recorded.learning(number, keys) if entries else {})
    lengths = np.concatenate([np.diff(batch["cu_seqlens"]) for batch in batches])
    present = np.arange(int(lengths.max(initial=1))) < lengths[:, None]

    def matrix(flat: list[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
        padded = np.zeros((*present.shape, *flat[0].shape[1:]), dtype)
        padded[present] = np.concatenate(flat)
        return padded

    def column(key: str) -> npt.NDArray[Any]:
        return np.concatenate([batch[key] for batch in batches])

    mask = shifted(matrix([batch["loss_mask"] for batch in batches], bool))
    if not mask.any():
        raise ValueError(
            f"step {step} of {record.path} has no token in the loss mask: there is nothing to check"
        )
    logprobs = np.where(mask, shifted(matrix([batch["logprobs"] for batch in batches], np.float64)), 0.0)
    names = [name for name in LEARNING if all(name in tensors for tensors in learning)]
    rank = np.concatenate([np.full(len(batch["rewards"]), rank) for rank, batch in enumerate(batches)])
    row = np.concatenate([np.arange(len(batch["rewards"])) for batch in batches])
    of_prompts = zip(ranks, batches, strict=True)
    prompts = [np.where(recorded.known(n, LENGTH), batch.get(LENGTH, -1), -1) for n, batch in of_prompts]
    try:
        outcome = dict(recorded.outcome(0).stats)  # reduced over ranks
    except StepNotRecorded:
        outcome = {}
    experts = [batch[ROUTED_EXPERTS] for batch in batches if ROUTED_EXPERTS in batch]
    return StepRows(
        origin=origin_of(record, step, given),
        step=step,
        place=np.stack([rank, row, column("prompt_id"), column("sample_id")], 1).astype(np.int64),
        input_ids=matrix([batch["input_ids"] for batch in batches], np.int64),
        lengths=lengths,
        rewards=column("rewards").astype(np.float64),
        finish_reason=column("finish_reason").astype(np.int64),
        unknown=tuple(key for key in NEEDED if not all(recorded.known(rank, key).all() for rank in ranks)),
        mask=mask,
        tensors={"logprobs": logprobs}
        | {name: matrix([tensors[name] for tensors in learning], np.float64) for name in names},
        updates=updates_of(recorded, rank, row, outcome),
        stats=outcome,
        prompts=np.concatenate(prompts).astype(np.int64),
        experts=matrix(experts, experts[0].dtype) if experts else None,
    )


def origin_of(record: Record, step: int, given: Folder | None) -> Origin:
    header, model = record.header, record.header.model
    starts = record.step(step).manifest.version == 1 and step == record.steps[0]
    is_shown = starts or given is None
    if given is not None and not starts:
        needed = start_version(record, step)
        is_shown = shown_version(record, step, needed, given, "the step starts from") is not None
    ranks = range(record.step(step).manifest.num_ranks)
    has_own = all(record.step(step).trainer_logprobs(rank) is not None for rank in ranks)
    return Origin(
        record.path, by_name(header), header.trainer, model["path"], model["files"], starts, is_shown, has_own
    )


def shifted(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Move columns left by one, so that position t describes token t + 1; the last becomes 0."""
    return np.concatenate([values[:, 1:], np.zeros_like(values[:, :1])], axis=1)


def updates_of(
    recorded: RecordedStep,
    rank: npt.NDArray[Any],
    row: npt.NDArray[Any],
    stats: dict[str, float],
) -> tuple[Update, ...]:
    try:
        plans = [recorded.plan(number).details for number in range(recorded.manifest.num_ranks)]
    except StepNotRecorded:
        plans = []
    if not plans or any("minibatches" not in plan for plan in plans):
        names = [next((name for name in known if name in stats), None) for known in (LOSS_NAMES, NORM_NAMES)]
        only, its_norm = (None if name is None else stats[name] for name in names)
        return (Update(np.arange(len(row)), only, its_norm, with_kl=names[0] not in OF_POLICY),)
    found, same = [], True
    for number, update in enumerate(plans[0]["minibatches"]):
        chosen = [
            np.flatnonzero((rank == at) & np.isin(row, plan["minibatches"][number]["rows"]))
            for at, plan in enumerate(plans)
        ]
        loss, norm = (float.fromhex(update[name]) for name in ("loss", "grad_norm"))
        found.append(Update(np.concatenate(chosen), loss, norm, same))
        same = same and float.fromhex(update["lr"]) == 0.0
    return tuple(found)
