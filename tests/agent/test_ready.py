"""The agents that ship, found by AReaL's names."""

import asyncio

import pytest

from areal_core.agent.ready.math_agents import completion_options

PLACE = "areal.workflow.openai.math_agent"
ROW = {"messages": [{"role": "user", "content": "2+2="}], "answer": "4"}


def test_the_math_agent_is_paid_for_the_right_answer(make_workflow, scripted_engine):
    workflow = make_workflow(f"{PLACE}.MathAgent", agent_kwargs={"temperature": 0.5, "max_tokens": 99})
    rows = [asyncio.run(workflow.arun_episode(scripted_engine(said), ROW)) for said in ("4", "5")]
    assert [row["rewards"].tolist() for row in rows] == [[1.0], [0.0]]


def test_the_agent_of_several_turns_stops_at_the_right_answer(make_workflow, scripted_engine):
    workflow = make_workflow(f"{PLACE}.MultiTurnMathAgent", agent_kwargs={"max_turns": 3}, turn_discount=0.0)
    engine = scripted_engine("5", "4", "4")
    assert asyncio.run(workflow.arun_episode(engine, ROW))["rewards"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_tokens": 9}, {"max_tokens": 9}),
        ({"max_new_tokens": 5, "max_tokens": 9, "top_p": 1.0}, {"max_completion_tokens": 5, "top_p": 1.0}),
        ({"max_completion_tokens": 4, "max_new_tokens": 5}, {"max_completion_tokens": 4}),
    ],
)
def test_the_length_of_a_completion_has_one_name(given, expected):
    assert completion_options(given) == expected
