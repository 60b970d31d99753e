"""Recorded rollouts as the trainer's source: the batches that the trainer saw, bit for bit, and no engine.

On as many ranks as recorded, each gets what it got. On another number of ranks the groups of all are dealt anew, as the prompt loader
deals prompts: group i of the step goes to rank i modulo their number.
"""

from typing import Any

import numpy as np
import torch

from areal_core.batch import Batch, pad_and_concat, scatter_tokens, select_rows, sort_canonical
from areal_core.engine.determinism import set_rng_state
from areal_core.rollout.source import TrainedWeights
from recorder import Record, RecordedStep
from recorder.format import TensorEntry

# numpy lacks these types; the recorder hands out their bits
TORCH_ONLY = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


class RecordedRollouts:
    """Gives data-parallel rank `data_parallel_rank` of `data_parallel_size` its rows of each recorded step."""

    def __init__(self, record: Record, data_parallel_rank: int, data_parallel_size: int) -> None:
        self.record, self.rank, self.size = record, data_parallel_rank, data_parallel_size

    def next_batch(self, step: int, version: int) -> Batch:
        """The padded batch of a step, on the CPU; sets the RNG states with which the trainer went on from it, where recorded.

        `version` is the trainer's and changes nothing.

        Raises StepNotRecorded, and DamagedRecord with file and tensor when bytes are not the ones written.
        """
        recorded = self.record.step(step)
        num_recorded = recorded.manifest.num_ranks
        if self.record.header.recording.scope != "rollout":
            # With more ranks than recorded, some share a state; only dropout draws from it.
            set_rng_state(recorded.plan(self.rank % num_recorded).rng)
        if self.size == num_recorded:
            return recorded_batch(recorded, self.rank)
        return deal([recorded_batch(recorded, rank) for rank in range(num_recorded)], self.rank, self.size)

    def update_weights(self, engine: TrainedWeights, version: int) -> None:
        """Nothing: there is no engine that could want them."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: the trainer's step number says where it is."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Nothing to close: files are open only while they are read."""


def recorded_batch(recorded: RecordedStep, rank: int) -> Batch:
    """What a rank trained on in a step, padded as it was."""
    _, entry = recorded.batch_entry(rank)
    arrays = recorded.batch(rank)
    lengths = np.diff(arrays.pop("cu_seqlens"))
    mask = torch.from_numpy(np.arange(entry.padded_length) < lengths[:, None])
    tensors = {key: as_tensor(array, entry.tensors[key]) for key, array in arrays.items()}
    return {"attention_mask": mask} | {
        key: scatter_tokens(tensor, mask) if entry.tensors[key].axis == "token" else tensor
        for key, tensor in tensors.items()
    }


def deal(batches: list[Batch], rank: int, size: int) -> Batch:
    """This rank's groups of a step that other ranks recorded, in canonical order."""
    whole = sort_canonical(pad_and_concat(batches))
    group = torch.unique(whole["prompt_id"], return_inverse=True)[1]  # [B], ascending with prompt_id
    return select_rows(whole, (group % size == rank).nonzero()[:, 0].tolist())


def as_tensor(array: np.ndarray, entry: TensorEntry) -> torch.Tensor:
    """The array as a tensor of the dtype that the trainer saw."""
    tensor = torch.from_numpy(array)
    return tensor.view(TORCH_ONLY[entry.dtype]) if entry.dtype in TORCH_ONLY else tensor
