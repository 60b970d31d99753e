"""A run on pictures is replayed to the same bits, from their files and from their pixels."""

import numpy as np
import pytest
import torch

from areal_core.data.batch import pad_and_concat
from areal_core.data.processor import load_processor
from areal_core.testing.tiny_vision import make_tiny_vision_model
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import make_recorder
from recorder import open_record, verify
from replayer.preflight.real_steps import RandomRollouts
from replayer.request import Request
from replayer.run import check_of, replay, replay_and_compare
from replayer.source import recorded_batch
from tests.recorder.pictured import png

PICTURES = [png(0, 24, 16), png(1, 24, 24)]
ANSWERS = [[20, 21, 1], [22, 23, 24, 1], [25, 1], [26, 27, 1]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_vision_model(tmp_path_factory.mktemp("model") / "model", "qwen2_5_vl"))


def row_of(processor, picture, prompt_id, sample_id, version):
    """Return a row: a picture, a question, and an answer of the sample."""
    content = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    prompt = processor.prompt([{"role": "user", "content": content}], [picture])
    answer = ANSWERS[sample_id]
    given, size = len(prompt.input_ids), len(prompt.input_ids) + len(answer)
    per_token = {
        "input_ids": [*prompt.input_ids, *answer],
        "mm_token_type_ids": [*prompt.mm_token_type_ids, *[0] * len(answer)],
        "loss_mask": [0] * given + [1] * len(answer),
        "versions": [-1] * given + [version] * len(answer),
    }
    batch = {key: torch.tensor([values], dtype=torch.int32) for key, values in per_token.items()}
    return batch | {
        "attention_mask": torch.ones(1, size, dtype=torch.bool),
        "logprobs": torch.tensor([[0.0] * given + [-3.0 - sample_id] * len(answer)]),
        "rewards": torch.tensor([float(sample_id % 2)]),
        "prompt_id": torch.tensor([prompt_id]),
        "sample_id": torch.tensor([sample_id], dtype=torch.int32),
        "finish_reason": torch.tensor([0], dtype=torch.int32),
        "image_count": torch.tensor([1], dtype=torch.int32),
        "image_bytes": torch.tensor([len(picture)], dtype=torch.int32),
        "image_data": torch.from_numpy(np.frombuffer(picture, np.uint8).copy()),
    }


class Pictured(RandomRollouts):
    """A source of two prompts with four samples each."""

    def __init__(self, processor):
        super().__init__(100, 2, 4, longest=16)
        self.processor = processor

    def next_batch(self, step, version):
        super().next_batch(step, version)  # seeds the trainer
        rows = [(prompt, sample) for prompt in (0, 1) for sample in range(4)]
        return pad_and_concat(
            [
                row_of(self.processor, PICTURES[prompt], 2 * step + prompt, sample, step)
                for prompt, sample in rows
            ]
        )


@pytest.fixture(scope="module", params=["original", pytest.param("pixels", marks=pytest.mark.long)])
def record(request, tmp_path_factory, model, tiny_config_of):
    """Two recorded steps."""
    folder = tmp_path_factory.mktemp("run")
    options = {"mb_spec": {"max_tokens_per_mb": 256}, "ppo_n_minibatches": 2}
    options = {f"actor__{name}": value for name, value in options.items()}
    path = str(folder / "record")
    config = tiny_config_of(folder, model, 2, debug__dump_images=request.param, debug__path=path, **options)
    hooks = {"source": lambda trainer: Pictured(load_processor(model)), "observers": [make_recorder]}
    with PPOTrainer(config, **hooks, total_steps=2, print_steps=False) as trainer:
        trainer.train()
    return open_record(path)


def test_a_replay_has_the_recorded_bits(record):
    assert verify(record.path).problems == ()
    batch = recorded_batch(record.step(1), 0)
    if "image_data" in batch:
        assert batch["image_data"].numpy().tobytes() == PICTURES[0] * 4 + PICTURES[1] * 4
    else:
        pixels = load_processor(record.header.model["path"]).pixels([*PICTURES[:1] * 4, *PICTURES[1:] * 4])
        assert all(torch.equal(batch[key], values) for key, values in pixels.items())
    report = replay_and_compare(Request(record.path, 0, 1))
    assert [step.identical for step in report.steps] == [True, True]
    assert report.set_differently.environment == ()


@pytest.mark.long
def test_another_processor_is_named_before_the_numbers(record, monkeypatch):
    processor = type(load_processor(record.header.model["path"]))
    identity, seen = processor.identity, []
    monkeypatch.setattr(processor, "identity", lambda self: identity(self) | {"image_token_id": 7})

    def make(record, trainer, request):
        return check_of(record, trainer, request, on_start=lambda report: seen.append(report.set_differently))

    replay(Request(record.path, 0, 0), [make])
    (difference,) = seen[0].environment
    assert (difference.where, difference.current) == ("image_processor.image_token_id", 7)
