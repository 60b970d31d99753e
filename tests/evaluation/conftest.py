"""Models whose greedy completions differ."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from areal_core.testing import make_tiny_model


@pytest.fixture(scope="session")
def random_model() -> Callable[[Path, int], Path]:
    """Write a model that does not repeat its last token, as one with tied embeddings does."""

    def write(folder: Path, seed: int) -> Path:
        make_tiny_model(folder)
        config = AutoConfig.from_pretrained(folder, tie_word_embeddings=False)
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return write
