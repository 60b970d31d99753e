"""The tree of calls of an episode, why a prefix is broken, and its transcript in a record."""

from pathlib import Path

import numpy as np
import pytest

from areal_core.agent.agents import load_agent
from areal_core.agent.conversation import BRANCHES
from areal_core.agent.episode_stats import describe_broken, log_episodes
from areal_core.rollout.episodes import assemble
from areal_core.telemetry.stats import Stats
from recorder import open_record, verify
from recorder.integrity.contents import calls_problems
from tests.agent.agents_under_test import client_of
from tests.agent.conftest import CALLS_WEATHER, TOOL, record_step, trained_text

TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
CALLS_WEATHER_SPACED = '<tool_call>{"name":  "weather", "arguments": {"city":"Oslo"}}</tool_call>'


class Script:
    """Send these prompts, in which a number stands for an answer: -1 for the last one.

    Returns `reward`, or `reward(ids)` of the completions.
    """

    def __init__(self, *prompts, reward=1.0, tools=()) -> None:
        self.prompts, self.reward, self.tools = prompts, reward, tools

    async def run(self, data, **extra):
        client = client_of(extra)
        answers, ids = [], []
        for number, prompt in enumerate(self.prompts):
            messages = [answers[message] if isinstance(message, int) else message for message in prompt]
            options = {"tools": [self.tools[number]]} if self.tools else {}
            answer = await client.chat.completions.create(model="m", messages=messages, **options)
            answers.append(answer.choices[0].message)
            ids.append(answer.id)
        return self.reward(ids) if callable(self.reward) else self.reward


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def system(text: str) -> dict:
    return {"role": "system", "content": text}


S, Q, Q1, Q2 = system("s"), user("q"), user("1"), user("2")
# The second call continues the first; the third starts from a summary of both.
COMPACTION = ([S, Q], [S, Q, -1, Q1], [S, user("so far"), Q2])


def tree_of(rows) -> list[tuple[str, int]]:
    """(branch, parent turn) of each row."""
    pairs = zip(rows["branch"].tolist(), rows["parent_turn"].tolist(), strict=True)
    return [(BRANCHES[branch], parent) for branch, parent in pairs]


def turns_of(rows) -> list[list[int]]:
    """The calls of each row, those in the loss mask of another row included."""
    return [[turn - 1 for turn in row.unique().tolist() if turn] for row in rows["turns"]]


@pytest.mark.parametrize(("turn_discount", "returns"), [(1.0, [1.0, 1.0, 1.0]), (0.5, [0.25, 0.5, 1.0])])
def test_the_calls_before_a_compaction_are_credited_with_the_reward_after_it(
    episode, scripted_engine, turn_discount, returns
):
    lines, options = ("a", "b", "c"), {"turn_discount": turn_discount}
    rows = episode(Script(*COMPACTION), scripted_engine(*lines), export_style="concat", **options)
    assert turns_of(rows) == [[0, 1], [2]]
    assert rows["rewards"].tolist() == [returns[0], returns[2]]
    assert tree_of(rows) == [("root", -1), ("compacted", 1)]
    per_call = episode(Script(*COMPACTION), scripted_engine(*lines), export_style="individual", **options)
    assert per_call["rewards"].tolist() == returns
    assert tree_of(per_call) == [("root", -1), ("continued", 0), ("compacted", 1)]


def test_a_turn_of_two_branches_is_in_the_loss_mask_of_the_first_row_only(
    episode, scripted_engine, tokenizer
):
    agent = Script([Q], [Q, -1, Q1], [Q, -2, Q2], [Q, -3, Q1, -2, Q2])
    rows = episode(agent, scripted_engine("aa", "b", "c", "d"), export_style="concat")
    assert turns_of(rows) == [[0, 1, 3], [0, 2]]
    assert trained_text(tokenizer, rows) == ["aa<|end|>b<|end|>d<|end|>", "c<|end|>"]
    shared = (rows["turns"] == 1) & (rows["loss_mask"] == 0)
    assert shared.sum(1).tolist() == [0, 3]
    assert rows["logprobs"][shared].tolist() == [0.0, 0.0, 0.0]
    assert rows["versions"][shared].tolist() == [-1, -1, -1]
    assert tree_of(rows) == [("root", -1), ("fork", 0)]


@pytest.mark.parametrize(
    ("prompts", "lines", "options", "expected"),
    [
        pytest.param(
            ([Q], [Q, -1, Q1]), ("<think>hm</think>a", "b"), {}, ("reasoning", 0), id="reasoning"
        ),
        pytest.param(
            ([Q], [Q, -1, Q1]), (CALLS_WEATHER_SPACED, "b"), {"tools": (TOOL, TOOL)}, ("tool_call", 0),
            id="tool call",
        ),
        pytest.param(
            ([Q], [Q, -1, Q1]), ("a", "b"), {"tools": (TOOL, TIME)}, ("tools_changed", 0), id="tools"
        ),
        pytest.param(
            ([S, Q], [system("t"), Q, -1, Q1]), ("a", "b"), {}, ("system_rewritten", 0), id="system prompt"
        ),
        pytest.param(
            ([Q], [Q, {"role": "assistant", "content": "A"}, Q1]), ("a", "b"), {}, ("edited", 0), id="edited"
        ),
        pytest.param(([Q], [Q]), ("a", "b"), {}, ("fork", -1), id="sampled twice"),
        pytest.param(([Q], [Q1]), ("a", "b"), {}, ("separate", -1), id="separate"),
        pytest.param(
            ([S, Q], [system("helper"), Q1]), (CALLS_WEATHER, "b"), {"tools": (TOOL, TIME)}, ("sub_agent", 0),
            id="sub-agent",
        ),
    ],
)  # fmt: skip
def test_a_row_that_starts_again_names_the_call_it_continues_and_the_reason(
    episode, scripted_engine, prompts, lines, options, expected
):
    rows = episode(Script(*prompts, **options), scripted_engine(*lines), export_style="concat")
    assert tree_of(rows) == [("root", -1), expected]
    assert rows["rewards"].tolist() == [1.0, 1.0]


