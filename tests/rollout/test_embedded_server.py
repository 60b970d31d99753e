"""The embedded engine behind SGLang's routes: replies, and pauses, aborts and updates in flight."""

import asyncio
import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.testing.embedded_server import EmbeddedServer
from tests.rollout.sampled import logprobs_of

PROMPT = [10, 11, 12]


class Gate:
    """Stop the model before a chosen token until the test releases it."""

    def __init__(self, forward) -> None:
        self.forward = forward
        self.calls = 0
        self.stop_at: int | None = None
        self.reached = threading.Event()
        self.released = threading.Event()

    def __call__(self, *arguments):
        if self.calls == self.stop_at:
            self.reached.set()
            assert self.released.wait(20)
        self.calls += 1
        return self.forward(*arguments)

    def load(self, named_tensors) -> None:
        self.forward.load(named_tensors)


@pytest.fixture(scope="module")
def embedded(tiny_model):
    server = EmbeddedServer(str(tiny_model), seed=3)
    yield server
    server.sampler.close()


@pytest.fixture
def gate(embedded, monkeypatch):
    gate = Gate(embedded.sampler._model)
    monkeypatch.setattr(embedded.sampler, "_model", gate)
    yield gate
    gate.released.set()


@pytest.fixture
def query(embedded, serve_application):
    address = serve_application(embedded.application()).address

    def query(path: str, body=None, status: int = 200):
        connection = http.client.HTTPConnection(address, timeout=30)
        connection.request(
            "POST" if body is not None else "GET", path, None if body is None else json.dumps(body)
        )
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        assert reply.status == status, text
        return json.loads(text)

    return query


@pytest.fixture
def in_flight(query):
    """Start a request on a thread; return its future."""
    with ThreadPoolExecutor() as threads:

        def start(num_tokens=12, **more):
            body = {
                "input_ids": PROMPT,
                "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True},
                **more,
            }
            return threads.submit(query, "/generate", body)

        yield start


def pause_at(gate, embedded, query, body) -> None:
    """Pause while the gate holds a token, and let that token be sampled."""
    assert gate.reached.wait(20)
    with ThreadPoolExecutor() as threads:
        pausing = threads.submit(query, "/pause_generation", body)
        with embedded.sampler._changed:
            assert embedded.sampler._changed.wait_for(lambda: embedded.sampler._paused, 20)
        gate.released.set()
        pausing.result(20)


def versions_of(meta) -> list[str]:
    return [span["version"] for span in meta["weight_versions"] for _ in range(span["start"], span["end"])]


def test_tokens_come_with_the_models_logprobs_and_the_name_of_its_weights(query, tiny_model):
    reply = query(
        "/generate",
        {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 9, "temperature": 0.7}, "rid": "r"},
    )
    meta = reply["meta_info"]
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    found = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
    torch.testing.assert_close(found, logprobs_of(model, PROMPT, reply["output_ids"], 0.7), atol=1e-5, rtol=0)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["id"]) == (
        3,
        len(reply["output_ids"]),
        "r",
    )
    assert set(versions_of(meta)) == {"default"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_k", 10**30), ("top_k", -7), ("sampling_seed", 2**80), ("temperature", float("nan")), ("top_p", 0)],
)
def test_a_number_out_of_range_is_refused_by_its_name(query, field, value):
    body = {"input_ids": PROMPT, "sampling_params": {field: value}}
    assert field in query("/generate", body, status=400)["message"]


def test_tokens_that_are_given_are_not_scored(query):
    body = {"input_ids": PROMPT, "logprob_start_len": 1, "return_logprob": True}
    assert "scores given tokens; SGLang does" in query("/generate", body, status=400)["message"]


def test_the_smallest_temperature_is_greedy_and_fails_no_request_of_its_wave(query):
    greedy, tiny = (
        query("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3, "temperature": t}})
        for t in (0, 1e-300)
    )
    assert greedy["output_ids"] == tiny["output_ids"]


def test_an_aborting_pause_returns_the_tokens_so_far_and_holds_new_requests(query, gate, in_flight, embedded):
    gate.stop_at = 4
    first = in_flight()
    pause_at(gate, embedded, query, {})
    reply = first.result(20)
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(reply["output_ids"]) == 5
    waiting = in_flight(2)
    query("/continue_generation", {})
    assert len(waiting.result(20)["output_ids"]) == 2


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_that_keeps_requests_lets_them_cross_new_weights(
    query, gate, in_flight, embedded, tiny_model, tmp_path, mode
):
    other = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    other.save_pretrained(tmp_path)
    before = {name: p.clone() for name, p in embedded._replica.model.named_parameters()}
    old_name = embedded.sampler.version
    gate.stop_at = 4
    request = in_flight()
    pause_at(gate, embedded, query, {"mode": mode})
    query("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "8"})
    query("/continue_generation", {})
    reply = request.result(20)
    versions = versions_of(reply["meta_info"])
    cut = 5  # the pause came while token 5 was being sampled
    assert versions == [old_name] * cut + ["8"] * (12 - cut)
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    found = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
    by_other = logprobs_of(other, PROMPT, reply["output_ids"])
    if mode == "retract":  # the cache was computed again, by the new weights
        torch.testing.assert_close(found[cut:], by_other[cut:], atol=1e-5, rtol=0)
    else:
        assert (found[cut:] - by_other[cut:]).abs().max() > 1e-4
    embedded.sampler.load(iter(before.items()), "default")


def test_a_request_whose_client_has_gone_is_not_sampled_on(embedded, gate):
    gate.stop_at = 4
    sampling = Sampling(max_new_tokens=500, ignore_eos=True)
    request = ModelRequest(input_ids=PROMPT, sampling=sampling)

    async def query_and_disconnect() -> None:
        asking = asyncio.create_task(embedded._answer(request))
        await asyncio.to_thread(gate.reached.wait, 20)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(query_and_disconnect())
    gate.released.set()
    with embedded.sampler._changed:
        assert embedded.sampler._changed.wait_for(lambda: not embedded.sampler._wave, 20)
    assert gate.calls == 5
