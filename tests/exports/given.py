"""A record of every kind of content, and what its exports must hold."""

from pathlib import Path

import numpy as np

from areal_debug import Recorder
from recorder import Recording, RecordingOptions, open_record
from recorder.testing import write_scripted_record

FULL_SAMPLE = {
    "prompt_tokens": [5, 6],
    "completion_tokens": [7, 8, 9],
    "loss_mask": [1, 0, 1],
    "logprobs": [-0.5, -9.0, -1.5],
    "reward": 1.0,
    "group": "a",
    "finish_reason": "length",
    "versions": 3,
    "prompt": "=2+2",
    "completion": "4",
    "advantages": 0.75,
    "old_logprobs": [0, 0, -0.25, -8.0, -1.25],
    "extras": {"routed_experts": np.arange(20, dtype=np.int32).reshape(5, 2, 2)},
    "scores": {"format": 0.5},
}
# what is exported of it: aligned to the token itself, of which the first has none
FULL_ROW = {
    "num_tokens": 5,
    "prompt_len": 2,
    "reward": 1.0,
    "finish_reason": "length",
    "token_ids": [5, 6, 7, 8, 9],
    "loss_mask": [0, 0, 1, 0, 1],
    "logprobs": [None, None, -0.5, -9.0, -1.5],
    "versions": [-1, -1, 3, -1, 3],
    "routed_experts": np.arange(20).reshape(5, 2, 2).tolist(),
    "scores.format": 0.5,
    "advantages": [0.0, 0.0, 0.75, 0.75, 0.75],
    "prox_logp": [0.0, 0.0, -0.25, -8.0, -1.25],
    "prompt": "=2+2",
    "completion": "4",
}
BARE_SAMPLE = {"tokens": [1, 2, 3, 4]}
BARE_ROW = dict.fromkeys(FULL_ROW) | {
    "num_tokens": 4,
    "token_ids": [1, 2, 3, 4],
    "prompt": "",
    "completion": "",
}
GAPS_SAMPLE = {
    "tokens": [1, 2, 3],
    "logprobs": [None, None, -0.5],
    "prompt_length": 1,
    "finish_reason": "stop",
}
GAPS_ROW = dict.fromkeys(FULL_ROW) | {
    "num_tokens": 3,
    "prompt_len": 1,
    "finish_reason": "stop",
    "token_ids": [1, 2, 3],
    "loss_mask": [0, 1, 1],
    "logprobs": [None, None, -0.5],
    "prompt": "",
    "completion": "",
}
TEXT_SAMPLE = {"prompt": "p", "completion": "c\u2028d"}
TEXT_ROW = dict.fromkeys(FULL_ROW) | TEXT_SAMPLE


def write_full_record(folder: Path) -> Path:
    """Two steps of two ranks of our own trainer, scope full."""
    options = RecordingOptions(Recording(scope="full"))
    write_scripted_record(folder, num_steps=2, num_ranks=2, options=options)
    return folder


def write_foreign_record(folder: Path) -> Path:
    """Two steps of another trainer: the second knows nothing but tokens."""
    with Recorder(folder, trainer="mine") as recorder:
        recorder.step(0, [FULL_SAMPLE, BARE_SAMPLE, GAPS_SAMPLE, TEXT_SAMPLE], stats={"loss": 0.1})
        recorder.step(1, [BARE_SAMPLE])
    return folder


FOREIGN_ROWS = [FULL_ROW, BARE_ROW, GAPS_ROW, TEXT_ROW, BARE_ROW | {"prompt": None, "completion": None}]


def recorded_rows(folder: Path) -> list[dict[str, np.ndarray]]:
    """All rows of a record in the order of an export, with what the trainer computed."""
    record = open_record(folder)
    rows = []
    for number in record.steps:
        step = record.step(number)
        for rank in range(step.manifest.num_ranks):
            learning = step.learning(rank)
            bounds = learning.pop("cu_seqlens")
            for row in range(step.num_rows(rank)):
                part = slice(bounds[row], bounds[row + 1])
                inputs = {key: values[part] for key, values in learning.items()}
                rows.append(step.rows(rank, row) | inputs | {"step": number, "rank": rank, "row": row})
    return rows
