"""areal_debug.prime_rl.observed_default, called as prime-rl's trainer calls a custom loss."""

import numpy as np
import pytest
import torch

from areal_debug import prime_rl
from recorder import open_record, verify

from .stand_ins import load_function, prime_rl_loss

PATH = "areal_debug.prime_rl.observed_default"


@pytest.fixture
def loss():
    return prime_rl_loss()


@pytest.fixture
def folder(tmp_path, monkeypatch, loss):
    monkeypatch.setenv("AREAL_DEBUG_RECORD", str(tmp_path / "r"))
    prime_rl.observation.cache_clear()
    yield tmp_path / "r"
    prime_rl.observation.cache_clear()


def inputs_of(loss, trainer, engine, mask, advantage=0.5):
    """Build LossInputs of a sequence; versions before 0.7 call the reference a teacher."""
    reference = "ref_logprobs" if "ref_logprobs" in loss.LossInputs.__annotations__ else "teacher_logprobs"
    size = len(mask)
    return loss.LossInputs(
        trainer_logprobs=trainer,
        inference_logprobs=torch.tensor(engine),
        advantages=torch.full((size,), advantage),
        loss_mask=torch.tensor(mask),
        **{reference: torch.full((size,), -3.0)},
    )


class Trainer:
    """Calls of the trainer in a step: a loss per sequence, then the optimizer."""

    def __init__(self, loss, **kwargs):
        self.loss, self.kwargs = loss, kwargs
        self.function = load_function(PATH)
        self.bias = torch.nn.Parameter(torch.zeros(()))
        self.optimizer = torch.optim.AdamW([self.bias], lr=0.125)

    def step(self, sequences):
        outputs = []
        for trainer, engine, mask in sequences:
            inputs = inputs_of(self.loss, torch.tensor(trainer) + self.bias, engine, mask)
            outputs.append(self.function(inputs, **self.kwargs))
            outputs[-1].loss.backward()
        gradient = self.bias.grad.clone()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return outputs, gradient

    def end(self):
        prime_rl.observation("bfloat16", 0).recording.end()


FIRST = ([-1.0, -2.0, -0.5, -0.25], [-1.0, -2.01, -0.5, -0.26], [False, True, True, True])
SECOND = ([-1.5, -0.75], [-1.5, -0.75], [False, True])
EMPTY = ([-1.0, -1.0], [0.0, 0.0], [False, False])  # fills the ranks that have fewer micro-batches


def test_loss_and_gradient_are_those_of_prime_rl(loss, folder):
    trainer = Trainer(loss, kl_tau=0.25)
    outputs, gradient = trainer.step([FIRST, SECOND])
    config = loss.default_loss_fn.__annotations__["loss_config"](kl_tau=0.25)
    bias = torch.zeros((), requires_grad=True)
    for output, (values, engine, mask) in zip(outputs, (FIRST, SECOND), strict=True):
        expected = loss.default_loss_fn(inputs_of(loss, torch.tensor(values) + bias, engine, mask), config)
        expected.loss.backward()
        assert torch.equal(output.loss, expected.loss)
        assert output.metrics.keys() == expected.metrics.keys()
    assert torch.equal(gradient, bias.grad)
    trainer.end()


def test_both_logprobs_of_two_steps_are_recorded(loss, folder, capfd):
    trainer = Trainer(loss)
    trainer.step([FIRST, EMPTY, SECOND])
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()  # of another model
    trainer.step([SECOND])
    trainer.end()
    record = open_record(folder)
    assert record.steps == (0, 1)
    assert record.header.trainer == "prime-rl"
    step = record.step(0)
    batch, learning = step.batch(0), step.learning(0)
    assert batch["cu_seqlens"].tolist() == [0, 4, 6]
    assert batch["loss_mask"].tolist() == [0, 1, 1, 1, 0, 1]
    assert batch["logprobs"].tolist() == np.float32([-1, -2.01, -0.5, -0.26, -1.5, -0.75]).tolist()
    assert learning["prox_logp"].tolist() == [-2.0, -0.5, -0.25, -1.0, -0.75, -1.5]
    assert learning["advantages"].tolist() == [0.5] * 6
    reference = "ref_logp" if "ref_logprobs" in loss.LossInputs.__annotations__ else "teacher_logp"
    assert learning[reference].tolist() == [-3] * 6
    # the step before has moved the parameter
    assert record.step(1).learning(0)["prox_logp"].tolist() != [-0.75, -1.5]
    unknown = ("input_ids", "versions", "rewards", "prompt_id", "finish_reason", "prompt_length")
    assert not any(step.known(0, name).any() for name in unknown)
    assert all(step.known(0, name).all() for name in ("loss_mask", "logprobs"))
    assert verify(folder).intact
    stats = step.outcome(0).stats
    differences = np.float32([-2.0 + 2.01, 0, -0.25 + 0.26, 0]).astype(np.float64)
    k3 = np.mean(np.exp(differences) - differences - 1)
    assert stats["mismatch/max_abs"] == pytest.approx(0.01, rel=1e-5)
    assert stats["mismatch/mean_abs"] == pytest.approx(0.005, rel=1e-5)
    assert stats["mismatch/k3"] == pytest.approx(k3, rel=1e-4)
    assert stats["mismatch/share_above_ln2"] == stats["mismatch/not_finite"] == 0
    assert "prime-rl: step 0" not in capfd.readouterr().err, "5e-3 is normal in bfloat16"


def test_a_mismatch_is_one_sentence(loss, folder, capfd):
    trainer = Trainer(loss)
    trainer.step([SECOND, ([-1.0, -2.0], [-1.0, -1.0], [False, True])])
    trainer.end()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line]
    assert line == (
        "recording: prime-rl: step 0: engine and trainer differ by mean |D| 0.5 (normal for bfloat16, dense: "
        "0.02), k3 0.18 (0.002), max |D| 1; 50.00% of 2 tokens beyond ln 2, 0 not finite"
    )
    assert open_record(folder).step(0).outcome(0).stats["mismatch/share_above_ln2"] == 0.5


def test_a_failure_of_the_record_does_not_stop_the_loss(loss, folder, capfd):
    folder.write_text("a file")
    trainer = Trainer(loss)
    for _ in range(2):
        outputs, _ = trainer.step([FIRST])
        assert torch.isfinite(outputs[0].loss)
    trainer.end()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line]
    assert line == (
        f"recording: prime-rl: step 0 is not recorded: {folder} is a file: give a folder to record into; "
        "the run continues without recording"
    )
