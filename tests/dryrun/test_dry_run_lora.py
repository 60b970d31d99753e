"""The plan of a run with an adapter: what trains, what is synced, and the memory."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_debug.verbs.train import command

ROOT = Path(__file__).parents[2]
EXAMPLE, SCRIPT = ROOT / "examples/gsm8k_grpo_lora.yaml", ROOT / "examples/gsm8k_grpo.py"


@pytest.fixture
def dry_run(monkeypatch, tmp_path):
    """`dry_run("seed=2")` gives exit code and output for the example with an adapter."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(*overrides: str, as_json: bool = True):
        options = ["--dry-run", *(["--json"] if as_json else [])]
        arguments = [str(SCRIPT), "--config", str(EXAMPLE), f"cluster.fileroot={tmp_path}", *overrides]
        done = CliRunner().invoke(command, [*arguments, *options], catch_exceptions=False)
        return done.exit_code, json.loads(done.output) if as_json else done.output

    return call


def test_the_example_is_planned_with_the_adapter_that_is_trained(dry_run, tiny_model):
    reference = (f"ref.path={tiny_model}", "ref.mb_spec.max_tokens_per_mb=10240", "actor.kl_ctl=0.1")
    code, run = dry_run(f"actor.path={tiny_model}", *reference)
    assert code == 0
    assert run["update"].startswith("1 optimizer step of an adapter of rank 32 over 256 sequences per rank")
    parts = {part["name"]: part["size_bytes"] for part in run["memory"]["rank"]}
    num_parameters = run["memory"]["num_parameters"]
    # Rank 32 on seven layers of 64 and 256 features in each of two blocks, k and v half as wide as
    # q.
    adapter = 2 * 32 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 256))
    assert parts["actor: frozen weights"] == 2 * num_parameters // 4  # bfloat16, over four ranks
    assert [parts[f"actor: {part}"] for part in ("adapter", "optimizer", "gradients")] == [
        adapter // 4 * size for size in (4, 8, 4)
    ]
    assert not any(name.startswith("reference") for name in parts)
