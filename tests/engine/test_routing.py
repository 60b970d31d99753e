"""Experts that one model chose, replayed in another: log-probs, gradients, ranks, families."""

import asyncio
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from areal_core.data.batch import pad_and_concat, select_rows
from areal_core.embedded.engine import EmbeddedEngine
from areal_core.embedded.replica import Replica
from areal_core.engine.attention import PACKED
from areal_core.engine.model import load_model
from areal_core.engine.parity import depends_on_forward
from areal_core.engine.routers import Routers, routing_sizes
from areal_core.errors import ModelError
from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.rollout.workflow import episode_tensors
from areal_core.testing import make_tiny_family, step_with_gradients
from benchmarks import model_families as families
from tests.engine import routing_program as program

FOLDER = Path(__file__).parent
PROGRAM = FOLDER / "routing_program.py"
CPU = torch.device("cpu")
PROMPTS = [[7, 8, 9], [40] * 9, list(range(5, 20)), [60, 61], [33]]
QUICK = ("qwen2_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # One expert of weight 1 a token: what differs between two routers is the choice alone.
    options = {
        "num_experts_per_tok": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "num_hidden_layers": 3,
    }
    return make_tiny_family(tmp_path_factory.mktemp("moe"), "qwen3_moe", **options)


@pytest.fixture(scope="module")
def sampled(model):
    """Return the rows that the embedded engine samples, with its experts, and its responses."""
    replica = Replica(str(model), torch.float32, CPU, keeps_experts=True)
    engine = EmbeddedEngine(replica, 103, seed=1)

    async def work():
        requests = [
            ModelRequest(
                input_ids=prompt,
                sampling=Sampling(max_new_tokens=4 + 5 * i),
                metadata={"prompt_id": i, "sample_id": 0},
            )
            for i, prompt in enumerate(PROMPTS)
        ]
        return await asyncio.gather(*map(engine.agenerate, requests))

    responses = asyncio.run(work())
    return pad_and_concat([episode_tensors(response, 0.0) for response in responses]), responses


def mismatch(engine, batch):
    """Return |trainer's - engine's log-prob| of the sampled tokens."""
    aligned = program.to_next_token(batch)
    return (engine.compute_logprobs(aligned) - aligned["logprobs"])[aligned["loss_mask"].bool()].abs()


def test_the_embedded_engine_returns_the_experts_of_a_forward_without_cache(model, sampled):
    batch, responses = sampled
    own = load_model(str(model), dtype=torch.float32).eval()
    routers = Routers(own)
    for row, response in enumerate(responses):
        tokens = response.input_tokens + response.output_tokens
        assert response.routed_experts.shape == (len(tokens) - 1, 3, 1)
        assert response.routed_experts.dtype == "int16"
        with torch.no_grad():
            own(input_ids=torch.tensor([tokens]), use_cache=False)
        expected = routers.choices()
        expected[-1] = -1  # of the last token there are none
        assert torch.equal(batch["routed_experts"][row, : len(tokens)], expected)
        assert not batch["routed_experts"][row, len(tokens) :].any()
    assert len(batch["routed_experts"].unique()) > 3


def test_a_mismatch_of_routers_is_gone_with_the_engines_experts(ranks, model, sampled, tmp_path):
    """The trainer's router chooses other experts; with those of the engine log-probs are equal."""
    batch, _ = sampled
    engine = program.make_engine(ranks, program.perturbed(model, tmp_path), replays=False)
    assert mismatch(engine, batch).max() > 0.05
    assert (mismatch(engine, batch) > 0.01).float().mean() > 0.3
    engine.routers = Routers(engine.model)
    assert mismatch(engine, batch).max() < 2e-5
    without = {key: tensor for key, tensor in batch.items() if key != "routed_experts"}
    assert mismatch(engine, without).max() > 0.05


def test_the_engines_own_experts_change_no_bit_of_a_step(ranks, model, sampled):
    batch = program.to_next_token(sampled[0])
    plain = step_with_gradients(program.make_engine(ranks, model, replays=False), batch)
    replayed = step_with_gradients(program.make_engine(ranks, model), batch)
    assert replayed[0] == plain[0]
    for name, gradient in plain[1].items():
        assert torch.equal(replayed[1][name], gradient), name


def test_backward_recomputes_with_the_experts_of_its_micro_batch(ranks, model, sampled, tmp_path):
    batch, changed = program.to_next_token(sampled[0]), program.perturbed(model, tmp_path)
    result, gradients = step_with_gradients(program.make_engine(ranks, changed), batch)
    assert len(result.micro_batches) == 3
    again = step_with_gradients(program.make_engine(ranks, changed, recomputes=True), batch)[1]
    for name, gradient in gradients.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-7)


def test_weights_come_from_the_trainers_router_which_is_trained(tmp_path):
    """By hand: the softmax of the trainer's logits at the given experts, divided by its sum."""
    router = load_model(
        str(make_tiny_family(tmp_path, "qwen3_moe", norm_topk_prob=True)), dtype=torch.float32
    )
    routers, gate = Routers(router), router.model.layers[1].mlp.gate
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    recorded = torch.tensor(
        [[[0, 0], [3, 1]], [[0, 0], [-1, -1]]], dtype=torch.int16
    )  # [tokens, layers, top_k]
    routers.replay(recorded, CPU)
    logits, weights, chosen = gate(hidden)
    probs = logits.softmax(-1)
    assert sorted(chosen[0].tolist()) == [1, 3]
    assert chosen[1].tolist() == probs[1].topk(2).indices.tolist()  # not known: the router's own
    torch.testing.assert_close(weights[0], probs[0, chosen[0]] / probs[0, [1, 3]].sum())
    weights[0, 0].backward()
    assert gate.weight.grad.abs().sum() > 0


