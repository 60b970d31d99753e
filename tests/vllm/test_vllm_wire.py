"""vLLM's replies and commands as values, without a server."""

import itertools
import json
import math

import pytest

from areal_core.config import PPOConfig, VLLMConfig
from areal_core.launch.job import Job
from areal_core.launch.placement import plan_servers
from areal_core.launch.vllm_process import server_args, server_command
from areal_core.rollout.errors import MalformedReply, UnsupportedSampling, WrongServer
from areal_core.rollout.types import ModelRequest, Sampling, seed_of
from areal_core.servers.reply import Asked, checked
from areal_core.servers.server import Server
from areal_core.servers.sglang import SGLANG
from areal_core.servers.vllm import VLLM, parse_identity


def reply(**changes) -> bytes:
    """A reply of two tokens of weight versions 3 and 4, as vLLM 0.32 sends it."""
    entries = [{"token_id": 7, "logprob": -0.5}, {"token_id": 9, "logprob": -1.5}]
    choice = {
        "index": 0,
        "finish_reason": "length",
        "token_ids": [7, 9],
        "logprobs": {"content": entries},
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
    }
    return json.dumps({"request_id": "generate-tokens-r-1", "choices": [choice | changes]}).encode()


def test_each_token_has_its_version():
    chunk = VLLM.parse_generate(reply())
    assert (chunk.tokens, chunk.logprobs, chunk.versions) == ([7, 9], [-0.5, -1.5], [3, 4])
    assert (chunk.finish, chunk.rid) == ("length", "r-1")


def test_minus_9999_is_not_a_number_and_so_is_rejected():
    content = [{"token_id": 7, "logprob": -9999.0}, {"token_id": 9, "logprob": -1.5}]
    chunk = VLLM.parse_generate(reply(logprobs={"content": content}))
    assert math.isnan(chunk.logprobs[0])
    with pytest.raises(MalformedReply, match="logprobs_finite"):
        checked(chunk, Asked("r-1", 2, None, None))


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [7, 8]},
        {"token_ids": [7]},
        {"weight_versions": None},
        {"weight_versions": [{"version": "1", "start": 1, "end": 3}]},
        {"logprobs": None},
        {"token_ids": ["7", "9"]},
    ],
)
def test_a_reply_whose_lists_disagree_is_malformed(changes):
    with pytest.raises(MalformedReply):
        VLLM.parse_generate(reply(**changes))


def test_seeds_have_the_names_of_each_server_and_differ_for_each_sample_of_a_prompt():
    params = [
        wire.generate_payload([1], Sampling(seed=7), 10, 0, "r")["sampling_params"] for wire in (VLLM, SGLANG)
    ]
    assert (params[0]["seed"], params[1]["sampling_seed"]) == (7, 7)
    assert "seed" not in VLLM.generate_payload([1], Sampling(), 10, 0, "r")["sampling_params"]

    def seed(own=None, run=None, **name):
        return seed_of(ModelRequest(input_ids=[1], sampling=Sampling(seed=own), metadata=name), run)

    assert (seed(own=7, sample_id=2), seed(own=2**31 - 1, sample_id=1), seed(sample_id=2)) == (9, 0, None)
    names = [{"prompt_id": p, "sample_id": s, "turn": t} for p in (0, 1) for s in (0, 1) for t in (0, 1)]
    assert len({seed(run=1, **name) for name in names}) == 8
    assert seed(run=1, **names[0]) == seed(run=1, **names[0]) != seed(run=2, **names[0])


def test_grammars_have_the_names_of_vllm_and_an_unknown_parameter_is_refused():
    sampling = Sampling(server_only={"min_p": 0.1, "json_schema": "{}"})
    params = VLLM.generate_payload([1], sampling, 10, 0, "r")["sampling_params"]
    assert (params["min_p"], params["structured_outputs"]) == (0.1, {"json": "{}"})
    with pytest.raises(UnsupportedSampling, match="sampling_seed cannot be sampled by vLLM"):
        VLLM.generate_payload([1], Sampling(server_only={"sampling_seed": 1}), 10, 0, "r")


def test_weights_of_several_ranks_are_sharded_and_adapters_hide_no_name():
    body = {"checksums": {"dp0:pp0:pcp0:tp0:a.base_layer.weight": "f" * 64}}
    held = VLLM.parse_checksums(json.dumps(body))
    assert (held.checksums, held.is_sharded) == ({"a.weight": ["f" * 16]}, False)
    body["checksums"]["dp0:pp0:pcp0:tp1:a.base_layer.weight"] = "e" * 64
    assert VLLM.parse_checksums(json.dumps(body)).is_sharded


def server_info(**changes) -> str:
    started = {
        "model_config": {"model": "m", "dtype": "torch.float32", "logprobs_mode": "processed_logprobs"},
        "device_config": {"device": "cpu"},
        "lora_config": None,
        "parallel_config": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1},
        "weight_transfer_config": {"backend": "areal"},
    }
    return json.dumps({"vllm_config": started | changes})


def test_a_server_is_known_by_its_options():
    identity = parse_identity('{"version": "0.32.0"}', server_info(), "7")
    assert (identity.version, identity.dtype, identity.weight_version) == ("0.32.0", "float32", "7")
    assert identity.num_devices == 2
    with pytest.raises(MalformedReply, match="--weight-transfer-config is None, and must be areal"):
        parse_identity('{"version": "0.32.0"}', server_info(weight_transfer_config=None), "7")
    old = parse_identity('{"version": "0.11.0"}', server_info(), "7")
    with pytest.raises(WrongServer, match=r"is vLLM 0\.11\.0, which is too old: use 0\.32"):
        VLLM.check_identity(Server("127.0.0.1:1"), old, None)


def test_options_become_flags():
    args = server_args(VLLMConfig(seed=3, max_model_len=None), "cuda", tensor_size=2)
    pairs = dict(itertools.pairwise(args))
    wanted = {
        "--seed": "3",
        "--dtype": "bfloat16",
        "--tensor-parallel-size": "2",
        "--logprobs-mode": "processed_logprobs",
        "--block-size": "16",
    }
    assert {flag: pairs[flag] for flag in wanted} == wanted
    assert "--no-enable-prefix-caching" in args
    assert not {"--max-model-len", "--python", "--swap-space", "--model"} & set(args)
    assert "--block-size" not in server_args(VLLMConfig(), "cpu")
    assert server_command("m", ["--seed", "1"], "/env/bin/python")[0] == "/env/bin/python"


def test_a_job_plans_vllm_servers_with_their_own_seeds_and_interpreter(tmp_path):
    config = PPOConfig(experiment_name="a", trial_name="b", allocation_mode="vllm:d2+fsdp:d1")
    config.actor.path, config.vllm.python = "m", "/env/bin/python"
    plans = plan_servers(Job(("s.py",), config, config.allocation, {}, tmp_path), "cpu", share_devices=True)
    assert [(plan.engine, plan.model_path, plan.python) for plan in plans] == [
        ("vllm", "m", "/env/bin/python")
    ] * 2
    assert [plan.args[plan.args.index("--seed") + 1] for plan in plans] == ["1", "2"]
    assert plans[0].env["VLLM_SERVER_DEV_MODE"] == "1"
    assert plans[0].env["PYTHONPATH"].split(":")[0].endswith("areal_core/launch/vllm_worker")
