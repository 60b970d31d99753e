"""The options of a run with faults, its record as rows, and one real run with ranks and servers."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from areal_core.config import GRPOConfig, load_expr_config
from areal_core.errors import ConfigError
from areal_debug.chaos.chaos_training import chaos_arguments, make_plans, plan_of, recorded_rows
from areal_debug.chaos.history import Plan, Reply, check_history
from areal_debug.cli import main
from recorder import open_record

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "examples/chaos.yaml")


def read(arguments: list[str]) -> GRPOConfig:
    return load_expr_config(arguments, GRPOConfig)[0]


def test_a_config_without_a_model_gets_a_tiny_one_and_what_the_faults_need(tmp_path):
    config = read(chaos_arguments(CONFIG, ["gconfig.max_new_tokens=9"], tmp_path, num_servers=2))
    assert Path(config.actor.path) == tmp_path / "model"
    assert (tmp_path / "model" / "config.json").exists()
    assert str(config.allocation) == "sglang:d2+fsdp:d2"
    assert (config.debug.dump_rollout_data, config.debug.path) == (True, f"{tmp_path}/record")
    assert config.gconfig.max_new_tokens == 9
    assert config.rollout.request_timeout == 10
    assert plan_of(config) == Plan(8, 4, 2, 128)


def test_a_given_model_is_used(tmp_path):
    config = read(chaos_arguments(CONFIG, ["actor.path=/models/m"], tmp_path, num_servers=2))
    assert config.actor.path == "/models/m"
    assert not (tmp_path / "model").exists()


def test_a_config_that_trains_nothing_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no training part in its allocation"):
        chaos_arguments(CONFIG, ["actor.path=/m", "allocation_mode=sglang:d2"], tmp_path, 2)


def test_embedded_servers_have_seeds_of_their_own_and_the_models_dtype(tmp_path):
    config = read(chaos_arguments(CONFIG, [], tmp_path, num_servers=2))
    plans, module = make_plans(config, tmp_path, "embedded")
    assert module == "areal_core.embedded.http_server"
    assert [plan.args for plan in plans] == [
        ["--dtype", "float32", "--random-seed", str(seed)] for seed in range(2)
    ]
    plans, module = make_plans(config, tmp_path, "sglang")
    assert module == "sglang.launch_server"
    assert plans[0].args[:2] == ["--device", "cpu"]


def test_the_rows_of_a_record_are_those_that_were_trained_on():
    record = ROOT / "tests/records/tiny_grpo.zip"
    config = open_record(record).header.config
    rows = recorded_rows(record)
    n_samples = config["gconfig"]["n_samples"]
    batch_size, num_steps = config["train_dataset"]["batch_size"], 1 + max(row.step for row in rows)
    assert len(rows) == num_steps * batch_size * n_samples
    plan = Plan(batch_size, n_samples, config["rollout"]["max_head_offpolicyness"], 10**6, num_steps)
    replies = [
        Reply(
            "the engine",
            row.prompt(),
            tuple(row.tokens[row.sampled].tolist()),
            tuple(row.logprobs[row.sampled].tolist()),
            tuple(row.versions[row.sampled].tolist()),
        )
        for row in rows
    ]
    assert not check_history(rows, replies, plan)
    assert len(check_history(rows, replies[1:], plan).poisoned) == 1


@pytest.mark.long
def test_a_run_with_every_fault_trains_on_intact_replies_only(tmp_path):
    options = ["--minutes", "0.7", "--seed", "4", "--json", "-o", str(tmp_path / "run")]
    done = CliRunner().invoke(main, ["chaos", CONFIG, *options])
    facts = json.loads(done.stdout)
    assert done.exit_code == 0, facts["violations"]
    assert facts["steps"] >= 3
    assert facts["rows"] == facts["steps"] * 32
    assert sum(facts["injected"].values()) > 0
