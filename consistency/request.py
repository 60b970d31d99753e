"""What a comparison is made with: the model that should have sampled, and what else was given."""

from dataclasses import dataclass
from pathlib import Path

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Request:
    """What to compare with. Checkpoints are folders in Hugging Face format; None where not given.

    `model` holds the weights that should have sampled; `scores_folder` keeps finished scores for the next attempt; `trainer` asks the
    trainer's own packed path too, where the record does not hold what it said.
    """

    model: str
    dtype: str | None = None
    device: str = "cpu"
    temperature: float | None = None
    previous: str | None = None
    base: str | None = None
    scores_folder: Path | None = None
    trainer: bool = False
