"""A reward model on a real SGLang server on the CPU scores as the trainer's own engine does."""

import asyncio

import pytest
from transformers import AutoTokenizer

from areal_core.errors import RewardError
from areal_core.reward.served import RewardServer
from tests.trainer import reward_model as program

pytestmark = [pytest.mark.long, pytest.mark.sglang]


def test_scores_of_a_real_server_are_those_of_transformers(tiny_model, sglang, tmp_path):
    scorer = program.make_reward_model(tiny_model, tmp_path / "scorer")
    rows = [([5, 9, 30], [40, 41, 1]), ([7] * 40, list(range(10, 90))), ([8], [1])]
    with sglang(scorer, "--is-embedding", context_length=512, max_total_tokens=None) as server:
        reward_fn = RewardServer(f"http://{server.server.address}/classify")

        async def score_all():
            return await asyncio.gather(*(reward_fn("", "", prompt, reply) for prompt, reply in rows))

        found = asyncio.run(score_all())
        by_template = RewardServer(reward_fn.url, str(scorer))
        question = [{"role": "user", "content": "1+1="}]
        rendered = asyncio.run(by_template("", "2", [], [], messages=question))
        with pytest.raises(RewardError, match="answered 400"):
            asyncio.run(reward_fn("", "", [1] * 600, [2]))
    tokenizer = AutoTokenizer.from_pretrained(scorer)
    conversation = [*question, {"role": "assistant", "content": "2"}]
    texts = [prompt + reply for prompt, reply in rows]
    texts.append(tokenizer.apply_chat_template(conversation, return_dict=False))
    expected = program.scores_of(scorer, texts).tolist()
    assert max(expected) - min(expected) > 0.1
    assert [*found, rendered] == pytest.approx(expected, abs=1e-4)
