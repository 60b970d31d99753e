"""Two tensor-parallel ranks against one, for every family.

The same logprobs, losses, gradients and weights.
"""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_core.engine.checkpoint.distributed import load_checkpoint, save_checkpoint
from areal_core.engine.model import load_model
from areal_core.engine.tensor_parallel import split_over_ranks
from areal_core.errors import ModelError
from areal_core.testing import make_tiny_family, step_with_gradients
from tests.engine import tensor_parallel_program as program

PROGRAM = Path(__file__).parent / "tensor_parallel_program.py"
steps = program.program
# Biases, experts, and norms of heads with tied weights; the other families use the same code.
TRIED = ("llama", "qwen3_moe", "gemma3_text")


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    """A model of each family, and a checkpoint of the first after one step on one rank."""
    folder = tmp_path_factory.mktemp("families")
    for family in TRIED:
        make_tiny_family(folder / family, family)
    engine = steps.make_engine(ranks, str(folder / TRIED[0]), program.MAX_TOKENS)
    steps.train_step(engine, steps.rows())
    save_checkpoint(folder / "one", {"actor": engine}, {})
    return folder


@pytest.fixture(scope="module")
def two_ranks(torchrun, folder):
    return torchrun(PROGRAM, 2, folder, TRIED[0])


def test_shards_of_a_vocabulary_give_the_logprobs_and_gradients_of_all_of_it(two_ranks):
    for rank in two_ranks:
        for case, differences in rank["vocabulary"].items():
            assert max(differences) < 2e-6, case


@pytest.mark.parametrize("family", TRIED)
def test_two_ranks_take_the_step_of_one(ranks, folder, two_ranks, family):
    engine = steps.make_engine(ranks, str(folder / family), program.MAX_TOKENS)
    first, second = (rank["steps"][family] for rank in two_ranks)
    assert first == second
    assert first["untrained"] == engine.checksums()
    experts = program.record_experts(engine)
    result, gradients = step_with_gradients(engine, steps.rows())
    assert first["experts"] == experts
    assert len(experts) == (2 if family == "qwen3_moe" else 0)  # one layer with a router, two micro-batches
    assert first["loss"] == pytest.approx(result.loss, rel=1e-6)
    assert first["grad_norm"] == pytest.approx(result.grad_norm, rel=1e-5)
    split = load_file(folder / family / "gradients.safetensors")
    steps.assert_same_gradients(split, gradients)
    assert [name for name, sum_ in first["trained"].items() if sum_ == first["untrained"][name]] == []


def test_two_ranks_score_and_train_a_reward_model_as_one_does(ranks, folder, two_ranks):
    for rank in two_ranks:
        assert rank["scores"] == pytest.approx(program.score_step(ranks, folder / TRIED[0]), rel=1e-5)


def assert_checkpoints_agree(ranks, folder, seen):
    """Assert that a run continued from the checkpoint of one rank matches that of one rank.

    Its checkpoint and its Hugging Face folder match, too.
    """
    engine = steps.make_engine(ranks, str(folder / TRIED[0]), program.MAX_TOKENS)
    load_checkpoint(folder / "one", {"actor": engine})
    assert seen["loaded"] == engine.checksums()
    steps.assert_same_steps([seen["next"]], [steps.train_step(engine, steps.rows())])
    load_checkpoint(folder / "two", {"actor": engine})
    assert engine.checksums() == seen["next"]["checksums"]
    saved = steps.make_engine(ranks, str(folder / "hf"), program.MAX_TOKENS)
    assert saved.checksums() == seen["next"]["checksums"]


def test_a_checkpoint_goes_from_one_rank_to_two_and_back(ranks, folder, two_ranks):
    assert_checkpoints_agree(ranks, folder, two_ranks[0]["checkpoints"])


@pytest.mark.long
def test_a_checkpoint_goes_from_one_rank_to_two_pairs_and_back(ranks, folder, torchrun, tmp_path):
    copied = shutil.copytree(folder, tmp_path / "families")
    four_ranks = torchrun(PROGRAM, 4, copied, TRIED[0])
    assert four_ranks[0]["checkpoints"] == four_ranks[3]["checkpoints"]
    assert_checkpoints_agree(ranks, copied, four_ranks[0]["checkpoints"])


def test_an_adapter_on_a_layer_to_be_split_is_refused_by_name(ranks, folder):
    model = load_model(str(folder / "llama"))
    attention = model.model.layers[1].self_attn
    attention.o_proj = torch.nn.Sequential(attention.o_proj)
    with pytest.raises(
        ModelError, match=r"model.layers.1.self_attn.o_proj, which is not a plain .* Sequential"
    ):
        split_over_ranks(model, ranks.tensor_mesh)