def test_recorded_weights_are_constants_and_the_router_is_not_trained(tmp_path):
    router = load_model(
        str(make_tiny_family(tmp_path, "qwen3_moe", norm_topk_prob=True)), dtype=torch.float32
    )
    routers, gate = Routers(router, keeps_weights=True), router.model.layers[1].mlp.gate
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    given = torch.tensor([0.125, 0.75]).view(torch.int32).tolist()  # of experts 3 and 1
    unknown = [-1] * 4
    recorded = torch.tensor([[unknown, [3, 1, *given]], [unknown, unknown]], dtype=torch.int32)
    routers.replay(recorded, CPU)
    logits, weights, chosen = gate(hidden)
    assert dict(zip(chosen[0].tolist(), weights[0].tolist(), strict=True)) == {3: 0.125, 1: 0.75}
    own = logits[1].softmax(-1).topk(2)
    assert chosen[1].tolist() == own.indices.tolist()
    torch.testing.assert_close(weights[1], own.values / own.values.sum())
    kept = routers.kept[1][0].int()
    assert dict(zip(kept[:2].tolist(), kept[2:].view(torch.float32).tolist(), strict=True)) == {
        3: 0.125,
        1: 0.75,
    }
    (weights[0, 0] * 2 + weights[1, 0] * 0).backward()
    assert not gate.weight.grad.any()


def test_experts_of_another_model_are_refused(ranks, model, sampled):
    engine = program.make_engine(ranks, model)
    batch = program.to_next_token(sampled[0])
    batch["routed_experts"] = batch["routed_experts"] + 3
    with pytest.raises(ValueError, match="name expert 6, and the model has 4 experts"):
        engine.score(batch)
    batch["routed_experts"] = sampled[0]["routed_experts"][:, :, :2]
    with pytest.raises(ValueError, match=r"are of \[2, 1\] layers .* has \[3, 1\]"):
        engine.score(batch)
    del batch["routed_experts"]
    with pytest.raises(ValueError, match="the rows have no routed_experts"):
        step_with_gradients(engine, batch)


@pytest.mark.long
@pytest.mark.parametrize("split", ["sequence", "tensor", "data"])
def test_ranks_replay_the_experts_of_their_tokens(ranks, torchrun, sampled, model, tmp_path, split):
    changed = program.perturbed(model, tmp_path)
    batch = select_rows(sampled[0], [4, 2, 0, 1, 3])
    torch.save(batch, tmp_path / "batch.pt")
    found = torchrun(PROGRAM, 2, changed, tmp_path / "batch.pt", split)
    result, gradients = step_with_gradients(program.make_engine(ranks, changed), program.to_next_token(batch))
    assert found["loss"] == pytest.approx(result.loss, rel=1e-6)
    for name, norm in found["gradients"].items():
        assert norm == pytest.approx(float(gradients[name].norm()), rel=1e-5, abs=1e-7), name


def check_family(name: str, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        families.write_tiny(name, str(folder))
        config = AutoConfig.from_pretrained(str(folder))
        kernel = "eager" if depends_on_forward(config) else PACKED  # a sparse attention needs the mask
        model = load_model(str(folder), dtype=torch.float32, attn_implementation=kernel).eval()
    routers, ids = Routers(model), torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(0))
    assert routers.sizes == routing_sizes(model.config)
    own, chosen = program.logits(model, ids), routers.choices()
    routers.replay(chosen, CPU)
    assert torch.equal(program.logits(model, ids), own)
    layers = sorted(routers.kept)
    others = chosen.clone()
    others[:, layers] = (others[:, layers] + 1) % routers.sizes.num_experts
    routers.replay(others, CPU)
    assert not torch.equal(program.logits(model, ids), own)
    assert torch.equal(routers.choices().sort(-1).values, others.sort(-1).values)
    check_weights(load_model(str(folder), dtype=torch.float32, attn_implementation=kernel).eval(), ids, own)


def check_weights(model, ids, own) -> None:
    """Check that a model's own weights of its experts change nothing, and their halves do."""
    routers = Routers(model, keeps_weights=True)
    if model.config.get_text_config().model_type == "llama4_text":  # which weighs inputs, not outputs
        with pytest.raises(
            ModelError, match=r"return_routed_weights is true, and .* 0 outputs of the router"
        ):
            program.logits(model, ids)
        return
    assert torch.equal(program.logits(model, ids), own)
    chosen, top_k = routers.choices(), routers.sizes.top_k
    routers.replay(chosen, CPU)
    assert torch.equal(program.logits(model, ids), own)
    chosen[..., top_k:] = (chosen[..., top_k:].view(torch.float32) / 2).view(torch.int32)
    routers.replay(chosen, CPU)
    assert not torch.equal(program.logits(model, ids), own)


@pytest.mark.parametrize("name", QUICK)
def test_families_compute_with_the_given_experts(name, tmp_path):
    check_family(name, tmp_path)
