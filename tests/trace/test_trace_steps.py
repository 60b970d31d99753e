"""The time of steps: sums, the named episode, and the resulting advice, on constructed traces."""

import json

import pytest

from areal_core.telemetry.trace import TRAINER_TRACK, Trace
from areal_debug.trace.read import read_run
from areal_debug.trace.steps import report_on
from tests.command_line import invoke

OPTIONS = {"batch_size": 2, "max_head_offpolicyness": 0, "max_concurrent_rollouts": 8, "max_new_tokens": 512}


class ScriptedTrace:
    """Write a rank's trace with the times that a test chooses, in seconds after its start."""

    def __init__(self, folder, rank=0, world_size=1, **options):
        self.trace = Trace(folder, rank, world_size, OPTIONS | options)

    def at(self, seconds):
        return self.trace._origin_ns + round(seconds * 1e9)

    def step(self, number, start, **stages):
        """Write a step whose stages follow each other."""
        at = start
        for name, seconds in stages.items():
            self.trace.complete(name, "stage", self.at(at), self.at(at + seconds), TRAINER_TRACK, {})
            at += seconds
            if name == "rollout":
                args = {"step": number, "version": number, "prompts": [number], "tokens": 100}
                event = {"ph": "i", "s": "p", "name": "batch", "cat": "batch", "tid": 0, "args": args}
                self.trace._add(event | {"ts": at * 1e6})
                staleness = {"ph": "C", "name": "staleness", "cat": "counter", "tid": 0}
                self.trace._add(staleness | {"ts": at * 1e6, "args": {"mean": 0.25 * number, "max": number}})
        self.trace.complete("step", "stage", self.at(start), self.at(at + 0.1), TRAINER_TRACK, {})

    def episode(self, prompt, sample, start, generation=0.0, reward=0.0, own=0.0, tokens=10):
        track = 1 + sample
        name, middle = f"episode {prompt}.{sample}", start + generation
        for kind, a, b in (("generation", start, middle), ("reward", middle, middle + reward)):
            self.trace.complete(kind, kind, self.at(a), self.at(b), track, {"episode": name})
        args = {"prompt_id": prompt, "sample_id": sample, "status": "accepted", "tokens": tokens}
        self.trace.complete(name, "episode", self.at(start), self.at(middle + reward + own), track, args)


def report_of(folder, step=None):
    return report_on(read_run(folder), step)


def quick_steps(run, numbers, **episode):
    for number in numbers:
        run.step(number, 10 * number, rollout=1.0, compute_advantage=0.2, train_step=0.5, update_weights=0.2)
        for sample in range(4):
            run.episode(number, sample, 10 * number, **({"generation": 0.9, "reward": 0.1} | episode))


def test_a_step_is_divided_into_its_stages_and_the_rest_is_other(tmp_path):
    run = ScriptedTrace(tmp_path)
    quick_steps(run, range(3))
    run.trace.close()
    times = report_of(tmp_path, step=1).shown
    assert times.seconds == pytest.approx(2.0)
    assert times.stages == pytest.approx(
        {
            "rollout": 1,
            "compute_advantage": 0.2,
            "train_step": 0.5,
            "update_weights": 0.2,
            "save": 0,
            "other": 0.1,
        }
    )
    assert times.num_episodes == 4
    assert times.staleness == (0.25, 1)
    assert times.generation.p50_s == pytest.approx(0.9)


def test_the_long_tail_is_named_with_the_episode_and_the_options_that_fix_it(tmp_path):
    run = ScriptedTrace(tmp_path)
    quick_steps(run, range(4))
    run.step(4, 50, rollout=9.0, train_step=0.5)
    for sample in range(7):
        run.episode(4, sample, 50, generation=1.0)
    run.episode(4, 7, 50, generation=8.5, tokens=512)
    run.trace.close()
    report = report_of(tmp_path)
    assert report.slow == [4]
    assert report.shown.step == 4
    assert report.shown.longest.name == report.shown.last.name == "episode 4.7"
    assert (
        "episode 4.7 of rank 0 took 8.50 s (512 tokens), half of the episodes 1.00 s"
        in report.finding.because
    )
    assert "rollout.max_head_offpolicyness is 0" in report.finding.change
    assert "gconfig.max_new_tokens is 512" in report.finding.change


@pytest.mark.parametrize(
    ("episode", "because", "change"),
    [
        ({"generation": 0.2, "reward": 0.7}, "78% of their time in the reward", "worker processes"),
        ({"generation": 0.2, "own": 0.7}, "in the workflow's own code", "agent stress"),
        ({"generation": 0.9}, "evenly slowly", "rollout.max_concurrent_rollouts is 8"),
    ],
)
def test_a_wait_for_rollouts_is_explained_by_what_episodes_did(tmp_path, episode, because, change):
    run = ScriptedTrace(tmp_path)
    quick_steps(run, range(2), **({"reward": 0.0} | episode))
    run.trace.close()
    finding = report_of(tmp_path).finding
    assert because in finding.because
    assert change in finding.change


def test_the_command_exits_with_1_and_reports_the_same_as_json_when_a_step_was_slow(tmp_path):
    run = ScriptedTrace(tmp_path / "trace")
    quick_steps(run, range(3))
    run.step(3, 40, rollout=9.0)
    run.trace.close()
    done = invoke("trace", tmp_path)
    assert done.exit_code == 1, done.output
    assert "Slow: step 3 took more than 2 times the median of 2 s" in done.output
    facts = json.loads(invoke("trace", tmp_path, "--json").stdout)
    assert facts["slow_steps"] == [3]
    assert facts["step"]["stages"]["rollout"] == pytest.approx(9.0)
    assert facts["finding"]["because"] == "the batch came from a source that is not traced"
    assert invoke("trace", tmp_path / "trace" / "trace.json", "--step", 1).exit_code == 1
