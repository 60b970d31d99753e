"""Recorded rollouts as the trainer's source: the batches that the trainer saw, bit for bit, and no engine."""

from typing import Any

import numpy as np
import torch

from areal_core.batch import scatter_tokens
from areal_core.engine.determinism import set_rng_state
from areal_core.rollout.source import TrainedWeights
from recorder import Record
from recorder.format import TensorEntry
from replayer.before import check_ranks

# numpy lacks these types; the recorder hands out their bits
TORCH_ONLY = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


class RecordedRollouts:
    """Gives data-parallel rank `data_parallel_rank` what it was given at each recorded step.

    Raises WrongRankCount unless `data_parallel_size` ranks recorded.
    """

    def __init__(self, record: Record, data_parallel_rank: int, data_parallel_size: int) -> None:
        check_ranks(record, data_parallel_size)
        self.record, self.rank = record, data_parallel_rank

    def next_batch(self, step: int, version: int) -> dict[str, torch.Tensor]:
        """The padded batch of a step, on the CPU; sets the RNG states with which the trainer went on from it.

        `version` is the trainer's and changes nothing.

        Raises StepNotRecorded, and DamagedRecord with file and tensor when bytes are not the ones written.
        """
        recorded = self.record.step(step)
        set_rng_state(recorded.plan(self.rank).rng)
        _, entry = recorded.batch_entry(self.rank)
        arrays = recorded.batch(self.rank)
        lengths = np.diff(arrays.pop("cu_seqlens"))
        mask = torch.from_numpy(np.arange(entry.padded_length) < lengths[:, None])
        tensors = {key: as_tensor(array, entry.tensors[key]) for key, array in arrays.items()}
        return {"attention_mask": mask} | {
            key: scatter_tokens(tensor, mask) if entry.tensors[key].axis == "token" else tensor
            for key, tensor in tensors.items()
        }

    def update_weights(self, engine: TrainedWeights, version: int) -> None:
        """Nothing: there is no engine that could want them."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: the trainer's step number says where it is."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Nothing to close: files are open only while they are read."""


def as_tensor(array: np.ndarray, entry: TensorEntry) -> torch.Tensor:
    """The array as a tensor of the dtype that the trainer saw."""
    tensor = torch.from_numpy(array)
    return tensor.view(TORCH_ONLY[entry.dtype]) if entry.dtype in TORCH_ONLY else tensor
