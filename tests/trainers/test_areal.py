"""areal_debug.areal: workflows of upstream AReaL 1.x, recorded and replayed."""

import asyncio
import importlib
import sys

import numpy as np
import pytest
import torch

from recorder import RecordError, open_record, verify

from .stand_ins import areal_modules


@pytest.fixture
def areal(monkeypatch):
    """The adapter, with AReaL or the stand-ins of the modules that it imports."""
    for name, module in areal_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "recorder.trainers.areal_workflow", raising=False)
    yield importlib.import_module("recorder.trainers.areal_workflow")
    sys.modules.pop("recorder.trainers.areal_workflow", None)


class Engine:
    """An engine as far as workflows see it; `agenerate` counts its calls."""

    def __init__(self):
        self.version, self.calls = 0, 0

    def get_version(self):
        return self.version

    async def agenerate(self, prompt):
        self.calls += 1
        await asyncio.sleep(0.001 * (3 - self.calls % 3))  # the first to start are the last to end
        return [*prompt, 10 + self.calls], -0.5 * self.calls


def single_turn(areal):
    """A workflow like RLVRWorkflow: one completion, as a dict of tensors with one row."""

    class SingleTurn(areal.RolloutWorkflow):
        async def arun_episode(self, engine, data):
            tokens, logprob = await engine.agenerate(data["prompt"])
            size = len(tokens)
            return {
                "input_ids": torch.tensor([tokens], dtype=torch.int32),
                "loss_mask": torch.tensor([[0] * (size - 1) + [1]], dtype=torch.int32),
                "logprobs": torch.tensor([[0.0] * (size - 1) + [logprob]]),
                "versions": torch.tensor([[-1] * (size - 1) + [engine.get_version()]], dtype=torch.int32),
                "attention_mask": torch.ones(1, size, dtype=torch.bool),
                "rewards": torch.tensor([float(tokens[-1])]),
            }

    return SingleTurn()


def run(areal, workflow, engine, tasks, group_size=1, is_eval=False):
    """Run tasks as an executor does: a context for each, whose group starts together."""

    async def task(task_id, data):
        areal.workflow_context.set(areal.workflow_context.WorkflowContext(is_eval=is_eval, task_id=task_id))
        return await asyncio.gather(*[workflow.arun_episode(engine, data) for _ in range(group_size)])

    async def all_tasks():
        return await asyncio.gather(*[task(*item) for item in tasks.items()])

    return asyncio.run(all_tasks())


def train(areal, workflow, engine, steps=2, group_size=2):
    """Run two tasks a step, then give the engine its next weights."""
    results = []
    for step in range(steps):
        tasks = {2 * step + number: {"prompt": [1] * (1 + number)} for number in range(2)}
        results.append(run(areal, workflow, engine, tasks, group_size))
        engine.version += 1
    return results


def test_every_value_of_two_steps_is_recorded(areal, tmp_path):
    recorded, engine = areal.Recorded(single_turn(areal), tmp_path / "r"), Engine()
    results = train(areal, recorded, engine)
    run(areal, recorded, engine, {9: {"prompt": [3]}}, is_eval=True)
    recorded.recording.end_with_process()
    record = open_record(tmp_path / "r")
    assert record.steps == (0, 1)
    assert record.header.trainer == "areal"
    for number, tasks in enumerate(results):
        step = record.step(number)
        batch = step.batch(0)
        rows = [row for task in tasks for row in task]  # in the order of their starts
        for name in ("input_ids", "loss_mask", "logprobs", "versions"):
            assert batch[name].tolist() == [value for row in rows for value in row[name][0].tolist()], name
        assert batch["rewards"].tolist() == [row["rewards"].item() for row in rows]
        assert batch["prompt_id"].tolist() == [2 * number, 2 * number, 2 * number + 1, 2 * number + 1]
        assert batch["scores.episode"].tolist() == [0, 1, 0, 1]
        assert batch["prompt_length"].tolist() == [1, 1, 2, 2]
        assert not step.known(0, "finish_reason").any()
        assert step.manifest.version == number + 1
    assert verify(tmp_path / "r").intact
    assert verify(tmp_path / "r").end.finished


