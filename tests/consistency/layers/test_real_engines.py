"""Real SGLang and vLLM on the CPU: sound ones are healthy, planted faults are named by operator."""

import json
import shutil

import pytest
import torch

from areal_core.engine.model import load_model
from areal_core.testing import make_tiny_family, make_tiny_tokenizer
from consistency.layers.judge import compare_layers, reference_of
from consistency.layers.observed import Row
from consistency.layers.servers import sglang, vllm

PROMPTS = [Row([10, 20, 30, *range(40, 60)]), Row([11, 21, 31, *range(50, 90)])]
NUM_NEW = 8


def make_folder(folder, family, **changes):
    make_tiny_tokenizer().save_pretrained(folder)
    return make_tiny_family(folder, family, vocab_size=128, eos_token_id=1, **changes)


def compared(model, dtype, values, rows):
    reference = load_model(str(model), dtype=dtype, attn_implementation="sdpa")
    return compare_layers(reference_of(reference), values, rows)


@pytest.mark.long
@pytest.mark.sglang
@pytest.mark.parametrize(
    ("family", "change", "expected"),
    [
        ("qwen3", {}, None),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}, (0, "rope")),
        ("qwen3_moe", {}, None),
        ("qwen3_moe", {"num_experts_per_tok": 1}, (0, "choice of experts")),
    ],
)
def test_sglang_server(tmp_path, family, change, expected):
    changes = {"mlp_only_layers": []} if family == "qwen3_moe" else {}  # SGLang makes every layer sparse
    model = make_folder(tmp_path / "model", family, **changes)
    shutil.copytree(model, tmp_path / "served")
    config = json.loads((model / "config.json").read_text()) | change
    (tmp_path / "served/config.json").write_text(json.dumps(config))
    values, rows = sglang(tmp_path / "served", torch.bfloat16, PROMPTS, NUM_NEW)
    report = compared(model, torch.bfloat16, values, rows)
    assert [len(row.ids) for row in rows] == [len(prompt.ids) + NUM_NEW - 1 for prompt in PROMPTS]
    first = report.first
    assert (first and (first.site.layer, first.operator)) == expected
    assert "attention" not in report.only_reference


@pytest.mark.long
def test_vllm_in_a_child_process(tmp_path, vllm_python):
    model = make_folder(tmp_path, "qwen3", head_dim=32)
    values, rows = vllm(model, torch.float32, PROMPTS, NUM_NEW, vllm_python)
    report = compared(model, torch.float32, values, rows)
    assert report.verdict == "healthy", report.first
