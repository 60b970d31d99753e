"""Runs of agents as episodes: rewards, exports, isolated sessions, and errors."""

import asyncio

import httpx
import openai
import pytest

from areal_core.agent.errors import UnsafeProxy, WrongReward
from areal_core.agent.proxy_server import check_exposure
from tests.agent.agents_under_test import client_of
from tests.agent.conftest import trained_text


async def chat(extra, messages):
    """Request one completion with the client that the run was given."""
    return await client_of(extra).chat.completions.create(model="m", messages=messages)


class Asker:
    """Request `num_turns` completions, each with the answers before it in its messages.

    Returns `reward_of(completion_ids)`.
    """

    def __init__(self, reward_of=lambda ids: 1.0, num_turns: int = 2) -> None:
        self.reward_of, self.num_turns = reward_of, num_turns

    async def run(self, data, **extra):
        messages, ids = [], []
        for turn in range(self.num_turns):
            messages.append({"role": "user", "content": f"{turn}?"})
            reply = await chat(extra, messages)
            messages.append(reply.choices[0].message)
            ids.append(reply.id)
        return self.reward_of(ids)


def text_rows(tokenizer, rows) -> list[str]:
    return [
        tokenizer.decode(ids[mask])
        for ids, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True)
    ]


def test_individual_export_has_a_row_a_call_with_discounted_rewards(episode, scripted_engine, tokenizer):
    rows = episode(Asker(), scripted_engine("a", "b"), turn_discount=0.5)
    assert text_rows(tokenizer, rows) == [
        "<|user|>0?<|end|><|assistant|>a<|end|>",
        "<|user|>0?<|end|><|assistant|>a<|end|><|user|>1?<|end|><|assistant|>b<|end|>",
    ]
    assert trained_text(tokenizer, rows) == ["a<|end|>", "b<|end|>"]
    assert rows["rewards"].tolist() == [0.5, 1.0]


@pytest.mark.parametrize("chat_template_type", ["hf", "concat"])
def test_concat_export_joins_the_turns_of_a_conversation_token_by_token(
    episode, scripted_engine, tokenizer, chat_template_type
):
    rows = episode(
        Asker(),
        scripted_engine("aa", "b"),
        export_style="concat",
        turn_discount=0.5,
        chat_template_type=chat_template_type,
    )
    assert text_rows(tokenizer, rows) == [
        "<|user|>0?<|end|><|assistant|>aa<|end|><|user|>1?<|end|><|assistant|>b<|end|>"
    ]
    assert trained_text(tokenizer, rows) == ["aa<|end|>b<|end|>"]
    mask = rows["loss_mask"][0].bool()
    assert rows["logprobs"][0][mask].tolist() == [-0.125, -0.25, -0.375, -0.125, -0.25]
    assert rows["versions"][0].tolist() == [3 if trained else -1 for trained in mask.tolist()]
    assert rows["rewards"].tolist() == [0.5]  # the reward of the second turn, discounted for the first


def test_concat_prompt_closes_a_turn_that_was_cut_without_training_its_end(
    episode, scripted_engine, tokenizer
):
    rows = episode(Asker(), scripted_engine("a...", "b"), export_style="concat", chat_template_type="concat")
    assert text_rows(tokenizer, rows) == [
        "<|user|>0?<|end|><|assistant|>a...<|end|><|user|>1?<|end|><|assistant|>b<|end|>"
    ]
    assert trained_text(tokenizer, rows) == ["a...b<|end|>"]


@pytest.mark.parametrize(
    ("returned", "error_text"),
    [
        ("good", r"returned 'good' \(str\); expected a number for the last completion"),
        (float("nan"), "returned nan, which is not finite"),
        (None, r"returned 'None' \(NoneType\)"),
        (
            {"chatcmpl-1": 1.0},
            "rewarded 'chatcmpl-1', which is not a completion of this run; it has chatcmpl-",
        ),
        ({}, "returned an empty dict"),
    ],
)
def test_what_is_no_reward_is_refused_with_the_agent_and_the_value(
    episode, scripted_engine, returned, error_text
):
    with pytest.raises(WrongReward, match=f"test_episodes:Asker {error_text}"):
        episode(Asker(lambda ids: returned), scripted_engine("a", "b"))