def test_a_replay_returns_the_same_tensors_without_an_engine(areal, tmp_path):
    recorded = areal.Recorded(single_turn(areal), tmp_path / "r")
    results = train(areal, recorded, Engine())
    recorded.recording.end_with_process()
    engine = Engine()
    replayed = areal.Replayed(tmp_path / "r")
    again = train(areal, replayed, engine)
    assert engine.calls == 0
    for before, after in zip(flat(results), flat(again), strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(before[name].dtype == after[name].dtype for name in before)
    with pytest.raises(RecordError, match="no further trajectories: set total_train_steps"):
        run(areal, replayed, engine, {99: {}})


def flat(results):
    return [row for tasks in results for task in tasks for row in task]


def test_interactions_of_an_agent_are_rows_of_one_episode(areal, tmp_path):
    interaction = areal.InteractionWithTokenLogpReward
    response = sys.modules["areal.api"].ModelResponse

    class Agent(areal.RolloutWorkflow):
        async def arun_episode(self, engine, data):
            one = response([1, 2], [3], [-0.5], [4], stop_reason="length")
            two = response([1, 2, 3, 4], [5, 6], [-1.0, -2.0], [4, 5], stop_reason="tool_calls")
            text = {"messages": [{"role": "user"}], "output_message_list": [{"content": "hi"}]}
            return {
                "a": interaction(model_response=one, reward=1.0, **text),
                "b": interaction(model_response=two, reward=None),
            }

    recorded = areal.Recorded(Agent(), tmp_path / "r")
    run(areal, recorded, Engine(), {0: {}}, group_size=2)
    recorded.recording.end_with_process()
    step = open_record(tmp_path / "r").step(0)
    batch = step.batch(0)
    assert batch["input_ids"].tolist() == [1, 2, 3, 1, 2, 3, 4, 5, 6] * 2
    assert batch["loss_mask"].tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 1] * 2
    assert batch["versions"].tolist() == [-1, -1, 4, -1, -1, -1, -1, 4, 5] * 2
    assert batch["logprobs"].tolist() == [0, 0, -0.5, 0, 0, 0, 0, -1.0, -2.0] * 2
    assert batch["finish_reason"].tolist() == [1, 0, 1, 0]
    assert step.known(0, "rewards").tolist() == [True, False, True, False]
    assert batch["scores.episode"].tolist() == [0, 0, 1, 1]
    assert step.text(0)[0]["prompt"] == '[{"role": "user"}]'
    assert step.text(0)[0]["completion"] == "hi"
    replayed = areal.Replayed(tmp_path / "r")
    ((first, second, third),) = run(areal, replayed, Engine(), {0: {}}, group_size=3)
    assert first["input_ids"].tolist() == [[1, 2, 3, 0, 0, 0], [1, 2, 3, 4, 5, 6]]
    assert first["attention_mask"].sum(dim=1).tolist() == [3, 6]
    assert "rewards" not in first, "not every row has one"
    assert second["versions"].tolist() == first["versions"].tolist()
    assert third is None


def test_what_a_trajectory_lacks_is_unknown_and_what_it_has_besides_is_kept_or_named(areal, tmp_path):
    class Odd(areal.RolloutWorkflow):
        async def arun_episode(self, engine, data):
            return {
                "input_ids": torch.tensor([[1, 2, 3], [4, 5, 0]]),
                "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
                "turn_ids": torch.tensor([[0, 1, 2], [0, 1, 0]], dtype=torch.int32),
                "multi_modal_input": [{}, {}],
            }

    recorded = areal.Recorded(Odd(), tmp_path / "r")
    run(areal, recorded, Engine(), {0: {}})
    recorded.recording.end_with_process()
    step = open_record(tmp_path / "r").step(0)
    unknown = ("loss_mask", "logprobs", "versions", "rewards", "finish_reason", "prompt_length")
    assert not any(step.known(0, name).any() for name in unknown)
    assert step.batch(0)["turn_ids"].tolist() == [0, 1, 2, 0, 1]
    assert np.isnan(step.batch(0)["rewards"]).all()
    assert step.plan(0).details == {"not_recorded": ["multi_modal_input"]}
    ((row,),) = run(areal, areal.Replayed(tmp_path / "r"), Engine(), {0: {}})
    assert row.keys() == {"input_ids", "attention_mask", "turn_ids"}
    assert row["turn_ids"].tolist() == [[0, 1, 2], [0, 1, 0]]


def test_a_failure_of_the_record_does_not_stop_the_workflow(areal, tmp_path, capfd):
    class NoTokens(areal.RolloutWorkflow):
        async def arun_episode(self, engine, data):
            return {"rewards": torch.tensor([1.0])}

    recorded = areal.Recorded(NoTokens(), tmp_path / "r")
    ((result,), (other,)) = run(areal, recorded, Engine(), {0: {}, 1: {}})
    assert result["rewards"].item() == other["rewards"].item() == 1.0
    (line,) = capfd.readouterr().err.splitlines()
    assert line == (
        "recording: areal: a trajectory is not recorded: the trajectory has no attention_mask and no input_ids; "
        "the run continues without recording"
    )