def exported(episodes: dict[int, list]) -> dict[str, float]:
    """Statistics of a batch from {prompt: rows of its episodes}."""
    stats = Stats()
    with stats.scope("rollout"):
        log_episodes(stats, assemble(list(episodes.items())))
    return stats.export()


def test_statistics_have_the_share_of_broken_prefixes_and_the_warning_its_commonest_reason(
    episode, scripted_engine
):
    broken = episode(Script(*COMPACTION), scripted_engine("a", "b", "c"), export_style="concat")
    exact = episode(Script([Q], [Q, -1, Q1]), scripted_engine("a", "b"), export_style="concat")
    separate = episode(Script([Q], [Q1]), scripted_engine("a", "b"), export_style="concat")
    found = exported({7: [broken, exact], 8: [broken, separate]})
    # Calls that continue an earlier one: two and one of prompt 7, two of prompt 8.
    assert found["rollout/n_continuing_calls"] == 5
    assert found["rollout/broken_prefix"] == pytest.approx(2 / 5)
    assert found["rollout/broken_prefix/compacted"] == pytest.approx(2 / 5)
    assert found["rollout/broken_prefix/reasoning"] == 0
    assert found["rollout/n_episodes"] == 4
    assert found["rollout/episode_failed"] == 0
    batch = assemble([(7, [broken, exact]), (8, [broken, separate])])
    assert batch["episode"].tolist() == [0, 0, 1, 0, 0, 1, 1]
    assert describe_broken(batch) == (
        "2 of 5 calls that continue an earlier one do not begin with its exact tokens, so a row ends there: "
        "2 because earlier messages were left out or summarised, most often in turn 2 (statistic rollout/broken_prefix)"
    )
    assert describe_broken(assemble([(7, [exact])])) is None


@pytest.mark.parametrize(
    ("prompts", "kept"),
    [
        (([Q], [Q], [Q, 1, Q1]), [[1], [2]]),  # the second answer was used
        (([Q], [Q], [Q, 0, Q1]), [[0], [2]]),  # the first one was
        (([Q], [Q]), [[1]]),  # nothing follows: the last one
        (([Q], [Q1], [Q]), [[1], [2]]),
    ],
)
def test_an_answer_that_a_client_did_not_wait_for_is_left_out(episode, scripted_engine, prompts, kept):
    agent, lines = Script(*prompts), ("a", "b", "c")[: len(prompts)]
    assert turns_of(episode(agent, scripted_engine(*lines), drop_retry_orphans=True)) == kept
    assert len(turns_of(episode(agent, scripted_engine(*lines)))) == len(prompts)


EXAMPLES = Path(__file__).parents[2] / "examples"
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "7 * 6"}}</tool_call>'
DATA = {"messages": [{"role": "user", "content": "7 boxes of 6?"}], "answer": "#### 42"}


@pytest.fixture
def batch(episode, scripted_engine):
    """A prompt whose first episode calls a tool, in two rows, and whose second does not."""
    agent = load_agent(f"{EXAMPLES}/tool_agent.py:CalculatorAgent")
    first = episode(agent, scripted_engine(CALL, "It is 42."), DATA)
    second = episode(agent, scripted_engine("41"), DATA)
    return assemble([(5, [first, second])])


def test_a_record_has_tool_calls_and_tool_results(batch, tmp_path):
    record = record_step(tmp_path / "record", batch)
    first, second = open_record(record).step(0).calls(0)
    assert (first.prompt_id, first.episode, second.prompt_id, second.episode) == (5, 0, 5, 1)
    assert first.agent.name.endswith(":CalculatorAgent")
    assert first.data == DATA
    assert first.failure is None
    call, answered = first.calls
    assert (call.turn, call.after, call.messages) == (0, None, (DATA["messages"][0],))
    assert [tool["function"]["name"] for tool in call.tools] == ["calculate"]
    assert call.answer["tool_calls"] == [{"name": "calculate", "arguments": '{"expression": "7 * 6"}'}]
    assert (answered.turn, answered.after, answered.tools) == (1, 0, None)
    assert answered.messages == ({"role": "tool", "content": "42"},)
    assert (answered.answer["content"], answered.finish, answered.reward) == ("It is 42.", "stop", 1.0)
    assert [call.reward for call in second.calls] == [0.0]
    assert verify(record).intact


def test_an_episode_without_rows_contradicts_the_batch(batch, tmp_path):
    step = open_record(record_step(tmp_path / "record", batch)).step(0)
    arrays = step.batch(0)
    assert not list(calls_problems(step, 0, arrays))
    found = list(calls_problems(step, 0, arrays | {"episode": np.zeros(len(arrays["episode"]))}))
    assert [what for _, what in found] == ["has episode 1 of prompt 5, which has no row"]
