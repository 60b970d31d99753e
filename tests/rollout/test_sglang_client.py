"""The SGLang client against a server that speaks its wire format."""

import pytest

from areal_core.rollout.errors import NoServers, PromptTooLong, RequestRefused, ServerDied
from areal_core.rollout.types import ModelRequest, ModelResponse, Sampling
from areal_core.servers.pool import ServerPool
from areal_core.servers.server import Server, environment_of, servers_from_environment
from areal_core.servers.sglang import SGLANG
from tests.rollout.sampled import ask


def query(servers: list[Server], prompt=(5, 6), sampling=None, **options) -> ModelResponse:
    request = ModelRequest(input_ids=list(prompt), sampling=sampling or Sampling(max_new_tokens=3))
    return ask(servers, [request], **options)[0]


def test_tokens_logprobs_and_reason_are_those_of_the_server(start_fake):
    response = query([start_fake().server])
    assert response == ModelResponse(
        input_tokens=[5, 6],
        output_tokens=[7, 8, 9],
        output_logprobs=[-0.07, -0.08, -0.09],
        output_versions=[0, 0, 0],
        stop_reason="length",
    )


def test_request_carries_every_sampling_option(start_fake):
    fake = start_fake()
    sampling = Sampling(
        max_new_tokens=9,
        min_new_tokens=4,
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        stop_token_ids=[3],
        stop=["\n"],
        frequency_penalty=0.1,
        ignore_eos=True,
        skip_special_tokens=False,
    )
    query([fake.server], (5, 6), sampling)
    rid = fake.calls[0][1]["rid"]
    assert fake.calls == [
        (
            "/generate",
            {
                "rid": rid,
                "input_ids": [5, 6],
                "return_logprob": True,
                "stream": False,
                "sampling_params": {
                    "max_new_tokens": 5,  # max_tokens leaves space for 5
                    "min_new_tokens": 4,
                    "temperature": 0.5,
                    "top_p": 0.9,
                    "top_k": 40,
                    "stop_token_ids": [3],
                    "stop": ["\n"],
                    "frequency_penalty": 0.1,
                    "ignore_eos": True,
                    "skip_special_tokens": False,
                },
            },
        )
    ]


def test_greedy_is_temperature_zero(start_fake):
    fake = start_fake()
    query([fake.server], sampling=Sampling(max_new_tokens=1, greedy=True))
    assert fake.calls[0][1]["sampling_params"]["temperature"] == 0.0


def test_an_aborted_request_continues_where_it_ended_and_each_token_keeps_its_version(start_fake):
    fake = start_fake()
    fake.script = [2, 0]
    fake.weight_version = "4"
    sampling = Sampling(max_new_tokens=6, min_new_tokens=5)

    response = query([fake.server], (5,), sampling)

    assert response.output_tokens == [6, 7, 8, 9, 10, 11]
    assert response.output_versions == [4] * 6
    assert response.stop_reason == "length"
    sent = [(body["input_ids"], body["sampling_params"]) for _, body in fake.calls]
    assert [ids for ids, _ in sent] == [[5], [5, 6, 7], [5, 6, 7]]
    assert [params["max_new_tokens"] for _, params in sent] == [6, 4, 4]
    assert [params["min_new_tokens"] for _, params in sent] == [5, 3, 3]


def test_spans_of_versions_are_kept_per_token():
    body = b"""{"meta_info": {"id": "r", "finish_reason": {"type": "stop"}, "completion_tokens": 3, "weight_version": "5",
        "weight_versions": [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 3}],
        "output_token_logprobs": [[-1, 7, null], [-2, 8, null], [-3, 9, null]]}}"""
    assert SGLANG.parse_generate(body).versions == [4, 4, 5]


def test_a_request_aborted_before_prefill_brings_no_tokens():
    body = (
        b'{"meta_info": {"id": "r", "finish_reason": {"type": "abort", "message": "Abort before prefill"}}}'
    )
    assert SGLANG.parse_generate(body).tokens == []


def test_a_passing_server_error_is_retried(start_fake):
    fake = start_fake()
    fake.script = [(503, "busy"), (500, "oops")]
    assert query([fake.server]).output_tokens == [7, 8, 9]
    assert len(fake.calls) == 3


def test_a_refused_request_is_not_retried_and_its_payload_stays_out_of_the_message(start_fake):
    fake = start_fake()
    fake.script = [(400, "context length exceeded")]
    with pytest.raises(RequestRefused, match="answered 400: context length exceeded") as refused:
        query([fake.server], [987654] * 50)
    assert "987654" not in str(refused.value)
    assert len(fake.calls) == 1


def test_when_the_last_server_dies_it_is_named_with_its_last_log_lines(start_fake, tmp_path):
    dead = start_fake()
    dead.stop()
    log = tmp_path / "llm_server_0.log"
    log.write_text("loading\n" * 100 + "RuntimeError: out of memory\n")
    with pytest.raises(ServerDied) as died:
        query([Server(dead.server.address, log)], num_retries=0)
    assert dead.server.address in str(died.value)
    assert str(died.value).endswith("    RuntimeError: out of memory")
    assert str(died.value).count("loading") == 14


def test_a_prompt_that_fills_max_tokens_is_refused_before_it_is_sent(start_fake):
    fake = start_fake()
    with pytest.raises(PromptTooLong, match="a prompt of 4 tokens leaves no room to sample: max_tokens is 4"):
        query([fake.server], [1, 2, 3, 4], Sampling(max_tokens=4))
    assert fake.calls == []


def test_false_success_with_status_200_is_an_error(start_fake):
    fake = start_fake()
    fake.refuse["/pause_generation"] = (200, {"success": False, "message": "not now"})
    pool = ServerPool([fake.server], SGLANG)
    with pytest.raises(RequestRefused, match="not now"):
        pool.pause()
    pool.close()


def test_servers_travel_through_the_environment(tmp_path):
    servers = [Server("a:1", tmp_path / "0.log"), Server("b:2", tmp_path / "1.log")]
    assert servers_from_environment(environment_of(servers)) == servers
    assert servers_from_environment({"AREAL_LLM_SERVER_ADDRS": "a:1,b:2"}) == [Server("a:1"), Server("b:2")]
    with pytest.raises(NoServers, match="AREAL_LLM_SERVER_ADDRS is not set"):
        servers_from_environment({})
