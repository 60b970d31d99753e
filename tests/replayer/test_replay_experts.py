"""A run with experts chosen by the engine: its record has them, and a replay the same bits."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.rollout.workflow import episode_tensors
from areal_core.testing import make_tiny_family, make_tiny_tokenizer
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import make_recorder
from recorder import open_record, verify
from replayer.request import Request
from replayer.run import replay_and_compare
from replayer.source import recorded_batch


@dataclass(frozen=True)
class Odd:
    """Reward odd tokens."""

    sampling: Sampling

    async def arun_episode(self, engine, data):
        request = ModelRequest(input_ids=data["tokens"], sampling=self.sampling)
        response = await engine.agenerate(request)
        return episode_tensors(response, float(np.mean([token % 2 for token in response.output_tokens])))


@pytest.fixture(scope="module")
def record(tmp_path_factory, tiny_config_of):
    folder = tmp_path_factory.mktemp("run")
    tokenizer = make_tiny_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    options = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    make_tiny_family(folder / "model", "qwen3_moe", **options)  # layer 0 has no experts
    config = tiny_config_of(
        folder, folder / "model", 2, rollout__return_routed_experts=True, debug__path=str(folder / "record")
    )
    rows = [{"tokens": [20 + i, 30, 40][: 1 + i % 3]} for i in range(8)]
    with PPOTrainer(config, rows, observers=[make_recorder], print_steps=False) as trainer:
        trainer.train(Odd(Sampling(max_new_tokens=8)))
    return open_record(str(folder / "record"))


def test_the_record_has_the_experts_of_each_token(record):
    assert verify(record.path).problems == ()
    entry = record.step(0).batch_entry(0)[1].tensors["routed_experts"]
    assert (entry.dtype, entry.stored, entry.axis, entry.shape[1:]) == ("I16", "I8", "token", (2, 2))
    batch = recorded_batch(record.step(0), 0)
    experts, mask = batch["routed_experts"], batch["attention_mask"]
    assert experts.dtype == torch.int16
    lengths = mask.sum(1)
    for row, length in enumerate(lengths.tolist()):
        known = experts[row, : length - 1]
        assert (known[:, 0] == 0).all(), "a layer without experts"
        assert set(known[:, 1].unique().tolist()) <= set(range(4))
        assert (known[:, 1, 0] != known[:, 1, 1]).all()
        assert (experts[row, length - 1] == -1).all()


def test_a_replay_has_the_recorded_bits(record):
    report = replay_and_compare(Request(record.path, 0, 1))
    assert [step.identical for step in report.steps] == [True, True]