class Intruder:
    """Try, with its own key, to reward and read the completion of another session.

    It also tries to act as the owner of the proxy.
    """

    async def run(self, data, **extra):
        reply = await chat(extra, [{"role": "user", "content": "?"}])
        if "others" not in data:
            data["hand_over"].append((reply.id, extra["api_key"]))
            return 0.25
        other_id, _ = data["others"][0]
        url, headers = extra["base_url"], {"authorization": f"Bearer {extra['api_key']}"}
        post = extra["http_client"].post
        refusals = [
            await post(
                f"{url}/rl/set_reward", headers=headers, json={"reward": 9, "interaction_id": other_id}
            ),
            await post(
                f"{url}/responses", headers=headers, json={"previous_response_id": other_id, "input": "?"}
            ),
            await post(f"{url}/export_trajectories", headers=headers, json={"session_id": "any"}),
            await post(f"{url}/rl/start_session", headers=headers, json={}),
            await post(f"{url}/rl/set_reward", headers={"x-api-key": "sk-guess"}, json={"reward": 9}),
            await post(f"{url}/chat/completions", headers={}, json={}),
        ]
        data["seen"] += [(reply.status_code, reply.json()["error"]["message"]) for reply in refusals]
        return {other_id: 9.0} if data["reward_other"] else 0.5


@pytest.mark.parametrize("reward_other", [False, True])
def test_one_session_can_neither_reward_nor_read_another(make_workflow, scripted_engine, reward_other):
    workflow, engine, others, seen = make_workflow(Intruder()), scripted_engine("a", "b"), [], []
    first = asyncio.run(workflow.arun_episode(engine, {"hand_over": others}))
    meddling = workflow.arun_episode(engine, {"others": others, "seen": seen, "reward_other": reward_other})
    if reward_other:
        with pytest.raises(WrongReward, match="which is not a completion of this run"):
            asyncio.run(meddling)
    else:
        assert asyncio.run(meddling)["rewards"].tolist() == [0.5]
    assert first["rewards"].tolist() == [0.25]
    assert [status for status, _ in seen] == [404, 404, 401, 401, 401, 401]
    assert "is not a completion of this session" in seen[0][1]
    assert seen[-1][1].startswith("the session key is wrong, or its session has ended")


def test_the_key_of_an_ended_session_opens_nothing(make_workflow, scripted_engine):
    workflow, kept = make_workflow(Intruder()), []
    asyncio.run(workflow.arun_episode(scripted_engine("a"), {"hand_over": kept}))
    (_, key), url = kept[0], f"{workflow.server.base_url}/v1/chat/completions"
    reply = httpx.post(url, headers={"authorization": f"Bearer {key}"}, json={"messages": []})
    assert reply.status_code == 401


class SyncClient:
    """Block the event loop in every call: on the loop of the engine this would deadlock."""

    async def run(self, data, **extra):
        with openai.OpenAI(base_url=extra["base_url"], api_key=extra["api_key"]) as client:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
        return 1.0


def test_an_agent_with_a_synchronous_client_does_not_deadlock(episode, scripted_engine):
    assert episode(SyncClient(), scripted_engine("a"))["rewards"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("host", "key", "error_text"),
    [
        ("0.0.0.0", "areal-admin-key", "would listen on 0.0.0.0, .*admin_api_key is AReaL's default"),
        ("10.1.2.3", "short", "only 5 characters long"),
        ("example.org", "x" * 15, "only 15 characters long"),
    ],
)
def test_a_proxy_that_others_can_reach_wants_a_key_of_its_own(host, key, error_text):
    with pytest.raises(UnsafeProxy, match=error_text):
        check_exposure(host, key)
    check_exposure(host, "k" * 16)
    for loopback in ("127.0.0.1", "::1", "localhost"):
        check_exposure(loopback, key)
