"""A real vLLM server in float32: healthy at temperature 1, raw logprobs at any other."""

import pytest

from areal_core.launch.server_process import InferenceServer
from areal_core.launch.vllm_process import server_command, server_environment
from areal_core.testing import make_tiny_model

from .records import judged

pytestmark = pytest.mark.long
SAMPLED = ("--num-samples", 2, "--max-new-tokens", 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # vLLM's CPU attention has no kernel for heads narrower than 32.
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=256, num_heads=4)


@pytest.fixture(scope="module")
def server(vllm_python, model, tmp_path_factory):
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    command = server_command(
        model, ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256"], vllm_python
    )
    with InferenceServer(command, log, server_environment("cpu"), ready_timeout_s=600.0) as running:
        yield running.server


def test_float32_server_is_healthy(server, model, prompts):
    code, found = judged("--engine", server.address, "--model", model, "--prompts", prompts, *SAMPLED)
    assert (code, found["verdict"], [cause["id"] for cause in found["causes"]]) == (0, "healthy", ["R35"])
    assert found["engines"] == [f"vLLM 0.32.0 with {model}"]
    assert found["num_tokens"] > 1000
    assert found["metrics"]["mean_abs"] < 1e-5
    assert found["rescoring"]["decode"] < 1e-5
    assert len(found["worst"][0]["engine_top"]) >= 5


def test_raw_logprobs_at_another_temperature_are_named_as_what_they_are(server, model, prompts):
    options = ("--model", model, "--prompts", prompts, "--temperature", 0.6, *SAMPLED)
    code, found = judged("--engine", server.address, *options)
    first = found["causes"][0]
    assert (code, found["verdict"], first["id"]) == (1, "mismatch", "R01")
    assert "the engine reports raw logprobs (temperature 1)" in first["evidence"]
    assert "--logprobs-mode processed_logprobs" in first["fix"]
