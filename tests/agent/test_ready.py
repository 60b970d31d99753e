"""The agents that ship, found by AReaL's names, and attempts with feedback in one row."""

import asyncio

import pytest

from areal_core.agent.multi_turn import MultiTurnWorkflow
from areal_core.agent.ready.math_agents import completion_options
from areal_core.config import GenerationHyperparameters

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


MESSAGES = [{"role": "user", "content": "1+1"}]


async def is_two(prompt, completions, prompt_ids, completion_ids, **row) -> float:
    return float(completions == row["answer"])


def attempts(tokenizer, engine, max_tokens: int = 512, **options):
    gconfig = GenerationHyperparameters(max_new_tokens=16, max_tokens=max_tokens)
    workflow = MultiTurnWorkflow(is_two, gconfig, tokenizer, turn_discount=0.5, feedback="no", **options)
    return asyncio.run(workflow.arun_episode(engine, {"messages": MESSAGES, "answer": "2"}))


@pytest.mark.parametrize(
    ("lines", "decoded", "trained", "reward"),
    [
        (["2"], "<|user|>1+1<|end|><|assistant|>2<|end|>", "2<|end|>", 1.0),
        (
            ["3", "2"],
            "<|user|>1+1<|end|><|assistant|>3<|end|><|user|>no<|end|><|assistant|>2<|end|>",
            "3<|end|>2<|end|>",
            0.5,
        ),
        (
            ["3...", "4", "5"],  # the first attempt is cut: its turn is closed outside the loss
            "<|user|>1+1<|end|><|assistant|>3...<|end|><|user|>no<|end|><|assistant|>4<|end|><|user|>no<|end|><|assistant|>5<|end|>",
            "3...4<|end|>5<|end|>",
            0.0,
        ),
    ],
)
def test_attempts_continue_until_one_is_right_or_none_is_left(
    tokenizer, scripted_engine, lines, decoded, trained, reward
):
    engine = scripted_engine(*lines)
    row = attempts(tokenizer, engine, max_turns=3)
    mask = row["loss_mask"][0].bool()
    assert tokenizer.decode(row["input_ids"][0]) == decoded
    assert tokenizer.decode(row["input_ids"][0][mask]) == trained
    assert row["rewards"].tolist() == [reward]
    assert engine.lines == []
    assert row["logprobs"][0][~mask].abs().sum() == 0
    assert row["versions"][0].tolist() == [3 if trained else -1 for trained in mask.tolist()]


def test_a_row_too_long_for_another_attempt_ends(tokenizer, scripted_engine):
    row = attempts(tokenizer, scripted_engine("3", "unused"), max_tokens=12, max_turns=5)
    assert tokenizer.decode(row["input_ids"][0]) == "<|user|>1+1<|end|><|assistant|>3<|end|>"
