"""The trace: nested spans, tracks without overlap, one file of all ranks, survival of a kill."""

import asyncio
import json
from pathlib import Path

import pytest

from areal_core.telemetry.trace import HEADER, Trace, rank_file
from areal_core.telemetry.trace_merge import BrokenTrace, merge, merge_if_all_ended
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
