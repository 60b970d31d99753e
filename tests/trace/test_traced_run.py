"""A real asynchronous run, traced: the content of its files, and the command's report."""

import json
from pathlib import Path

from click.testing import CliRunner

from areal_debug.verbs.trace import command
from tests.forks import COMMAND, run_forked

TINY = Path(__file__).parents[1] / "debug"
OPTIONS = (
    "rollout.enable_rollout_tracing=true",
    "perf_tracer.session_tracer.enabled=true",
    "perf_tracer.profile_steps=[1]",
    "rollout.max_head_offpolicyness=1",
    "total_train_steps=4",
)


def test_a_traced_run_leaves_one_file_that_explains_its_steps(tiny_model, tmp_path):
    places = (f"cluster.fileroot={tmp_path}", f"actor.path={tiny_model}")
    train = [COMMAND, "train", str(TINY / "train_tiny.py"), "--config", str(TINY / "tiny.yaml")]
    done = run_forked([*train, *places, *OPTIONS])
    assert done.returncode == 0, done.stdout + done.stderr
    logs = next((tmp_path / "logs").glob("*/tiny/test"))
    result = CliRunner().invoke(command, [str(logs), "--json"])
    assert result.exit_code in (0, 1), result.output
    report = json.loads(result.stdout)
    assert [step["step"] for step in report["steps"]] == [0, 1, 2, 3]
    for step in report["steps"]:
        assert step["num_episodes"] == 16
        assert sum(step["stages"].values()) <= step["seconds"] * 1.001
        assert step["stages"]["train_step"] > 0
        assert step["stages"]["update_weights"] > 0
        assert step["longest"]["num_tokens"] > 0
        assert step["staleness"][1] <= 1
    assert any(step["staleness"][1] == 1 for step in report["steps"])  # rollouts were asynchronous
    assert report["episodes"]["accepted"] >= 64
    sessions = (logs / "trace" / "sessions-r00000.jsonl").read_text().splitlines()
    assert {"accepted"} <= {json.loads(line)["status"] for line in sessions}
    assert (logs / "trace" / "profile-r00000-step1.json").stat().st_size > 0
    events = json.loads((logs / "trace" / "trace.json").read_text())["traceEvents"]
    assert {"episode", "generation", "reward", "stage"} <= {
        event["cat"] for event in events if event["ph"] == "X"
    }
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"episodes running", "staleness", "weight version", "prompts", "reward"}
