"""`attn_impl=batch_invariant`: sampled log-probs equal the trainer's in every bit."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from areal_core.config import TrainEngineConfig
from areal_core.embedded.generate import generate
from areal_core.embedded.replica import Replica
from areal_core.engine.attention import Packing, attend_each, attend_invariant, choose_attention
from areal_core.engine.parity import batch_of, require_parity
from areal_core.engine.ranks import Ranks, join_ranks, leave_ranks
from areal_core.errors import ModelError
from areal_core.rollout.types import Sampling
from areal_core.testing import make_tiny_family
from areal_core.trainer.build import shard_engine
from tests.engine import invariant_program as program

PROGRAM = Path(__file__).parent / "invariant_program.py"
LENGTHS = (1, 3, 17, 40, 5, 9, 100, 2)
CPU = torch.device("cpu")


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    yield join_ranks("cpu")
    leave_ranks()


def pair(path, ranks, dtype="float32"):
    """An engine and a trainer of one model."""
    options = TrainEngineConfig(path=str(path), dtype=dtype, attn_impl="batch_invariant")
    trainer = shard_engine(options, ranks)
    return Replica(str(path), getattr(torch, dtype), CPU, is_invariant=True), trainer


def prompts_of(replica):
    generator = torch.Generator().manual_seed(1)
    size = replica.model.config.vocab_size
    return [torch.randint(size, (length,), generator=generator).tolist() for length in LENGTHS]


def sample(replica, prompts, seeds):
    counts = [30 - 3 * (seed % 7) for seed in seeds]
    options = [Sampling(max_new_tokens=count) for count in counts]
    return generate(replica, prompts, options, counts, seeds, vocab_size=replica.model.config.vocab_size)


def assert_equal_bits(trainer, prompts, rows):
    batch = batch_of([torch.tensor(prompt + row.tokens) for prompt, row in zip(prompts, rows, strict=True)])
    scored = trainer.compute_logprobs(batch)
    for line, prompt, row in zip(scored, prompts, rows, strict=True):
        assert row.logprobs == line[len(prompt) - 1 :][: len(row.tokens)].tolist()


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
def test_bits_do_not_depend_on_batch_order_or_prefix_cache(tiny_model, ranks, dtype):
    replica, trainer = pair(tiny_model, ranks, dtype)
    require_parity(trainer, "actor")
    prompts, seeds = prompts_of(replica), list(range(len(LENGTHS)))
    together = sample(replica, prompts, seeds)
    assert_equal_bits(trainer, prompts, together)
    turns = [prompt + row.tokens + [7, 8, 9] for prompt, row in zip(prompts, together, strict=True)]
    cached = sample(replica, turns, seeds)
    assert min(row.cached_tokens for row in cached) > 0
    assert_equal_bits(trainer, turns, cached)
    replica.prefixes.clear()
    alone = [sample(replica, [turn], [seed])[0] for turn, seed in zip(turns, seeds, strict=True)]
    backwards = sample(replica, turns[::-1], seeds[::-1])[::-1]
    for other in (alone, backwards):
        assert [(row.tokens, row.logprobs) for row in other] == [(row.tokens, row.logprobs) for row in cached]


def test_gradients_are_those_of_sdpa():
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 7, 150]
    tensors = [torch.randn(1, heads, sum(lengths), 16, generator=generator) for heads in (6, 2, 2)]
    packing = Packing(lengths, 0.25)
    found = []
    for attend in (attend_invariant, attend_each):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        attended = attend(*inputs, packing)
        attended.square().sum().backward()
        found.append([attended.detach(), *(tensor.grad for tensor in inputs)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_what_the_mode_does_not_support_is_refused_with_a_sentence(tmp_path):
    with pytest.raises(ModelError, match=r"batch_invariant.*verified on CPUs only"):
        choose_attention("batch_invariant", "cuda", torch.float32)
    query = torch.zeros(1, 2, 4, 16)
    with pytest.raises(ModelError, match="has a soft cap, which it does not support"):
        attend_invariant(query, query, query, Packing([4], 1.0, softcap=30.0))
    folder = make_tiny_family(tmp_path, "gemma2")
    with pytest.raises(ModelError, match="layers attend to all tokens; this is a 'gemma2' model"):
        Replica(str(folder), torch.float32, CPU, is_invariant=True)


@pytest.mark.long
@pytest.mark.parametrize("sequence_parallel", [1, 2])
def test_bits_do_not_depend_on_how_ranks_divide_or_share_rows(torchrun, tiny_model, ranks, sequence_parallel):
    assert torchrun(PROGRAM, 2, tiny_model, sequence_parallel) == program.score(str(tiny_model), ranks)
