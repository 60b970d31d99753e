"""The SGLang client against a server that speaks its wire format."""

import pytest

from areal_core.rollout.errors import RequestRefused
from areal_core.rollout.types import ModelRequest, ModelResponse, Sampling
from areal_core.servers.server import Server
from tests.rollout.sampled import ask


def query(servers: list[Server], prompt=(5, 6), sampling=None, **options) -> ModelResponse:
    request = ModelRequest(input_ids=list(prompt), sampling=sampling or Sampling(max_new_tokens=3))
    return ask(servers, [request], **options)[0]


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


def test_a_refused_request_is_not_retried_and_its_payload_stays_out_of_the_message(start_fake):
    fake = start_fake()
    fake.script = [(400, "context length exceeded")]
    with pytest.raises(RequestRefused, match="answered 400: context length exceeded") as refused:
        query([fake.server], [987654] * 50)
    assert "987654" not in str(refused.value)
    assert len(fake.calls) == 1


def test_false_success_with_status_200_is_an_error(start_fake, pool_of):
    fake = start_fake()
    fake.refuse["/pause_generation"] = (200, {"success": False, "message": "not now"})
    with pytest.raises(RequestRefused, match="not now"):
        pool_of(fake).pause()
