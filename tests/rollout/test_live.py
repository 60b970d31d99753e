"""Live rollouts: episodes on an event loop, in canonical order, ended by the first exception."""

import asyncio

import pytest
import torch

from areal_core.config import GenerationHyperparameters
from areal_core.rollout.pipeline import Executor
from areal_core.rollout.staleness import StalenessControl
from areal_core.rollout.types import ModelRequest, ModelResponse, Sampling
from areal_core.rollout.workflow import RLVRWorkflow, episode_tensors
from areal_core.testing import ScriptedEngine, make_tiny_tokenizer
from areal_core.trainer.live import LiveRollouts

TOKENIZER = make_tiny_tokenizer()


class Loader:
    """Two prompts per batch, in descending order, so that canonical order is not arrival order."""

    def __init__(self) -> None:
        self.position = 0

    def next_batch(self) -> list[tuple[int, dict]]:
        first, self.position = self.position, self.position + 2
        return [(i, self.row(i)) for i in (first + 1, first)]

    def row(self, prompt_id: int) -> dict:
        return {"messages": [{"role": "user", "content": str(prompt_id)}]}

    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]


class Workflow:
    """Call `body(engine, data)`."""

    def __init__(self, body) -> None:
        self.arun_episode = body


async def one_call(engine, data) -> dict[str, torch.Tensor]:
    prompt = [10 + int(data["messages"][0]["content"])]
    return episode_tensors(await engine.agenerate(ModelRequest(input_ids=prompt, sampling=Sampling())), 0.5)


@pytest.fixture
def live():
    made = []

    def make(body=one_call, engine=None, *, ahead=0, max_concurrent=2, **options) -> LiveRollouts:
        executor = Executor(engine or ScriptedEngine(), StalenessControl(2, max_concurrent, ahead))
        made.append(LiveRollouts(executor, Loader(), Workflow(body), **options))
        return made[-1]

    yield make
    for rollouts in made:
        rollouts.close()


def test_requests_carry_the_name_of_their_episode_and_turn(live):
    async def two_calls(engine, data):
        await one_call(engine, data)
        return await one_call(engine, data)

    engine = ScriptedEngine()
    live(two_calls, engine, n_samples=2).next_batch(0, 0)
    names = sorted(
        tuple(r.metadata[key] for key in ("prompt_id", "sample_id", "turn")) for r in engine.requests
    )
    assert names == [(p, s, t) for p in (0, 1) for s in (0, 1) for t in (0, 1)]


def test_rows_of_one_episode_get_separate_sample_ids(live):
    async def rows_by_prompt(engine, data):
        rows = await one_call(engine, data)
        copies = 1 + int(data["messages"][0]["content"])
        return {key: torch.cat([tensor] * copies) for key, tensor in rows.items()}

    batch = live(rows_by_prompt, n_samples=2).next_batch(0, 0)
    assert list(zip(batch["prompt_id"].tolist(), batch["sample_id"].tolist(), strict=True)) == [
        (0, 0),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
        (1, 3),
    ]


def test_new_weights_are_sent_before_the_version_moves(live):
    class Weights:
        def named_full_tensors(self):
            yield "w", torch.ones(1)

    class Update:
        def send(self, weights, version):
            self.seen = ([(name, t.item()) for name, t in weights], version, engine.version)

        def close(self):
            pass

    engine, update = ScriptedEngine(), Update()
    live(engine=engine, weight_update=update).update_weights(Weights(), 4)
    assert update.seen == ([("w", 1.0)], 4, 0)
    assert engine.version == 4


def test_rlvr_episode_holds_prompt_and_completion_with_masks_logprobs_and_versions():
    messages = [{"role": "user", "content": "1+1"}]
    prompt = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    completion = [*TOKENIZER.encode("2", add_special_tokens=False), TOKENIZER.eos_token_id]
    engine = ScriptedEngine(completions={tuple(prompt): completion}, version=3)
    seen = {}

    async def reward(prompt, completions, prompt_ids, completion_ids, **data) -> float:
        seen.update(prompt=prompt, completions=completions, ids=(prompt_ids, completion_ids), data=data)
        return 0.25

    gconfig = GenerationHyperparameters(n_samples=4, stop_token_ids=[50], max_new_tokens=7)
    workflow = RLVRWorkflow(reward, gconfig, TOKENIZER)
    row = {"messages": messages, "answer": "2"}
    episode = asyncio.run(workflow.arun_episode(engine, row))

    n = len(prompt)
    assert {key: value.tolist() for key, value in episode.items()} == {
        "input_ids": [prompt + completion],
        "attention_mask": [[True] * (n + 2)],
        "loss_mask": [[0] * n + [1, 1]],
        "logprobs": [[0.0] * n + [-1.0, -1.0]],
        "versions": [[-1] * n + [3, 3]],
        "rewards": [0.25],
        "finish_reason": [0],
    }
    assert {key: str(value.dtype).removeprefix("torch.") for key, value in episode.items()} == {
        "input_ids": "int32",
        "attention_mask": "bool",
        "loss_mask": "int32",
        "logprobs": "float32",
        "versions": "int32",
        "rewards": "float32",
        "finish_reason": "int32",
    }
    assert seen == {
        "prompt": "<|user|>1+1<|end|><|assistant|>",
        "completions": "2",
        "ids": (prompt, completion),
        "data": row,
    }
    sent = engine.requests[0].sampling
    assert sorted({TOKENIZER.eos_token_id, TOKENIZER.pad_token_id, 50}) == sent.stop_token_ids
    assert (sent.n_samples, sent.max_new_tokens) == (1, 7)


@pytest.mark.parametrize(("reason", "code"), [("stop", 0), ("length", 1), ("abort", 2)])
def test_finish_reason_is_kept(reason, code):
    response = ModelResponse(
        input_tokens=[1],
        output_tokens=[2],
        output_logprobs=[-1.0],
        output_versions=[0],
        stop_reason=reason,
    )
    assert episode_tensors(response, 0.0)["finish_reason"].tolist() == [code]
