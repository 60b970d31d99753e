"""A generative judge: its text, its score, its journal, and what happens without a score."""

import asyncio

import pytest
from aiohttp import web

from areal_core.errors import RewardError
from areal_core.reward.served import RewardServer
from areal_core.rollout.episodes import EpisodeEngine
from areal_core.rollout.http_thread import HttpThread
from areal_core.rollout.judge import JournalJudge, JudgedWorkflow, ServerJudge, filled
from areal_core.rollout.judge_journal import read_calls
from areal_core.rollout.types import Sampling
from areal_core.testing import ScriptedEngine, make_tiny_tokenizer

ROW = {"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}
SAMPLING = Sampling(max_new_tokens=8)


class Replies:
    """A judge that gives prepared replies, the last one again and again."""

    def __init__(self, *replies):
        self.replies, self.texts = replies, []

    async def reply(self, engine, text, attempt):
        self.texts.append(text)
        return self.replies[min(len(self.texts), len(self.replies)) - 1]


def run(judge, **options):
    """Run one episode; return its workflow and its row."""
    tokenizer = make_tiny_tokenizer()
    prompt = tuple(
        tokenizer.apply_chat_template(ROW["messages"], add_generation_prompt=True, return_dict=False)
    )
    engine = ScriptedEngine({prompt: tokenizer.encode("2")}, vocabulary_size=len(tokenizer))
    workflow = JudgedWorkflow(SAMPLING, tokenizer, judge, **options)
    return workflow, asyncio.run(workflow.arun_episode(EpisodeEngine(engine, 7, 1), dict(ROW)))


def test_the_last_score_of_the_reply_is_the_reward():
    judge = Replies("Score: 3 would be low.\nScore: 8.5")
    workflow, row = run(judge, template="{prompt}{completion} is {answer}; {other}")
    assert judge.texts == ["1+1=2 is 2; {other}"]
    assert row["rewards"].tolist() == row["scores.judge"].tolist() == [8.5]
    assert row["scores.judge_unparsed"].tolist() == [0]
    assert workflow.counts == {"scored": 1}


@pytest.mark.parametrize("reply", ["", "I like it", "Score: 11", "Score: -1", "Score: nan", "Score: ten"])
def test_a_reply_without_a_score_is_counted_and_never_becomes_a_number(reply, tmp_path, caplog):
    workflow, row = run(Replies(reply, reply, "score = 10"))
    assert row["rewards"].tolist() == [10]
    assert row["scores.judge_unparsed"].tolist() == [2]
    assert workflow.counts == {"unparsed": 2, "scored": 1}
    workflow, row = run(Replies(reply), max_attempts=2, journal=tmp_path)
    assert row is None
    assert workflow.counts == {"unparsed": 2, "left_out": 1}
    assert [(call.reply, call.score) for call in read_calls(tmp_path / "7.jsonl")] == [(reply, None)] * 2
    assert "prompt 7, sample 1 no score in 2 replies" in caplog.text


def test_a_completion_cannot_fill_in_fields_of_the_row():
    assert filled("{completion} {answer} {x}", {"completion": "{answer}", "answer": "2"}) == "{answer} 2 {x}"


def test_a_journal_answers_for_the_judge_as_long_as_the_texts_are_the_same(tmp_path):
    _, first = run(Replies("no", "Score: 4"), journal=tmp_path / "journal")
    judge = JournalJudge(tmp_path / "journal")
    _, again = run(judge, journal=tmp_path / "again")
    assert {key: value.tolist() for key, value in again.items()} == {
        key: value.tolist() for key, value in first.items()
    }
    assert (tmp_path / "again/7.jsonl").read_text() == (tmp_path / "journal/7.jsonl").read_text()
    with pytest.raises(RewardError, match=r"attempt 0 asked 'You grade.* and now asks '2'"):
        run(judge, template="{completion}")
    with pytest.raises(RewardError, match="no call of prompt 7, sample 1, attempt 2"):
        run(judge, pattern="(never)")
    (tmp_path / "journal/7.jsonl").write_text('{"reply": 1}\n')
    with pytest.raises(RewardError, match=r"7.jsonl, line 1 is not a judge's call: expected attempt"):
        run(JournalJudge(tmp_path / "journal"))


@pytest.fixture
def server():
    """A server whose `/classify` and chat completions answer once with 503, then with a score."""
    requests = []

    async def answer(request):
        requests.append((request.path, await request.json(), request.headers.get("Authorization")))
        if len(requests) == 1:
            return web.Response(status=503, text="loading")
        if request.path == "/bad":
            return web.Response(status=400, text="no such model")
        if request.path == "/classify":
            return web.json_response({"embedding": [0.25], "meta_info": {}})
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "Score: 6"}}]})

    application = web.Application()
    application.router.add_post("/{path:.*}", answer)
    thread = HttpThread(application, "served rewards")
    yield f"http://127.0.0.1:{thread.port}", requests
    thread.close()


def test_a_judge_behind_an_api_is_asked_again_when_it_is_busy(server, monkeypatch):
    url, requests = server
    monkeypatch.setenv("JUDGE_KEY", "k")
    judge = ServerJudge(f"{url}/v1/", "big", {"max_tokens": 9}, api_key_variable="JUDGE_KEY")
    _, row = run(judge, template="{completion}?")
    assert row["rewards"].tolist() == [6]
    sent = {"model": "big", "messages": [{"role": "user", "content": "2?"}], "max_tokens": 9}
    assert requests == [("/v1/chat/completions", sent, "Bearer k")] * 2


def test_a_served_reward_model_scores_the_tokens_or_its_own_rendering(server, tiny_model, tmp_path):
    url, requests = server
    arguments = ("1+1=", "2", [1, 2], [3])
    assert asyncio.run(RewardServer(f"{url}/classify")(*arguments, **ROW)) == 0.25
    assert asyncio.run(RewardServer(f"{url}/classify", str(tiny_model))(*arguments, **ROW)) == 0.25
    conversation = [*ROW["messages"], {"role": "assistant", "content": "2"}]
    rendered = make_tiny_tokenizer().apply_chat_template(conversation, return_dict=False)
    assert [body for _, body, _ in requests[1:]] == [{"input_ids": [1, 2, 3]}, {"input_ids": rendered}]
    with pytest.raises(RewardError, match="answered 400: no such model"):
        asyncio.run(RewardServer(f"{url}/bad")(*arguments, **ROW))
    with pytest.raises(RewardError, match="expected an object whose embedding is one finite number"):
        asyncio.run(RewardServer(f"{url}/other")(*arguments, **ROW))
    bare = make_tiny_tokenizer()
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    with pytest.raises(RewardError, match=r"cannot render the conversation: .*chat_template is not set"):
        asyncio.run(RewardServer(f"{url}/classify", str(tmp_path))(*arguments, **ROW))
    with pytest.raises(RewardError, match="is 'host:1'; give one such as"):
        RewardServer("host:1")
