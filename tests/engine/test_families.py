"""Each supported family at tiny size: packed, sharded forward and backward against Transformers.

Transformers computes one sequence at a time.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_core.testing import TINY_FAMILIES, make_tiny_family, step_with_gradients
from tests.engine import steps_program as program

ROOT = Path(__file__).parents[2]
QUICK = ("llama", "qwen3_moe", "gemma3_text")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in TINY_FAMILIES],
)
def model(request, tmp_path_factory):
    return make_tiny_family(tmp_path_factory.mktemp(request.param), request.param)


def transformers_own(path, batch):
    """Compute logprobs [B, T], loss and gradients of the same objective with Transformers.

    In float64, one sequence at a time, with plain attention.
    """
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", experts_implementation="eager"
    ).double()
    logprobs = torch.zeros(batch["attention_mask"].shape, dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        ids = batch["input_ids"][row, :length].long()
        log_p = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1)
        at_label = log_p.gather(1, ids[1:, None])[:, 0]
        loss = loss - (at_label - 0.1 * (log_p.exp() * log_p).sum(-1)).sum()
        logprobs[row, : length - 1] = at_label.detach()
    loss = loss / batch["loss_mask"].sum()
    loss.backward()
    return (
        logprobs,
        float(loss.detach()),
        {name: parameter.grad for name, parameter in model.named_parameters()},
    )


def test_logprobs_loss_and_gradients_are_those_of_transformers(ranks, model):
    batch = program.rows()
    logprobs, loss, gradients = transformers_own(model, batch)
    engine = program.make_engine(ranks, str(model), 24)
    torch.testing.assert_close(engine.compute_logprobs(batch).double(), logprobs, rtol=0, atol=5e-6)
    result, mine = step_with_gradients(engine, batch)
    assert result.loss == pytest.approx(loss, rel=1e-6)
    assert mine.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (mine[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.long
def test_every_split_over_ranks_agrees_with_one_rank(tmp_path):
    """The benchmark ends with 1 when a difference is no rounding, or a repeat has other bits."""
    table = tmp_path / "table.md"
    command = [sys.executable, "-m", "benchmarks.rank_splits", "--write", table]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = [line for line in table.read_text().splitlines() if line.endswith("| yes |")]
    assert len(rows) == 2 * 8 * 2  # dtypes, splits, limits of a micro-batch
