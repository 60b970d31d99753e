"""The trace: spans and tracks, one file of all ranks, survival of a kill, unchanged results."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from areal_core.rollout.types import ModelRequest, Sampling
from areal_core.rollout.workflow import episode_tensors
from areal_core.telemetry.stats import Stats
from areal_core.telemetry.trace import HEADER, Trace, rank_file
from areal_core.telemetry.trace_merge import BrokenTrace, merge, merge_if_all_ended
from areal_core.testing import ScriptedEngine
from areal_core.trainer.trace_hooks import NO_TRACING, Tracing
from areal_debug.trace.read import read_run


def merged_events(folder: Path) -> list[dict]:
    return json.loads(merge(folder).read_text())["traceEvents"]


def complete(events: list[dict], category: str) -> list[dict]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == category]


def assert_drawable(events: list[dict]) -> None:
    """Slices of one track either follow each other or are nested, as both viewers require."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            ends = round((event["ts"] + event["dur"]) * 1000)
            tracks.setdefault((event["pid"], event["tid"]), []).append((round(event["ts"] * 1000), -ends))
    for slices in tracks.values():
        open_until: list[int] = []
        for start, negative_end in sorted(slices):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or -negative_end <= open_until[-1], "slices of one track cross"
            open_until.append(-negative_end)


async def episode(trace: Trace, sample: int, gate: asyncio.Event) -> None:
    with trace.episode(7, sample) as span:
        with trace.span("generation", "generation", tokens=3):
            await gate.wait()
        with trace.span("reward", "reward"):
            await asyncio.sleep(0)
        span.args["status"] = "accepted"


async def three_at_once(trace: Trace) -> None:
    gate = asyncio.Event()
    tasks = [asyncio.create_task(episode(trace, sample, gate)) for sample in range(3)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks)


def test_concurrent_episodes_get_separate_tracks_and_contain_their_children(tmp_path):
    trace = Trace(tmp_path, 0, 1, {})
    asyncio.run(three_at_once(trace))
    trace.close()
    events = merged_events(tmp_path)
    assert_drawable(events)
    episodes = complete(events, "episode")
    assert sorted(event["tid"] for event in episodes) == [1, 2, 3]
    assert {event["args"]["status"] for event in episodes} == {"accepted"}
    parts = [(event["tid"], event["name"]) for event in complete(events, "generation")]
    assert sorted(parts) == [(1, "generation"), (2, "generation"), (3, "generation")]
    running = [event["args"]["episodes"] for event in events if event["name"] == "episodes running"]
    assert running == [1, 2, 3, 2, 1, 0]


def test_concurrent_generations_of_one_episode_do_not_cross(tmp_path):
    trace = Trace(tmp_path, 0, 1, {})

    async def call(gate: asyncio.Event) -> None:
        with trace.span("generation", "generation"):
            await gate.wait()

    async def agent() -> None:
        gate = asyncio.Event()
        with trace.episode(0, 0) as span:
            calls = [asyncio.create_task(call(gate)) for _ in range(2)]
            await asyncio.sleep(0)
            gate.set()
            await asyncio.gather(*calls)
        assert [name for name, _, _ in span.phases] == ["generation", "generation"]

    asyncio.run(agent())
    trace.close()
    events = merged_events(tmp_path)
    assert_drawable(events)
    assert sorted(event["tid"] for event in complete(events, "generation")) == [1, 2]


def test_the_last_rank_to_end_merges_all_on_one_clock(tmp_path):
    first, second = Trace(tmp_path, 0, 2, {"batch_size": 4}), Trace(tmp_path, 1, 2, {})
    start = first._origin_ns
    first.stage("rollout", start + 1_000, start + 3_000)
    second.stage("rollout", second._origin_ns, second._origin_ns + 5_000)
    first.close()
    merge_if_all_ended(tmp_path, 2)
    assert not (tmp_path / "trace.json").exists()
    second.close()
    merge_if_all_ended(tmp_path, 2)
    document = json.loads((tmp_path / "trace.json").read_text())
    about = document["otherData"]
    assert about["ranks"][0]["options"] == {"batch_size": 4}
    later = about["ranks"][1]["start_ns"] - about["ranks"][0]["start_ns"]
    stages = {event["pid"]: event for event in complete(document["traceEvents"], "stage")}
    times = [(stages[rank]["ts"], stages[rank]["dur"]) for rank in (0, 1)]
    assert times == [pytest.approx((1.0, 2.0)), pytest.approx((later / 1000, 5.0))]


def test_a_file_cut_by_a_kill_keeps_all_complete_lines_and_damage_inside_is_refused(tmp_path):
    trace = Trace(tmp_path, 0, 1, {})
    trace.counter("staleness", mean=0.5, max=2)
    trace.counter("staleness", mean=1.5, max=3)
    trace.close()
    file = rank_file(tmp_path, 0)
    header, one, two, _ = file.read_text().splitlines()
    file.write_text("\n".join([header, one, two[:20]]))
    values = [event["args"] for event in merged_events(tmp_path) if event["ph"] == "C"]
    assert values == [{"mean": 0.5, "max": 2}]
    file.write_text("\n".join([header, one[:20], two]) + "\n")
    with pytest.raises(BrokenTrace, match=r"rank-00000\.jsonl, line 2: not an event"):
        merge(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_ends_the_trace_with_a_warning_and_not_the_run(tmp_path, caplog):
    (tmp_path / "rank-00000.jsonl").symlink_to("/dev/full")
    trace = Trace(tmp_path, 0, 1, {})
    for _ in range(3):
        trace.counter("x", y=1)
        trace.flush()
    trace.close()
    assert "rank-00000.jsonl ends here: [Errno 28] No space left on device" in caplog.text


def test_a_header_that_states_a_trillion_ranks_costs_no_time(tmp_path):
    header = {"rank": 0, "world_size": 10**12, "host": "h", "pid": 1, "start_ns": 0, "batch_size": 2}
    rank_file(tmp_path, 0).write_text(json.dumps({"name": HEADER, "args": header}) + "\n")
    assert read_run(tmp_path).num_ranks == 10**12
    rank_file(tmp_path, 0).write_text("")
    with pytest.raises(BrokenTrace, match="is empty or cut off"):
        merge(tmp_path)


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
    return complete(merged_events(folder), category)


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
