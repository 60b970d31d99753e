"""The examples of conversations, trained on a tiny model.

The calculator runs on an engine with scripted answers.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from areal_core.agent.agents import load_agent
from areal_core.environment import DETERMINISTIC
from recorder import open_record
from tests.forks import run_forked

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = (
    "allocation_mode=embedded|fsdp:d1",
    "device=cpu",
    "total_train_steps=1",
    "train_dataset.path=arithmetic",
    "train_dataset.dataset_kwargs={num_rows: 8}",
    "train_dataset.batch_size=2",
    "gconfig.n_samples=2",
    "gconfig.max_new_tokens=6",
    "gconfig.max_tokens=400",
    "actor.dtype=float32",
    "actor.gradient_checkpointing=false",
    "actor.weight_update_mode=disk",
    "rollout.max_head_offpolicyness=0",
)


@pytest.mark.long
@pytest.mark.parametrize(("example", "num_turns"), [("multi_turn", 3), ("tool_agent", 1)])
def test_an_example_trains_and_records_rows_of_conversations(example, num_turns, tiny_model, tmp_path):
    record = tmp_path / "record"
    done = run_forked(
        [
            *("-m", "areal_debug.train.script", str(EXAMPLES / f"{example}.py")),
            *("--config", str(EXAMPLES / f"{example}.yaml"), "--dump-rollout", str(record)),
            *(*TINY, f"cluster.fileroot={tmp_path}", f"actor.path={tiny_model}"),
        ],
        os.environ | DETERMINISTIC,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    step = open_record(record).step(0)
    masks = [step.rows(0, row)["loss_mask"] for row in range(step.num_rows(0))]
    assert [int((np.diff(mask, prepend=0) == 1).sum()) for mask in masks] == [num_turns] * 4


def test_the_calculator_agent_calls_its_tool_and_is_rewarded(episode, scripted_engine, tokenizer):
    agent = load_agent(f"{EXAMPLES}/tool_agent.py:CalculatorAgent")
    data = {"messages": [{"role": "user", "content": "7 boxes of 6?"}], "answer": "7 x 6\n#### 42"}
    calls = '<tool_call>{"name": "calculate", "arguments": {"expression": "7 * 6"}}</tool_call>'
    engine = scripted_engine(calls, "It is 42.")
    rows = episode(agent, engine, data, export_style="concat", chat_template_type="concat")
    assert rows["rewards"].tolist() == [1.0]
    assert tokenizer.decode(rows["input_ids"][0]) == (
        "<|system|>tools: calculate<|end|><|user|>7 boxes of 6?<|end|>"
        f"<|assistant|>{calls}<|end|><|user|>42<|end|><|assistant|>It is 42.<|end|>"
    )
    mask = rows["loss_mask"][0].bool()
    assert tokenizer.decode(rows["input_ids"][0][mask]) == f"{calls}<|end|>It is 42.<|end|>"


@pytest.mark.parametrize(("answer", "of_answer"), [("It is 42.", 1.0), ("It is 41.", 0.0)])
def test_the_planning_agent_is_rewarded_for_its_plan_and_its_answer(
    episode, scripted_engine, answer, of_answer
):
    agent = load_agent(f"{EXAMPLES}/plan_agent.py:PlanningAgent")
    data = {"messages": [{"role": "user", "content": "7 boxes of 5, and 7?"}], "answer": "#### 42"}
    texts = [
        f'<tool_call>{{"name": "{name}", "arguments": {{{arguments}}}}}</tool_call>'
        for name, arguments in (
            ("calculate", '"expression": "7 * 5"'),  # before there is a plan
            ("plan", '"steps": ["7 * 5", "add 7"]'),
            ("calculate", '"expression": "7 * 5"'),
            ("calculate", '"expression": "35 + 7"'),
        )
    ]
    rows = episode(agent, scripted_engine(*texts, answer), data, export_style="individual", turn_discount=0.0)
    assert rows["rewards"].tolist() == pytest.approx([0.0, 0.2, 0.0, 0.0, of_answer])
