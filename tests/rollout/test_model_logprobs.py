"""Log-probs of the model for tokens that a grammar, a penalty or a temperature has sampled."""

import asyncio
import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_core.embedded.engine import EmbeddedEngine
from areal_core.embedded.replica import Replica
from areal_core.launch.sglang_process import SGLangServer
from areal_core.rollout.types import ModelRequest, ModelResponse, Sampling
from areal_core.servers.server import Server
from tests.rollout.sampled import ask, logprobs_of, with_client

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]})


def generate(server: Server, sampling: Sampling, prompt: list[int]) -> ModelResponse:
    return ask([server], [ModelRequest(input_ids=prompt, sampling=sampling)])[0]


def masking(*versions: str):
    """Return a `spoil` that leaves log-probs of 0, as a grammar does, in replies of these versions."""
    left = list(versions)

    def spoil(reply):
        meta = reply["meta_info"]
        meta["weight_version"] = left.pop(0) if left else meta["weight_version"]
        for entry in meta.get("output_token_logprobs", ()):
            entry[0] = 0.0
        return reply

    return spoil


CONSTRAINED = Sampling(max_new_tokens=3, server_only={"json_schema": SCHEMA}, model_logprobs=True)


def test_tokens_of_a_grammar_are_scored_by_the_same_server(start_fake):
    fake = start_fake()
    fake.spoil = masking()
    response = generate(fake.server, CONSTRAINED, [5, 6])
    assert response.output_tokens == [7, 8, 9]
    assert response.output_logprobs == [-0.07, -0.08, -0.09]
    assert response.output_versions == [0, 0, 0]
    (_, sampled), (_, scored) = fake.calls
    assert sampled["sampling_params"]["json_schema"] == SCHEMA
    assert (scored["input_ids"], scored["logprob_start_len"]) == ([5, 6, 7, 8, 9], 1)
    assert scored["sampling_params"]["max_new_tokens"] == 0


def test_a_completion_that_other_weights_would_score_is_sampled_again(start_fake):
    fake = start_fake()
    fake.spoil = masking("3", "4", "4", "4")
    response = generate(fake.server, CONSTRAINED, [5, 6])
    assert [body["sampling_params"]["max_new_tokens"] for _, body in fake.calls] == [3, 0, 3, 0]
    assert response.output_versions == [4, 4, 4]
    assert response.output_logprobs == [-0.07, -0.08, -0.09]


def test_a_server_that_scores_positive_numbers_is_quarantined_and_another_serves(start_fake):
    wrong, right = start_fake(), start_fake()
    right.spoil = masking()

    def positive(reply):
        for entry in reply["meta_info"].get("input_token_logprobs", ()):
            entry[0] = 1.0
        return masking()(reply)

    wrong.spoil = positive

    async def body(client):
        request = ModelRequest(input_ids=[5, 6], sampling=CONSTRAINED)
        responses = [await client.agenerate(request) for _ in range(2)]
        return responses[-1], list(client.router.servers)

    response, servers = with_client([wrong, right], body, retry_delay_s=0.01)
    assert servers == [right.server]
    assert response.output_logprobs == [-0.07, -0.08, -0.09]


def of_model(tiny_model, response: ModelResponse) -> torch.Tensor:
    """Return the log-probs of the sampled tokens by Transformers, [tokens]."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    return logprobs_of(model, response.input_tokens, response.output_tokens)


def test_the_embedded_engine_reports_the_models_own_logprobs_at_another_temperature(tiny_model):
    replica = Replica(str(tiny_model), torch.float32, torch.device("cpu"))

    def sample(model_logprobs: bool) -> ModelResponse:
        sampling = Sampling(
            max_new_tokens=6,
            temperature=0.25,
            min_new_tokens=6,
            stop_token_ids=[1],
            model_logprobs=model_logprobs,
        )
        request = ModelRequest(input_ids=[9, 20, 31], sampling=sampling, metadata={"prompt_id": 0})
        return asyncio.run(EmbeddedEngine(replica, replica.model.config.vocab_size).agenerate(request))

    plain, scored = sample(False), sample(True)
    assert plain.output_tokens == scored.output_tokens
    expected = of_model(tiny_model, scored)
    torch.testing.assert_close(torch.tensor(scored.output_logprobs), expected, atol=1e-5, rtol=0)
    assert (torch.tensor(plain.output_logprobs) - expected).abs().max() > 0.1


@pytest.mark.sglang
@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"server_only": {"json_schema": SCHEMA}},
        {"server_only": {"presence_penalty": 1.5, "logit_bias": {"20": 3.0}}},
        {"temperature": 0.5},
    ],
    ids=lambda options: "+".join([*options.get("server_only", ()), *options.keys()]),
)
def test_a_real_server_scores_what_transformers_scores(sglang_server: SGLangServer, tiny_model, options):
    prompt = [9, 20, 31, 42]
    sampling = Sampling(max_new_tokens=24, stop_token_ids=[1], **options)
    scoring = replace(sampling, model_logprobs=True)
    reported, scored = (generate(sglang_server.server, law, prompt) for law in (sampling, scoring))
    torch.testing.assert_close(
        torch.tensor(scored.output_logprobs), of_model(tiny_model, scored), atol=5e-6, rtol=0
    )
    # What SGLang reports with the tokens is after the grammar, the penalties and the temperature.
    assert (torch.tensor(reported.output_logprobs) - of_model(tiny_model, reported)).abs().max() > 0.1
