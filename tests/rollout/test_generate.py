"""Sampling with a KV cache: against plain forwards, and the distribution of each option."""

import asyncio
import threading

import pytest
import torch

from areal_core.embedded.engine import EmbeddedEngine, ReplicaUpdate
from areal_core.embedded.generate import draw
from areal_core.embedded.replica import Replica
from areal_core.rollout.types import ModelRequest, ModelResponse, Sampling
from tests.rollout.sampled import logprobs_of

PROMPTS = [[7], [9, 8, 7], list(range(5, 25)), [30, 31], [50] * 12, [60, 61, 62, 63]]


@pytest.fixture(scope="module")
def replica(tiny_model) -> Replica:
    return Replica(str(tiny_model), torch.float32, torch.device("cpu"))


def request(row: int, sampling: Sampling) -> ModelRequest:
    return ModelRequest(
        input_ids=PROMPTS[row], sampling=sampling, metadata={"prompt_id": row, "sample_id": 0}
    )


def sample(replica, requests, *, seed=0, version=0, end_token_ids=(), **options) -> list[ModelResponse]:
    engine = EmbeddedEngine(
        replica, replica.model.config.vocab_size, seed=seed, end_token_ids=end_token_ids, **options
    )
    engine.set_version(version)

    async def work() -> list[ModelResponse]:
        return await asyncio.gather(*(engine.agenerate(r) for r in requests))

    return asyncio.run(work())


def test_logprobs_equal_those_of_a_forward_without_cache_or_padding(replica):
    lengths = [1, 3, 12, 7, 12, 2]  # rows end at different times: the batch shrinks twice
    requests = [request(i, Sampling(max_new_tokens=n, temperature=0.7)) for i, n in enumerate(lengths)]
    for response, length in zip(sample(replica, requests, version=5), lengths, strict=True):
        assert len(response.output_tokens) == length
        assert response.stop_reason == "length"
        assert response.output_versions == [5] * length
        expected = logprobs_of(replica.model, response.input_tokens, response.output_tokens, 0.7)
        torch.testing.assert_close(torch.tensor(response.output_logprobs), expected, atol=1e-5, rtol=0)


def test_what_a_row_samples_does_not_depend_on_its_neighbours_or_their_order(replica):
    requests = [request(i, Sampling(max_new_tokens=8)) for i in range(6)]
    torch.manual_seed(1)
    together = sample(replica, requests)
    torch.manual_seed(2)
    reversed_order = sample(replica, requests[::-1])[::-1]
    alone = [sample(replica, [r])[0] for r in requests]
    divided = sample(replica, requests, max_rows=4)
    assert reversed_order == together  # arrival order changes nothing, not even the last bit
    assert [r.output_tokens for r in alone] == [r.output_tokens for r in together]
    assert [r.output_tokens for r in divided] == [r.output_tokens for r in together]


def test_greedy_takes_the_likeliest_token_with_the_logprob_of_temperature_one(replica):
    (response,) = sample(replica, [request(2, Sampling(max_new_tokens=5, greedy=True, temperature=0.3))])
    with torch.no_grad():
        logits = replica.model(torch.tensor([response.input_tokens + response.output_tokens])).logits[
            0, -6:-1
        ]
    assert response.output_tokens == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor(response.output_logprobs), expected, atol=1e-5, rtol=0)


def test_stop_token_ends_the_row_and_is_kept(replica):
    (free,) = sample(replica, [request(1, Sampling(max_new_tokens=10))])
    stop = free.output_tokens[4]
    first = free.output_tokens.index(stop)
    (stopped,) = sample(replica, [request(1, Sampling(max_new_tokens=10, stop_token_ids=[stop]))])
    (ended,) = sample(replica, [request(1, Sampling(max_new_tokens=10))], end_token_ids=(stop,))
    (ignored,) = sample(
        replica, [request(1, Sampling(max_new_tokens=10, ignore_eos=True))], end_token_ids=(stop,)
    )
    assert stopped.output_tokens == ended.output_tokens == free.output_tokens[: first + 1]
    assert stopped.stop_reason == "stop"
    assert ignored.output_tokens == free.output_tokens


