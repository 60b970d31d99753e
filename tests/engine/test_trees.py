"""Rows that share tokens, computed as a tree with any option, against the same rows packed."""

import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from areal_core.config import OptimizerConfig, TrainEngineConfig
from areal_core.engine.attention import KeyBlocks, Packing, attend_each
from areal_core.engine.lora import trained_parameters
from areal_core.engine.trees.token_tree import build_tree, count_distinct
from areal_core.testing import make_tiny_family, step_with_gradients
from areal_core.trainer.build import build_engine
from benchmarks import model_families as families
from tests.engine import options_program
from tests.engine import tree_program as program
from tests.engine.steps_program import assert_same_gradients

ROWS = [[1, 2, 3, 4], [7, 8], [1, 2, 5, 6], [1, 2, 3], [1, 2, 5, 6]]


def test_tokens_that_rows_begin_with_in_common_are_in_the_tree_once():
    tree = build_tree(ROWS)
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert tree.depths.tolist() == [0, 1, 2, 3, 2, 3, 0, 1]
    assert tree.segments == [3, 1, 2, 2]  # the row that ends early, what continues it, two branches
    assert [nodes.tolist() for nodes in tree.nodes] == [
        [0, 1, 2, 3],
        [6, 7],
        [0, 1, 4, 5],
        [0, 1, 2],
        [0, 1, 4, 5],
    ]
    blocks = tree.key_blocks
    assert blocks == KeyBlocks([2, 1, 1, 2, 2], [[0, 1], [0, 1, 2], [0, 3], [4]])
    assert blocks.num_keys() == [3, 4, 4, 2]
    assert blocks.padded(0) is blocks
    assert blocks.padded(3) == KeyBlocks([2, 1, 1, 2, 2, 3], [[0, 1], [0, 1, 2], [0, 3], [4], [5]])
    assert count_distinct(ROWS) == 8


def test_trees_of_random_rows_spell_the_rows():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(1, 9, (12,), generator=generator).tolist()
        rows = [torch.randint(2, (length,), generator=generator).tolist() for length in lengths]
        tree = build_tree(rows)
        distinct = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
        assert len(tree.tokens) == len(distinct) == count_distinct(rows) == sum(tree.segments)
        for row, nodes in zip(rows, tree.nodes, strict=True):
            assert tree.tokens[nodes].tolist() == row
            assert tree.depths[nodes].tolist() == list(range(len(row)))
        ends = torch.tensor(tree.key_blocks.lengths).cumsum(0).tolist()
        begins = [0, *ends[:-1]]
        for owner, path in zip(tree.owners, tree.key_blocks.of_sequence, strict=True):
            keys = [token for block in path for token in range(begins[block], ends[block])]
            assert keys == tree.nodes[owner].tolist()


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 3}, {"softcap": 2.0}, {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])}]
)
def test_segments_attend_to_their_row_as_packed_rows_do(options):
    torch.manual_seed(0)
    tree = build_tree(ROWS)
    q, k, v = (torch.randn(1, heads, 8, 16, requires_grad=True) for heads in (4, 2, 2))
    packing = Packing(tree.segments, 0.3, key_blocks=tree.key_blocks, **options)
    attended = attend_each(q, k, v, packing)
    of_rows = torch.cat(tree.nodes)
    packed = attend_each(
        *(t[:, :, of_rows] for t in (q, k, v)), Packing([len(row) for row in ROWS], 0.3, **options)
    )
    torch.testing.assert_close(attended[:, of_rows], packed, rtol=0, atol=1e-6)
    weights = torch.randn(1, len(of_rows), 4, 16)
    found = torch.autograd.grad((attended[:, of_rows] * weights).sum(), (q, k, v))
    expected = torch.autograd.grad((packed * weights).sum(), (q, k, v))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("gemma2", marks=pytest.mark.long)])
