"""The model of the recorded run."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def recorded_model(tmp_path_factory) -> Path:
    """Random weights of a fixed seed, so that git has no weights."""
    from areal_core.testing import make_tiny_model

    folder = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_model(folder, hidden_size=32, num_heads=2, num_kv_heads=1)
