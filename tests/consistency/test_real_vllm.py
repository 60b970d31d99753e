"""A real vLLM server in float32: healthy at temperature 1, raw logprobs at any other."""

import os
import socket
import subprocess
import time

import pytest

from areal_core.servers.server import Server, is_healthy, last_lines
from areal_core.testing import make_tiny_model

from .records import judged

pytestmark = pytest.mark.long
READY_TIMEOUT_S = 300.0
SAMPLED = ("--num-samples", 2, "--max-new-tokens", 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # vLLM's CPU attention has no kernel for heads narrower than 32.
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=256, num_heads=4)


@pytest.fixture(scope="module")
def server(vllm_python, model, tmp_path_factory):
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    arguments = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--host", "127.0.0.1"]
    # Without a limit the cache takes all memory, in GiB.
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    module = [vllm_python, "-m", "vllm.entrypoints.openai.api_server"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*module, "--model", str(model), "--port", port, *arguments],
            stdout=out, stderr=out, env=os.environ | environment, start_new_session=True,
        )  # fmt: skip
    try:
        running = Server(f"127.0.0.1:{port}", log)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not is_healthy(running):
            assert process.poll() is None, last_lines(log)
            assert time.monotonic() < deadline, last_lines(log)
            time.sleep(1.0)
        yield running
    finally:
        process.terminate()
        process.wait(60)


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
