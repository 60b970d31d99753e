"""The trainer's log-probs, computed by the engine that trains, on one rank of this machine."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_core.config import MicroBatchSpec, TrainEngineConfig
from areal_core.data.batch import Batch
from areal_core.engine.parity import batch_of, require_parity
from areal_core.engine.ranks import Ranks
from areal_core.trainer.build import shard_engine

TOKENS_PER_MICRO_BATCH = 8192
UPDATE = 1e-3  # standard deviation of the noise that stands for a training step


class Trainer:
    """A train engine with `attn_impl=batch_invariant`.

    Args:
        path: folder of the model.
        dtype: of compute.

    Raises:
        ModelError: the model cannot be loaded, or its log-probs depend on the batch.
    """

    def __init__(self, path: str, dtype: str, ranks: Ranks) -> None:
        options = TrainEngineConfig(
            path=path,
            dtype=dtype,
            attn_impl="batch_invariant",
            mb_spec=MicroBatchSpec(max_tokens_per_mb=TOKENS_PER_MICRO_BATCH),
        )
        self._engine = shard_engine(options, ranks)
        require_parity(self._engine, path)

    def score(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[float]]:
        """Return the log-probs of the completions of rows, (prompt, completion) each."""
        batch = batch_with_mask(rows)
        scored = self._engine.compute_logprobs(batch).tolist()
        return [
            line[len(prompt) - 1 : len(prompt) - 1 + len(completion)]
            for line, (prompt, completion) in zip(scored, rows, strict=True)
        ]

    @torch.no_grad()
    def change_weights(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self._engine.model.parameters():
            mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            mine.add_(UPDATE * torch.randn(mine.shape, generator=generator))

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Return the weights as training sends them to an engine."""
        return self._engine.named_full_tensors()


def batch_with_mask(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Batch:
    batch = batch_of([torch.tensor([*prompt, *completion]) for prompt, completion in rows])
    starts = torch.tensor([len(prompt) - 1 for prompt, _ in rows])
    places = torch.arange(batch["loss_mask"].shape[1])
    batch["loss_mask"] *= places >= starts[:, None]
    return batch