PROBS = torch.tensor([[0.1, 0.4, 0.2, 0.3]])


@pytest.mark.parametrize(
    ("top_k", "top_p", "allowed"),
    [
        (4, 1.0, {0, 1, 2, 3}),
        (2, 1.0, {1, 3}),
        (1, 1.0, {1}),
        (4, 0.6, {1, 3}),
        (4, 0.75, {1, 2, 3}),
        (2, 0.3, {1}),
    ],
)
def test_top_k_and_top_p_keep_exactly_the_nucleus_in_proportion(top_k, top_p, allowed):
    uniforms = torch.linspace(0, 1, 10001, dtype=torch.float64)[:-1]
    many = PROBS.expand(len(uniforms), -1)
    drawn = draw(many, uniforms, torch.full((len(uniforms),), top_k), torch.full((len(uniforms),), top_p))
    counts = torch.bincount(drawn, minlength=4) / len(uniforms)
    kept = torch.tensor([p if i in allowed else 0.0 for i, p in enumerate(PROBS[0].tolist())])
    torch.testing.assert_close(counts, kept / kept.sum(), atol=1e-3, rtol=0)


def test_a_token_of_probability_zero_is_never_drawn():
    probs = torch.tensor([[0.0, 1.0, 0.0]])
    for uniform in (0.0, 0.5, 1 - 1e-16):
        uniforms = torch.tensor([uniform], dtype=torch.float64)
        assert draw(probs, uniforms, torch.tensor([3]), torch.tensor([1.0])).item() == 1


def test_a_failing_forward_reaches_every_request(replica):
    def broken(*args):
        raise RuntimeError("no memory")

    engine = EmbeddedEngine(broken, 10)

    async def work() -> list:
        return await asyncio.gather(
            *(engine.agenerate(request(i, Sampling(max_new_tokens=2))) for i in range(3)),
            return_exceptions=True,
        )

    assert [str(e) for e in asyncio.run(work())] == ["no memory"] * 3


def test_updated_weights_are_sampled_from(replica, tiny_model):
    other = Replica(str(tiny_model), torch.float32, torch.device("cpu"))
    wanted = sample(other, [request(0, Sampling(max_new_tokens=8))])
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(3.0)
    assert sample(other, [request(0, Sampling(max_new_tokens=8))]) != wanted
    engine = EmbeddedEngine(other, 10)
    ReplicaUpdate(other, engine).send(replica.model.named_parameters(), version=1)
    assert engine.version == 1
    assert sample(other, [request(0, Sampling(max_new_tokens=8))]) == wanted


def test_a_weight_update_waits_for_the_running_batch_and_the_event_loop_does_not():
    started, may_end = threading.Event(), threading.Event()

    def forward(input_ids, attention_mask, position_ids, cache):
        started.set()
        may_end.wait(10)
        return torch.zeros(len(input_ids), 4)

    class Model:
        def load(self, weights):
            assert may_end.is_set()

    engine = EmbeddedEngine(forward, 4)

    async def work() -> list[int]:
        first = asyncio.create_task(engine.agenerate(request(0, Sampling(max_new_tokens=1))))
        await asyncio.to_thread(started.wait, 10)
        update = asyncio.create_task(asyncio.to_thread(ReplicaUpdate(Model(), engine).send, iter([]), 1))
        await asyncio.sleep(0.05)  # the loop turns while a batch is generated
        assert not first.done()
        assert not update.done()
        may_end.set()
        await update
        second = await engine.agenerate(request(1, Sampling(max_new_tokens=1)))
        return [(await first).output_versions, second.output_versions]

    assert asyncio.run(work()) == [[0], [1]]
