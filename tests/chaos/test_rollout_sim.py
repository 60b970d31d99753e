"""The simulation of many servers counts what is lost, doubled, old and late."""

import json
import time
from collections import Counter
from dataclasses import replace

import pytest
from click.testing import CliRunner

from areal_core.rollout.pipeline import PromptFeed
from areal_debug.cli import main
from areal_debug.rollout_sim import fleet
from areal_debug.rollout_sim import simulate as simulation
from areal_debug.rollout_sim.fleet import SimulatedFleet, generate_reply
from areal_debug.rollout_sim.simulate import GROUP, NUM_VERSIONS, STALENESS, simulate

COUNTS = ("servers", "requests", "lost", "doubled", "deaths", "updates", "staleness_bound")


@pytest.fixture(scope="module")
def report():
    return simulate(16, 800, seed=3, median_latency_s=0.05)


def test_no_sample_is_lost_or_doubled_through_deaths_restarts_and_updates(report):
    assert (report.lost, report.doubled) == (0, 0)
    assert report.requests == 800
    assert report.deaths == 8
    assert report.updates == NUM_VERSIONS
    assert report.aborted > 0
    assert report.replies >= report.requests + report.aborted
    assert 0 < report.oldest_version_lag <= STALENESS
    assert report.cpu_s > 0
    assert report.requests_per_s == report.requests / report.cpu_s
    assert report.problems(max_lag_ms=10_000) == []


def test_the_counts_of_a_seed_are_always_the_same(report):
    again = simulate(16, 800, seed=3, median_latency_s=0.05)
    assert {n: getattr(again, n) for n in COUNTS} == {n: getattr(report, n) for n in COUNTS}


def test_requests_are_rounded_up_to_whole_batches():
    assert simulate(2, 1, seed=1, median_latency_s=0.01).requests == NUM_VERSIONS * GROUP


class Skips(PromptFeed):
    def take(self):
        prompt_id, row = super().take()
        return (prompt_id, row) if prompt_id != 5 else self.take()


def test_a_prompt_that_is_left_out_is_lost(monkeypatch):
    monkeypatch.setattr(simulation, "PromptFeed", Skips)
    report = simulate(4, 400, seed=1, median_latency_s=0.01)
    assert report.lost == GROUP
    assert report.problems(10_000)[0] == f"{GROUP} samples were lost"


def test_a_prompt_that_comes_again_is_doubled(monkeypatch):
    class Repeats(PromptFeed):
        def take(self):
            prompt_id, row = super().take()
            return (4, self.loader.row(4)) if prompt_id == 45 else (prompt_id, row)

    monkeypatch.setattr(simulation, "PromptFeed", Repeats)
    report = simulate(4, 400, seed=1, median_latency_s=0.01)
    assert (report.lost, report.doubled) == (GROUP, GROUP)
    assert f"{GROUP} samples were trained on more than once" in report.problems(10_000)


def test_a_token_beyond_the_bound_is_a_problem(report):
    old = replace(report, oldest_version_lag=STALENESS + 1)
    assert old.problems(10_000) == ["a token was 3 versions old, the bound is 2"]


def test_a_completion_with_another_token_than_was_sampled_is_lost(monkeypatch):
    def spoils_one(rid, first, count, version, finish):
        replies.append(rid)
        return generate_reply(rid, first + (len(replies) == 20), count, version, finish)

    replies = []
    monkeypatch.setattr(fleet, "generate_reply", spoils_one)
    assert simulate(4, 400, seed=1, median_latency_s=0.01).lost == 1


def test_a_callback_that_blocks_the_event_loop_is_lag(monkeypatch):
    post = SimulatedFleet.post
    calls = Counter()

    async def blocks_once(fleet, server, path, payload):
        calls["post"] += 1
        if calls["post"] == 50:
            time.sleep(0.4)
        return await post(fleet, server, path, payload)

    monkeypatch.setattr(SimulatedFleet, "post", blocks_once)
    report = simulate(4, 400, seed=1, median_latency_s=0.05)
    assert report.max_lag_ms >= 350
    assert "the event loop was late by" in report.problems(max_lag_ms=200)[0]


def test_the_command_prints_the_numbers_and_their_json(monkeypatch):
    options = ["--servers", "4", "--requests", "200", "--latency", "0.02", "--max-lag", "5000"]
    done = CliRunner().invoke(main, ["rollout-sim", *options])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Fine: 200 requests on 4 simulated servers: none lost, none doubled")
    done = CliRunner().invoke(main, ["rollout-sim", *options, "--json"])
    facts = json.loads(done.stdout)
    assert (facts["lost"], facts["doubled"], facts["problems"]) == (0, 0, [])
    assert {"max_lag_ms", "cpu_s", "requests_per_s", "oldest_version_lag"} <= facts.keys()
    monkeypatch.setattr(simulation, "PromptFeed", Skips)
    done = CliRunner().invoke(main, ["rollout-sim", *options])
    assert done.exit_code == 1
    assert f"{GROUP} samples were lost" in done.stdout
