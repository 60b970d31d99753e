"""A tiny peaked model, a record that it sampled, and prompts, for all tests of a session."""

import json
from pathlib import Path

import pytest

from consistency.score import Scorer, load_scorer

from .records import save_model, write_record


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("peaked") / "model", seed=0)


@pytest.fixture(scope="session")
def scorer(model) -> Scorer:
    return load_scorer(str(model))


@pytest.fixture(scope="session")
def record(model, tmp_path_factory) -> Path:
    """Two steps without a fault, of 24 rows each."""
    return write_record(tmp_path_factory.mktemp("clean") / "record", model, num_steps=2, num_rows=24)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory) -> Path:
    """12 prompts of 10 tokens."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"input_ids": [5 + (7 * row + 3 * i) % 95 for i in range(10)]} for row in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
