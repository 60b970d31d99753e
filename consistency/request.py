"""Options of a comparison: the model that should have sampled, and further checkpoints."""

from dataclasses import dataclass
from pathlib import Path

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Request:
    """Options of a comparison. Checkpoints are folders in Hugging Face format; None if not given.

    `model` holds the weights that should have sampled; `scores_folder` keeps finished scores for
    the next attempt; `trainer` computes the trainer check if the record does not hold its logprobs.
    """

    model: str
    dtype: str | None = None
    device: str = "cpu"
    temperature: float | None = None
    previous: str | None = None
    base: str | None = None
    scores_folder: Path | None = None
    trainer: bool = False
