"""Recorded rollouts as the trainer's source: the same batches, bit for bit, no engine.

With the recorded number of ranks, each gets its own batches. With another number, the groups of all
ranks are redistributed as the prompt loader distributes prompts: group i of the step goes to rank i
modulo their number.
"""

from typing import Any

import numpy as np
import torch

from areal_core.data.batch import Batch, pad_and_concat, scatter_tokens, select_rows, sort_canonical
from areal_core.engine.determinism import set_rng_state
from areal_core.rollout.source import TrainedWeights
from recorder import Record, RecordedStep
from recorder.format import BATCH_KEYS, IMAGE_DATA, IMAGE_KEYS, TensorEntry

# NumPy lacks these types; the recorder returns their bits
TORCH_ONLY = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


class WithoutEngine:
    """What a source does that has no inference engine, and no state but the trainer's step."""

    def update_weights(self, engine: TrainedWeights, version: int) -> None:
        """Do nothing: there is no engine."""

    def state_dict(self) -> dict[str, Any]:
        """Return no state: the trainer's step number is enough."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state."""

    def close(self) -> None:
        """Do nothing: nothing stays open."""


class RecordedRollouts(WithoutEngine):
    """A source of the recorded rows of one data-parallel rank."""

    def __init__(self, record: Record, data_parallel_rank: int, data_parallel_size: int) -> None:
        self.record, self.rank, self.size = record, data_parallel_rank, data_parallel_size

    def next_batch(self, step: int, version: int) -> Batch:
        """Return the padded batch of a step, on the CPU; also restores recorded RNG states.

        `version` is the trainer's and changes nothing.

        Raises StepNotRecorded, and DamagedRecord with file and tensor if bytes differ from those
        written.
        """
        recorded = self.record.step(step)
        num_recorded = recorded.manifest.num_ranks
        if self.record.header.recording.has_plans:
            # With more ranks than recorded, some share an RNG state; only dropout uses it.
            set_rng_state(recorded.plan(self.rank % num_recorded).rng)
        if self.size == num_recorded:
            return recorded_batch(recorded, self.rank)
        return redistribute(
            [recorded_batch(recorded, rank) for rank in range(num_recorded)], self.rank, self.size
        )


def recorded_batch(recorded: RecordedStep, rank: int) -> Batch:
    """Return the batch of a rank in a step, padded as it was.

    Pictures are their bytes again. Of another trainer's batch it has the keys that every batch has,
    and those of pictures; a token whose version is unknown counts as sampled by the weights of the
    step.
    """
    _, entry = recorded.batch_entry(rank)
    arrays = recorded.batch(rank)
    lengths = np.diff(arrays.pop("cu_seqlens"))
    if "unknown" in arrays:
        kept = (*BATCH_KEYS, *IMAGE_KEYS, "mm_token_type_ids")
        arrays = {key: arrays[key] for key in kept if key in arrays}
        guessed = ~np.repeat(recorded.known(rank, "versions"), lengths) & arrays["loss_mask"].astype(bool)
        arrays["versions"][guessed] = recorded.manifest.version - 1
    mask = torch.from_numpy(np.arange(entry.padded_length) < lengths[:, None])
    pictures = {}
    if arrays.pop("image_sha256", None) is not None:
        pictures[IMAGE_DATA] = torch.from_numpy(recorded.image_data(rank))
    tensors = {key: as_tensor(array, entry.tensors[key]) for key, array in arrays.items()}
    return (
        {"attention_mask": mask}
        | {
            key: scatter_tokens(tensor, mask) if entry.tensors[key].axis == "token" else tensor
            for key, tensor in tensors.items()
        }
        | pictures
    )


def redistribute(batches: list[Batch], rank: int, size: int) -> Batch:
    """Return this rank's groups of a step that other ranks recorded, in canonical order."""
    batch = sort_canonical(pad_and_concat(batches))
    group = torch.unique(batch["prompt_id"], return_inverse=True)[1]  # [B], ascending
    return select_rows(batch, (group % size == rank).nonzero()[:, 0].tolist())


def as_tensor(array: np.ndarray, entry: TensorEntry) -> torch.Tensor:
    """Convert the array to a tensor of the trainer's dtype."""
    tensor = torch.from_numpy(array)
    return tensor.view(TORCH_ONLY[entry.dtype]) if entry.dtype in TORCH_ONLY else tensor
