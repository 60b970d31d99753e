"""Records of a run that sampled from a tiny model, with or without a planted fault."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from areal_core.testing import make_tiny_tokenizer
from consistency.score import scorer_of
from consistency.tokens import Sequences
from recorder.testing import SCRIPTED_HEADER, send_step
from tests.command_line import invoke
from tests.recorder.ranks import begin

from .faulty_engine import FaultyEngine, sample_rows
from .models import peaked_model

NUM_ROWS, PROMPT_LENGTH = 12, 10


def save_model(folder: Path, seed: int) -> Path:
    tokenizer = make_tiny_tokenizer()
    peaked_model(seed, vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def judged(*arguments) -> tuple[int, dict]:
    done = invoke("consistency", *arguments, "--json")
    return done.exit_code, json.loads(done.stdout) if done.exit_code != 2 else done.stderr


def padded_batch(sequences: Sequences, version: int = 0) -> dict[str, np.ndarray]:
    shape = (sequences.num_rows, -1)
    sampled = sequences.sampled.reshape(shape)
    rows = np.arange(sequences.num_rows)
    return {
        "input_ids": sequences.input_ids.reshape(shape).astype(np.int32),
        "attention_mask": np.ones_like(sampled),
        "loss_mask": sampled.astype(np.int32),
        "logprobs": sequences.engine_logprobs.reshape(shape).astype(np.float32),
        "versions": np.where(sampled, version, -1).astype(np.int32),
        "rewards": np.zeros(len(rows), np.float32),
        "prompt_id": rows.astype(np.int64),
        "sample_id": np.zeros(len(rows), np.int32),
        "finish_reason": np.zeros(len(rows), np.int32),
    }


def write_record(
    folder: Path,
    model: Path,
    seed: int = 0,
    num_steps: int = 1,
    num_rows: int = NUM_ROWS,
    updated: bool = False,
    change: Callable[[dict[str, np.ndarray]], None] = lambda batch: None,
    **transforms,
) -> Path:
    """Write steps that an engine with the model's weights sampled at temperature 1.

    The weights have version 0 in every step, or with `updated` the step's number. `change` is
    called with each batch.
    """
    scorer = scorer_of(peaked_model(seed, vocab_size=len(make_tiny_tokenizer())))
    config = {
        "gconfig": {"temperature": 1.0, "top_p": 1.0, "top_k": 100_000_000, "greedy": False},
        "actor": {"dtype": "float32", "path": str(model)},
        "sglang": {"dtype": "bfloat16"},
    }
    named, allocation = {"path": str(model), "files": {}}, "sglang:d1+fsdp:d1"
    header = replace(SCRIPTED_HEADER, model=named, config=config, allocation=allocation)
    (writer,) = begin(folder, header=header)
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        prompts = torch.randint(5, 100, (num_rows, PROMPT_LENGTH), generator=generator)
        engine = FaultyEngine(scorer, noise=0.005, **transforms)
        batch = padded_batch(sample_rows(engine, prompts, 50, seed=step), step * updated)
        change(batch)
        send_step(writer, step, batch)
    return folder
