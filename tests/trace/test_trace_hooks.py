"""Tracing wrappers: the events that they record, and unchanged results and errors."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.rollout.workflow import episode_tensors
from areal_core.telemetry.stats import Stats
from areal_core.telemetry.trace import Trace
from areal_core.telemetry.trace_merge import merge
from areal_core.testing import ScriptedEngine
from areal_core.trainer.trace_hooks import NO_TRACING, Tracing


async def reward_fn(*texts, **row):
    if row["reward"] is None:
        raise RuntimeError("no reward today")
    return row["reward"]


class OneAnswer:
    """One generation and one reward; rejects if the row requests it."""

    def __init__(self, reward):
        self.reward = reward

    async def arun_episode(self, engine, data):
        response = await engine.agenerate(ModelRequest(input_ids=[1, 2, 3], sampling=Sampling()))
        reward = await self.reward(**data)
        return None if data["reject"] else episode_tensors(response, reward)


def run_episodes(tracing, *rows):
    """Run one episode per row; return the results or exceptions."""
    workflow = tracing.workflow(OneAnswer(tracing.reward(reward_fn)))
    scripted = ScriptedEngine({(1, 2, 3): [7, 8, 9]}, version=4)

    async def all_of_them():
        engines = [
            SimpleNamespace(prompt_id=p, sample_id=0, version=4, agenerate=scripted.agenerate)
            for p in range(len(rows))
        ]
        calls = [workflow.arun_episode(engine, row) for engine, row in zip(engines, rows, strict=True)]
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(all_of_them())


def row(reward=1.0, reject=False):
    return {"reward": reward, "reject": reject}


def slices(folder, category):
    events = json.loads(merge(folder).read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X" and event["cat"] == category]


def test_episodes_have_a_status_and_contain_their_children(tmp_path):
    tracing = Tracing(Trace(tmp_path, 0, 1, {}), sessions=10)
    accepted, rejected, failed = run_episodes(tracing, row(0.5), row(reject=True), row(None))
    tracing.close()
    assert accepted["rewards"].tolist() == [0.5]
    assert rejected is None
    assert isinstance(failed, RuntimeError)
    episodes = {event["args"]["prompt_id"]: event["args"] for event in slices(tmp_path, "episode")}
    assert [episodes[p]["status"] for p in range(3)] == ["accepted", "rejected", "failed"]
    assert (episodes[0]["reward"], episodes[0]["tokens"]) == (0.5, 3)
    assert (episodes[0]["oldest_version"], episodes[0]["newest_version"]) == (4, 4)
    assert episodes[2]["error"] == "RuntimeError: no reward today"
    generations = [event["args"] for event in slices(tmp_path, "generation")]
    assert {(g["prompt_tokens"], g["tokens"], g["stop_reason"]) for g in generations} == {(3, 3, "stop")}
    assert {e["args"]["episode"] for e in slices(tmp_path, "reward")} == {f"episode {p}.0" for p in range(3)}
    sessions = [json.loads(line) for line in (tmp_path / "sessions-r00000.jsonl").read_text().splitlines()]
    assert [(s["task_id"], s["status"]) for s in sessions] == [
        (0, "accepted"),
        (1, "rejected"),
        (2, "failed"),
    ]
    assert [phase["name"] for phase in sessions[0]["phases"]] == ["generation", "reward"]
    assert sessions[0]["generate_s"] + sessions[0]["reward_s"] <= sessions[0]["total_s"]


def test_without_a_trace_every_object_is_returned_unchanged():
    workflow, update = OneAnswer(reward_fn), object()
    assert NO_TRACING.workflow(workflow) is workflow
    assert NO_TRACING.reward(reward_fn) is reward_fn
    assert NO_TRACING.weight_update(update) is update
    assert NO_TRACING.observers == []


def test_weight_updates_stages_and_staleness_are_drawn(tmp_path):
    trace = Trace(tmp_path, 0, 1, {})
    tracing, stats = Tracing(trace), Stats()
    stats.timing_listeners.append(trace.stage)
    sent = []
    update = tracing.weight_update(SimpleNamespace(send=lambda weights, version: sent.append(version)))
    (observe,) = tracing.observers
    batch = {
        "prompt_id": torch.tensor([5, 5, 6]),
        "attention_mask": torch.ones(3, 2, dtype=torch.bool),
        "loss_mask": torch.tensor([[0, 1], [0, 1], [0, 1]], dtype=torch.int32),
        "versions": torch.tensor([[-1, 3], [-1, 2], [-1, 1]], dtype=torch.int32),
    }
    with stats.timing("step"):
        observe("batch", step=3, version=3, batch=batch)
        with stats.timing("update_weights"):
            update.send(iter(()), 4)
    tracing.commit(
        3, {"rollout/accepted": 9, "rollout/stale": 1, "loss": 2.0, "rollout/reward": float("nan")}
    )
    tracing.close()
    assert sent == [4]
    assert [event["name"] for event in slices(tmp_path, "stage")] == ["push", "update_weights", "step"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    counters = {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    assert counters == {
        "staleness": {"mean": 1.0, "max": 2.0},
        "weight version": {"version": 4},
        "prompts": {"accepted": 9, "stale": 1},
    }
    (event_args,) = (event["args"] for event in events if event["ph"] == "i")
    assert event_args == {"step": 3, "version": 3, "prompts": [5, 6], "tokens": 6}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_episodes_end_well_when_their_log_cannot_be_written(tmp_path, caplog):
    (tmp_path / "sessions-r00000.jsonl").symlink_to("/dev/full")
    tracing = Tracing(Trace(tmp_path, 0, 1, {}), sessions=1)
    (rows,) = run_episodes(tracing, row(1.0))
    tracing.close()
    assert rows["rewards"].tolist() == [1.0]
    assert "1 episodes are missing in" in caplog.text
    assert len(slices(tmp_path, "episode")) == 1
