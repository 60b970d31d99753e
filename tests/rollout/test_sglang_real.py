"""A real SGLang server on the CPU: its logprobs, weight updates, and the report of its death."""

import json
import os
import signal
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_core.errors import ServerFailed
from areal_core.rollout.errors import RequestRefused, ServerDied, WeightUpdateFailed
from areal_core.servers.pool import ServerPool
from areal_core.servers.sglang import SGLANG
from areal_core.servers.verification import WeightCheck
from areal_core.servers.weight_update import BroadcastUpdate
from tests.command_line import invoke
from tests.rollout import sampled
from tests.rollout.sampled import generate, perturb

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def pool(sglang_server):
    pool = ServerPool([sglang_server.server], SGLANG, timeout_s=60.0)
    yield pool
    pool.close()


def test_logprobs_are_those_of_transformers(pool, model):
    sampled.check_logprobs(pool, model)


@pytest.mark.long
def test_the_consistency_verb_finds_no_difference(pool, tiny_model, tmp_path):
    """In this file, because a second server takes minutes; `test_real_sglang.py` has more."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"input_ids": [10 + row, 20, 30 + row], "answer": "1"} for row in range(16)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--num-samples", "2", "--max-new-tokens", "32", "--json"]
    engine = pool.servers[0].address
    given = ["--engine", engine, "--model", str(tiny_model), "--prompts", str(prompts), *options]
    done = invoke("consistency", *given)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["verdict"], found["num_sequences"]) == ("healthy", 32)
    assert found["engines"] == [f"SGLang 0.5.23 with {tiny_model} (float32)"]
    assert found["metrics"]["mean_abs"] < 1e-5
    assert max(found["rescoring"]["decode"], found["rescoring"]["prefill"]) < 1e-5


def test_stop_tokens_end_a_completion_and_stay_in_it(pool):
    sampled.check_stop_tokens(pool)


def test_an_update_by_disk_changes_the_weights_and_the_version(pool, model, tiny_model, tmp_path):
    sampled.check_update_by_disk(pool, model, tiny_model, tmp_path)


def test_updates_by_broadcast_change_the_weights_and_the_version(pool, model):
    sampled.check_updates_by_broadcast(pool, model, 100_000)


@pytest.mark.long
def test_a_delta_has_the_changed_tensors_and_is_compared_as_a_whole(pool, model):
    sampled.check_updates_by_delta(pool, model, 1)


@pytest.mark.parametrize(
    ("mode", "version"),
    [
        ("abort", 10),
        pytest.param("retract", 11, marks=pytest.mark.long),
        pytest.param("in_place", 12, marks=pytest.mark.long),
    ],
)
def test_a_completion_that_an_update_interrupts_continues_with_the_new_weights(
    pool, model, tiny_model, tmp_path, mode, version
):
    sampled.check_interrupted_completions(pool, model, tiny_model, tmp_path, mode, version)


@pytest.mark.parametrize("part", ["k_proj", pytest.param("up_proj", marks=pytest.mark.long)])
def test_a_weight_that_is_a_row_short_is_accepted_without_an_error_but_found_and_named(pool, model, part):
    name = f"model.layers.1.{'self_attn' if part == 'k_proj' else 'mlp'}.{part}.weight"
    fused = {"k_proj": "self_attn.qkv_proj", "up_proj": "mlp.gate_up_proj"}[part]
    perturb(model, 77)  # otherwise the old row equals the missing one
    short = [(n, p.detach()[:-1] if n == name else p.detach()) for n, p in model.named_parameters()]
    BroadcastUpdate(pool, "gloo").send(short, 12)  # without a check there is no error
    update = BroadcastUpdate(pool, "gloo", check=WeightCheck(every=1))
    complaint = rf"WeightsDiffer: .* 1 tensor, model\.layers\.1\.{fused}\.weight \(sent as .*{part}"
    with pytest.raises(WeightUpdateFailed, match=complaint):
        update.send(short, 12)
    update.send(model.named_parameters(), 12)  # complete again


def test_weights_of_a_wrong_shape_are_refused_and_generation_continues(pool, model):
    wrong = ((n, p[:-1] if n == "model.norm.weight" else p) for n, p in model.named_parameters())
    with pytest.raises(WeightUpdateFailed, match="Attempted to load weight"):
        BroadcastUpdate(pool, "gloo").send(wrong, 13)
    assert len(generate(pool, 1, 4, ignore_eos=True)[0].output_tokens) == 4


def test_a_request_beyond_the_context_is_refused_with_the_servers_message(pool):
    with pytest.raises(RequestRefused, match="maximum context length of 1024"):
        generate(pool, 1, 5000)


def test_the_death_of_the_server_is_reported_with_its_last_log_lines(pool, sglang_server):
    os.killpg(sglang_server.process.pid, signal.SIGKILL)
    sglang_server.process.wait(10)
    address = sglang_server.server.address
    with pytest.raises(ServerDied, match=f"server {address}; the last lines of .*llm_server_0.log:\n    .+"):
        generate(pool, 1)
    with pytest.raises(ServerFailed, match=f"ended with exit code -9: server {address}; the last lines"):
        sglang_server.check()
    deadline = time.monotonic() + 5
    sglang_server.stop()
    assert time.monotonic() < deadline
