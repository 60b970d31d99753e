"""Attempts with feedback in one row: text, loss mask and reward."""

import asyncio

import pytest

from areal_core.agent.multi_turn import MultiTurnWorkflow
from areal_core.config import GenerationHyperparameters

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
