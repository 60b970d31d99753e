"""A real vLLM server on the CPU: its log-probs, weight updates, and what it refuses."""

import json
import os
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_core.config import VLLMConfig
from areal_core.launch.server_process import InferenceServer
from areal_core.launch.vllm_process import server_args, server_command, server_environment
from areal_core.rollout.errors import RequestRefused, ServerDied, WeightUpdateFailed, WrongServer
from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.servers.identity import run_model
from areal_core.servers.pool import ServerPool
from areal_core.servers.server import call
from areal_core.servers.verification import WeightCheck
from areal_core.servers.vllm import VLLM
from areal_core.servers.weight_update import BroadcastUpdate
from areal_core.servers.wire import is_alive, weight_version
from areal_core.testing import make_tiny_model
from consistency.entry.conform import conform
from tests.command_line import invoke
from tests.rollout import sampled
from tests.rollout.sampled import assert_sampled_by, generate, perturb

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    # vLLM's CPU attention has no kernel for heads narrower than 32.
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=256, num_heads=4)


@pytest.fixture(scope="module")
def model(model_path):
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def start_vllm(vllm_python, model_path, tmp_path_factory):
    def start(port: int = 0, **options) -> InferenceServer:
        args = server_args(VLLMConfig(dtype="float32", max_model_len=1024, **options), "cpu")
        command = server_command(model_path, args, vllm_python)
        log = tmp_path_factory.mktemp("vllm") / "llm_server_0.log"
        return InferenceServer(command, log, server_environment("cpu"), port=port, ready_timeout_s=600.0)

    return start


@pytest.fixture(scope="module")
def vllm_server(start_vllm):
    with start_vllm() as server:
        yield server


@pytest.fixture(scope="module")
def pool(vllm_server, model_path):
    pool = ServerPool([vllm_server.server], VLLM, timeout_s=60.0, model=run_model(str(model_path)))
    yield pool
    pool.close()


def test_the_server_is_known_as_the_runs(pool, model_path):
    pool.check_model()
    identity = pool.identity()
    assert (identity.version, identity.device, identity.dtype) == ("0.32.0", "cpu", "float32")
    assert (identity.model_path, identity.weight_version) == (str(model_path), "default")
    assert not identity.serves_adapters
    assert is_alive(pool.servers[0], VLLM)


def test_logprobs_are_those_of_transformers(pool, model):
    sampled.check_logprobs(pool, model)


def test_a_server_scores_given_tokens_as_transformers_does(pool, model):
    row, num_prompt = [10, 11, 12, *range(40, 60)], 3
    body = call(pool.servers[0], "POST", VLLM.routes.generate, VLLM.score_payload(row, num_prompt, "score"))
    scored = VLLM.parse_score(body.encode(), row[num_prompt:])
    expected = sampled.logprobs_of(model, row[:num_prompt], row[num_prompt:])
    torch.testing.assert_close(torch.tensor(scored.logprobs), expected, atol=1e-5, rtol=0)
    assert scored.version is None


def test_the_server_is_judged_healthy_at_any_temperature(pool, model_path, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"input_ids": [5 + (7 * row + 3 * i) % 95 for i in range(10)]} for row in range(8)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--engine", pool.servers[0].address, "--model", model_path, "--prompts", prompts]
    done = invoke("consistency", *arguments, "--temperature", "0.6", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["verdict"], found["causes"][0]["id"]) == ("healthy", "R35")
    assert found["engines"] == [f"vLLM 0.32.0 with {model_path}"]
    assert found["metrics"]["mean_abs"] < 1e-5


def test_it_conforms_to_every_update_of_its_weights(pool, model_path):
    found = conform(pool.servers[0].address, str(model_path), lambda check: None)
    missing = {check.name: check.evidence for check in found.checks if check.verdict != "pass"}
    assert missing == {
        "sleep and wake": "a run of ours never lets vLLM sleep",
        "LoRA adapter": "it was started without --enable-lora",
    }
    assert found.verdict == "conforms"


def test_stop_tokens_end_a_completion_and_stay_in_it(pool):
    sampled.check_stop_tokens(pool)


def test_an_update_by_disk_changes_the_weights_and_the_version(pool, model, model_path, tmp_path):
    sampled.check_update_by_disk(pool, model, model_path, tmp_path)


def test_updates_by_broadcast_change_the_weights_and_the_version(pool, model):
    sampled.check_updates_by_broadcast(pool, model, 1_000_000)


def test_a_delta_has_the_changed_tensors_and_is_compared_as_a_whole(pool, model):
    sampled.check_updates_by_delta(pool, model, 1)


@pytest.mark.parametrize(("mode", "version"), [("abort", 10), ("retract", 11), ("in_place", 12)])
def test_a_completion_that_an_update_interrupts_continues_with_the_new_weights(
    pool, model, model_path, tmp_path, mode, version
):
    sampled.check_interrupted_completions(pool, model, model_path, tmp_path, mode, version)


def test_weights_of_a_wrong_shape_are_refused_and_the_next_update_repairs_the_server(pool, model):
    # q_proj and k_proj arrive before it: they must not count as those of the next update.
    name = "model.layers.0.self_attn.v_proj.weight"
    wrong = ((n, p[:-1] if n == name else p) for n, p in model.named_parameters())
    perturb(model, 13)
    update = BroadcastUpdate(pool, "gloo", check=WeightCheck(every=1))
    with pytest.raises(WeightUpdateFailed, match="/update_weights answered 500"):
        update.send(wrong, 13)
    assert weight_version(pool.servers[0], VLLM) == "12"
    perturb(model, 14)
    update.send(model.named_parameters(), 14)
    responses = generate(pool)
    assert_sampled_by(model, responses)
    assert {v for r in responses for v in r.output_versions} == {14}


def test_a_request_beyond_the_context_is_refused_with_the_servers_message(pool):
    request = ModelRequest(input_ids=[10] * 1100, sampling=Sampling(max_new_tokens=5))
    with pytest.raises(RequestRefused, match="longer than the maximum model length of 1024"):
        sampled.ask(pool.servers, [request], wire=VLLM)


def test_a_restarted_server_gets_no_request_until_it_has_the_weights(
    pool, vllm_server, start_vllm, model, model_path, tmp_path
):
    os.killpg(vllm_server.process.pid, signal.SIGKILL)
    vllm_server.process.wait(10)
    with pytest.raises(ServerDied):
        generate(pool, 1)
    port = int(vllm_server.server.address.rpartition(":")[2])
    with start_vllm(port) as again:
        assert again.server.address == vllm_server.server.address
        with pytest.raises(ServerDied, match="no inference server is left with the weights of version 14"):
            generate(pool, 1, version=14)
        perturb(model, 15)
        BroadcastUpdate(pool, "gloo", check=WeightCheck(every=1)).send(iter(model.named_parameters()), 15)
        responses = generate(pool, version=15)
        assert_sampled_by(model, responses)
        assert {v for r in responses for v in r.output_versions} == {15}


def test_a_server_with_raw_logprobs_is_refused_by_name(vllm_python, model_path, tmp_path):
    args = server_args(VLLMConfig(dtype="float32", max_model_len=256), "cpu")
    args[args.index("processed_logprobs")] = "raw_logprobs"
    command = server_command(model_path, args, vllm_python)
    log, env = tmp_path / "server.log", server_environment("cpu")
    reason = "its --logprobs-mode is raw_logprobs; training needs processed_logprobs"
    with InferenceServer(command, log, env) as server, pytest.raises(WrongServer, match=reason):
        VLLM.ask_identity(server.server)
