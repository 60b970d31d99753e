import shutil
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from areal_core.engine import model as compiling
from areal_core.engine.model import apply_liger, load_model
from areal_core.engine.offload import storages
from areal_core.errors import ModelError
from areal_core.testing import make_tiny_model
from areal_core.trainer.build import build_engine
from tests.engine import options_program as program

PROGRAM = Path(__file__).parent / "options_program.py"
# torch.compile reads it while it traces the parameters that FSDP has gathered
NON_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory) -> Path:
    """A model of 120 MiB in float32, with a bfloat16 checkpoint.

    Such a checkpoint cannot be mapped into memory unchanged.
    """
    folder = make_tiny_model(tmp_path_factory.mktemp("larger"), hidden_size=512, num_layers=8)
    load_model(str(folder), dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def two_ranks(torchrun, tiny_model, larger_model):
    return torchrun(PROGRAM, 2, tiny_model, larger_model)


@pytest.mark.long
@pytest.mark.parametrize("way", [way for way in program.SAME_BITS if way != "as it is"])
def test_memory_placement_changes_no_bit(two_ranks, way):
    assert two_ranks[way] == two_ranks["as it is"]


@pytest.mark.long
def test_a_rank_that_receives_its_shards_never_has_the_complete_model_in_memory(two_ranks, larger_model):
    model_mib = 4 * sum(p.numel() for p in load_model(str(larger_model)).parameters()) / 2**20
    _, given = two_ranks["peaks"]["rank 0 reads"]
    _, read = two_ranks["peaks"]["every rank reads"]
    assert given < model_mib < read  # half of it and a layer; all of it and half


def test_recomputed_activations_are_not_kept(ranks, tiny_model):
    def kept_bytes(gradient_checkpointing: bool) -> int:
        options = program.make_options(
            str(tiny_model),
            {"gradient_checkpointing": gradient_checkpointing, "mb_spec.max_tokens_per_mb": None},
        )
        engine = build_engine(options, ranks, total_steps=1)
        kept = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        weights = {p.to_local().untyped_storage().data_ptr() for p in engine.model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            program.train_step(engine, program.steps.rows())
        return sum(size for pointer, size in kept.items() if pointer not in weights)

    assert kept_bytes(True) < 0.5 * kept_bytes(False)


def test_an_engine_that_sleeps_has_no_memory_on_the_device_and_wakes_with_every_bit(ranks, tiny_model):
    engine = build_engine(program.make_options(str(tiny_model), {"offload": True}), ranks, total_steps=1)
    program.steps.train_step(engine, program.steps.rows())
    weights = [parameter.to_local() for parameter in engine.model.parameters()]
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    moments = [value.to_local() for value in states if value.dim()]
    checksums, num_bytes = engine.checksums(), sum(tensor.nbytes for tensor in [*weights, *moments])
    copies = [moment.clone() for moment in moments]
    assert len(moments) == 2 * len(weights)

    engine.sleep()
    assert {tensor.untyped_storage().nbytes() for tensor in [*weights, *moments]} == {0}
    assert storages(engine.model, engine.optimizer, ranks.device) == []
    assert engine.offloaded_bytes >= num_bytes
    engine.wake()
    assert engine.offloaded_bytes == 0
    assert engine.checksums() == checksums
    assert all(torch.equal(moment, copy) for moment, copy in zip(moments, copies, strict=True))


@NON_LEAF
@pytest.mark.long
def test_compiled_layers_give_the_same_bits_and_retrace_nothing_for_other_micro_batches(
    ranks, tiny_model, monkeypatch
):
    # "eager" runs the trace of torch.compile without generated code, so that bits must be equal.
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    torch._dynamo.reset()
    plain, compiled = (
        build_engine(program.make_options(str(tiny_model), changes), ranks, total_steps=10)
        for changes in ({}, {"fsdp.compile": True})
    )
    batch = program.steps.rows()
    losses, num_graphs = [], []
    for _ in range(3):
        losses.append([program.train_step(engine, batch) for engine in (plain, compiled)])
        num_graphs.append(counters["stats"]["unique_graphs"])
        batch = {key: tensor[1:] for key, tensor in batch.items()}  # other lengths, and fewer of them
    assert all(one == other for one, other in losses)
    assert compiled.checksums() == plain.checksums()
    assert num_graphs[1:] == num_graphs[:1] * 2


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="Liger's kernels are compiled for a GPU, and there is none"
)
def test_liger_gives_the_same_logprobs_and_gradients_within_rounding(tiny_model):
    pytest.importorskip("liger_kernel")
    ids = torch.randint(5, 100, (1, 64), device="cuda")
    found = []
    for uses_liger in (False, True):
        model = load_model(str(tiny_model), attn_implementation="sdpa").cuda()
        if uses_liger:
            apply_liger(model, "cuda")
        loss = torch.log_softmax(model(input_ids=ids).logits, -1).mean()
        found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("file", "content"),
    [("model.safetensors", b"\x80"), ("config.json", b'{"model_type": ["a"]}'), ("config.json", b"[]")],
)
def test_a_damaged_model_is_one_sentence(tiny_model, tmp_path, file, content):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / file).write_bytes(content)
    with pytest.raises(ModelError, match=r"^cannot load the model: .*\)$"):
        load_model(str(folder))