def test_a_tree_has_loss_gradients_and_logprobs_of_packed_rows(ranks, tmp_path, family):
    batch = program.rows()
    packed, tree = (
        program.make_engine(ranks, str(make_tiny_family(tmp_path, family)), shares)
        for shares in (False, True)
    )
    for expected, found in zip(packed.score(batch), tree.score(batch), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
    (expected, gradients), (found, mine) = (step_with_gradients(e, batch) for e in (packed, tree))
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert_same_gradients(mine, gradients)
    assert [micro.num_tokens for micro in expected.micro_batches] == [106, 104]
    assert [micro.num_tokens for micro in found.micro_batches] == [210]
    assert [micro.num_computed for micro in found.micro_batches] == [len(distinct(batch))]
    again, same = step_with_gradients(program.make_engine(ranks, str(tmp_path), True), batch)
    assert again.loss == found.loss
    assert all(torch.equal(same[name], gradient) for name, gradient in mine.items())


def distinct(batch):
    """Return every beginning of every row."""
    rows = zip(batch["input_ids"].tolist(), batch["attention_mask"].sum(1).tolist(), strict=True)
    return {tuple(row[:end]) for row, length in rows for end in range(1, length + 1)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("data", "sequence", "tensor"),
    [(2, 1, 1), (1, 2, 1), (1, 1, 2)],
)
def test_two_ranks_take_the_step_of_one_with_packed_rows(ranks, torchrun, tmp_path, data, sequence, tensor):
    model = str(make_tiny_family(tmp_path / "model", "qwen2"))
    seen = torchrun(program.__file__, 2, model, sequence, tensor, tmp_path / "gradients")
    batch = program.rows()
    engine = program.make_engine(ranks, model, False)
    scored = engine.score(batch)
    result, gradients = step_with_gradients(engine, batch)
    assert seen["loss"] == pytest.approx(result.loss, rel=1e-6)
    assert seen["repeats"] is True
    assert_same_gradients(load_file(tmp_path / "gradients"), gradients)
    if data == 1:
        assert seen["computed"] == [[len(distinct(batch))]] * 2
        for column, expected in zip(seen["scored"], scored, strict=True):
            torch.testing.assert_close(torch.tensor(column), expected, rtol=0, atol=5e-6)
    else:
        assert seen["computed"] == [[len(distinct(program.rows(rank, 2)))] for rank in range(2)]


def engine_of(path, ranks, **options):
    options = {"optimizer": OptimizerConfig(), **options}
    config = TrainEngineConfig(path=str(path), dtype="float32", enable_tree_training=True, **options)
    return build_engine(config, ranks, total_steps=1)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lfm2", "rows of a 'lfm2' model are computed one at a time"),
        ("llama, dynamic RoPE", "rotary embeddings depend on the length of the row"),
        ("gpt2", "dropout is drawn for each row (resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, "),
        ("phimoe", "a 'phimoe' model draws random numbers for each token while it trains"),
    ],
)
def test_a_model_that_cannot_is_packed_and_it_is_said_once(ranks, tmp_path, caplog, name, reason):
    families.write_tiny(name, str(tmp_path))
    with caplog.at_level(logging.WARNING):
        engine = engine_of(tmp_path, ranks)
    assert not engine.shares_prefixes
    [record] = [r for r in caplog.records if "enable_tree_training" in r.message]
    assert f"enable_tree_training has no effect, rows do not share tokens: {reason}" in record.message


def test_an_attention_that_ignores_the_tree_is_found_by_measurement(ranks, tmp_path, caplog, monkeypatch):
    def without_tree(query, key, value, packing):
        return attend_each(query, key, value, replace(packing, key_blocks=None))

    monkeypatch.setattr("areal_core.engine.attention.attend_each", without_tree)
    with caplog.at_level(logging.WARNING):
        engine = engine_of(make_tiny_family(tmp_path, "llama"), ranks)
    assert not engine.shares_prefixes
    assert "a tree changes log-probs by up to" in caplog.text


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # GPTBigCode
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .FSDPOPTDecoderLayer:UserWarning")
@pytest.mark.parametrize("name", families.packed_families())
def test_a_family_has_the_logprobs_and_gradients_of_packed_rows(ranks, name):
    found = families.measure_tree(name, ranks)
    assert (found.reason is None) == (name not in families.NOT_SHARED), found
    assert found.logprobs < 2e-5  # nats
    assert found.gradients < 1e-4


LORA = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_family(tmp_path_factory.mktemp("model"), "qwen2"))


def engine_with(ranks, model, changes, *, shares_prefixes=True):
    trees = {"enable_tree_training": shares_prefixes, "mb_spec.max_tokens_per_mb": program.MAX_TOKENS}
    torch.manual_seed(7)  # of an adapter's random numbers
    engine = build_engine(options_program.make_options(model, trees | changes), ranks, total_steps=10)
    assert engine.shares_prefixes == shares_prefixes
    return engine


def two_steps(engine, batch):
    """Take two steps, asleep between them where the engine can; return losses and checksums."""
    losses = [options_program.train_step(engine, batch) for _ in range(2)]
    return losses, engine.checksums(), engine.compute_logprobs(batch).tolist()


def test_where_tensors_are_changes_no_bit_of_a_tree(ranks, model):
    batch = program.rows()
    plain, moved = (
        two_steps(engine_with(ranks, model, options_program.SAME_BITS[way]), batch)
        for way in ("as it is", "all at once")
    )
    assert moved == plain


def test_an_adapter_has_the_gradients_and_logprobs_of_packed_rows(ranks, model):
    batch, found = program.rows(), []
    for shares_prefixes in (False, True):
        engine = engine_with(ranks, model, LORA, shares_prefixes=shares_prefixes)
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
    assert len(mine) == 2 * 7 * 2  # A and B of seven layers in each of two blocks
    assert [name for name, gradient in gradients.items() if gradient.norm() == 0] == []
    assert_same_gradients(mine, gradients)
