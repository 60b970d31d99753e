"""Files that the hook writes inside a server, read as values of sites."""

from types import SimpleNamespace

import torch
from transformers import AutoConfig

from benchmarks import layer_faults
from consistency.layers.dump_hook import dump
from consistency.layers.hooks import Site
from consistency.layers.servers import Shape, hook_specs, read_row


def shape_of(family, folder):
    AutoConfig.for_model(family, **layer_faults.SIZES | layer_faults.FAMILIES[family]).save_pretrained(folder)
    return Shape.of(folder)


def write(folder, name, calls):
    """Write calls of a module, each as (arguments, result)."""
    hook = dump({"name": name, "folder": str(folder)})
    for inputs, output in calls:
        hook(torch.nn.Identity(), inputs, output)


def test_fused_modules_of_a_prompt_and_a_decoded_token(tmp_path):
    shape = shape_of("qwen3_moe", tmp_path)
    prefix, random = "model.layers.0.", torch.randn
    hidden, qkv, gate_up = random(5, 64), random(5, 128), random(5, 192)
    norm, residual, logits = random(5, 64), random(5, 64), random(2, 110)
    chosen, weights = torch.tensor([[1, 7]] * 5), torch.tensor([[0.75, 0.25]] * 5)
    passes = [slice(0, 4), slice(4, 5)]  # four tokens of a prompt, then one
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    write(dumps, prefix + "input_layernorm", [((hidden[t],), norm[t]) for t in passes])
    write(dumps, prefix + "self_attn.qkv_proj", [((), (qkv[t], None)) for t in passes])
    write(dumps, prefix + "self_attn.q_norm", [((), qkv[t, :64].reshape(-1, 16)) for t in passes])
    write(dumps, prefix + "post_attention_layernorm", [((), (norm[t], residual[t])) for t in passes])
    write(dumps, prefix + "mlp.gate_up_proj", [((), (gate_up[t], None)) for t in passes])
    write(dumps, prefix + "mlp.topk", [((), (weights[t], chosen[t])) for t in passes])
    write(dumps, "model.norm", [((), (norm[t], residual[t])) for t in passes])
    outputs = [SimpleNamespace(next_token_logits=row[None]) for row in logits]
    write(dumps, "logits_processor", [((), output) for output in outputs])

    found = read_row(dumps, [9, 8, 7, 6, 5], shape)
    expected = {
        Site("embedding"): hidden,
        Site("input_norm", 0): norm,
        Site("q", 0): qkv[:, :64],
        Site("k", 0): qkv[:, 64:96],
        Site("v", 0): qkv[:, 96:],
        Site("q_norm", 0): qkv[:, :64],
        Site("mlp_norm", 0): norm,
        Site("attention_residual", 0): residual,
        Site("gate", 0): gate_up[:, :96],
        Site("up", 0): gate_up[:, 96:],
        Site("final_norm"): norm,
        Site("residual", 2): residual,
    }
    for site, value in expected.items():
        torch.testing.assert_close(found.values.pop(site), value, rtol=0, atol=0)
        assert bool(found.seen[site].all())
    routing = found.values.pop(Site("routing", 0))
    assert routing[0].tolist() == [0, 0.75, 0, 0, 0, 0, 0, 0.25]
    head = found.values.pop(Site("head"))
    assert found.seen[Site("head")].tolist() == [False, False, False, True, True]
    torch.testing.assert_close(head[3:], logits[:, :103], rtol=0, atol=0)  # without the padded rows
    assert not found.values


def test_cache_is_read_only_where_places_in_it_are_known(tmp_path):
    windows, plain = shape_of("gemma2", tmp_path), shape_of("qwen3", tmp_path)
    for shape, expected in ((windows, False), (plain, True)):
        specs = {item["name"]: item for item in hook_specs(shape, tmp_path)}
        assert specs["model.layers.2.self_attn.attn"]["config"]["cache"] is expected
        assert specs["model.layers.2.self_attn"]["config"]["cache"] is False
