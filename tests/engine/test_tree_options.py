"""Trees with the options of an engine: where its tensors are, adapters, compiled layers."""

import pytest
import torch

from areal_core.engine.lora import trained_parameters
from areal_core.testing import make_tiny_family, step_with_gradients
from areal_core.trainer.build import build_engine
from tests.engine import options_program, tree_program

LORA = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_family(tmp_path_factory.mktemp("model"), "qwen2"))


def engine_of(ranks, model, changes, *, shares_prefixes=True):
    trees = {"enable_tree_training": shares_prefixes, "mb_spec.max_tokens_per_mb": tree_program.MAX_TOKENS}
    torch.manual_seed(7)  # of an adapter's random numbers
    engine = build_engine(options_program.make_options(model, trees | changes), ranks, total_steps=10)
    assert engine.shares_prefixes == shares_prefixes
    return engine


def two_steps(engine, batch):
    """Take two steps, asleep between them where the engine can; return losses and checksums."""
    losses = [options_program.train_step(engine, batch) for _ in range(2)]
    return losses, engine.checksums(), engine.compute_logprobs(batch).tolist()


def test_where_tensors_are_changes_no_bit_of_a_tree(ranks, model):
    batch = tree_program.rows()
    plain, moved = (
        two_steps(engine_of(ranks, model, options_program.SAME_BITS[way]), batch)
        for way in ("as it is", "all at once")
    )
    assert moved == plain


def test_an_adapter_has_the_gradients_and_logprobs_of_packed_rows(ranks, model):
    batch, found = tree_program.rows(), []
    for shares_prefixes in (False, True):
        engine = engine_of(ranks, model, LORA, shares_prefixes=shares_prefixes)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():  # B begins as 0, and then A has no gradient
            for name, parameter in trained_parameters(engine.model).items():
                if ".lora_B." in name:
                    parameter.to_local().normal_(std=0.1, generator=generator)
        scored = engine.score(batch)
        found.append((*scored, *step_with_gradients(engine, batch)))
    (*packed, expected, gradients), (*scored, result, mine) = found
    for column, other in zip(scored, packed, strict=True):
        torch.testing.assert_close(column, other, rtol=0, atol=5e-6)
    assert result.loss == pytest.approx(expected.loss, rel=1e-6)
    assert sum(micro.num_computed for micro in result.micro_batches) < sum(batch["attention_mask"].sum(1))
    assert mine.keys() == gradients.keys()
    assert len(mine) == 2 * 7 * 2  # A and B of seven layers in each of two blocks
    for name, gradient in gradients.items():
        assert gradient.norm() > 0, name
        assert (mine[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
