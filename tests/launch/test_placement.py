"""Placement: the trainer first, servers on the remaining devices."""

import pytest

from areal_core.config import PPOConfig, SFTConfig
from areal_core.config.allocation import parse_allocation
from areal_core.errors import ConfigError
from areal_core.launch.job import Job, parse_environment
from areal_core.launch.placement import Placement, place, plan_servers


def placed(tmp_path, allocation: str, n_nodes: int = 4, n_gpus_per_node: int = 8) -> Placement:
    config = PPOConfig(experiment_name="e", trial_name="t")
    config.cluster.n_nodes, config.cluster.n_gpus_per_node = n_nodes, n_gpus_per_node
    return place(Job((), config, parse_allocation(allocation), {}, tmp_path))


@pytest.mark.parametrize(
    ("allocation", "placement", "num_nodes"),
    [
        ("fsdp:d4", Placement(1, 4, (), 1), 1),
        ("embedded|fsdp:d16", Placement(2, 8, (), 1), 2),
        ("sglang:d4+fsdp:d4", Placement(1, 4, (0, 0, 0, 0), 1), 1),  # one machine for all
        (
            "sglang:d2t4+fsdp:d4",
            Placement(1, 4, (0, 1), 4),
            2,
        ),  # the second server does not fit next to the ranks
        ("sglang:d3t8+fsdp:d8", Placement(1, 8, (1, 2, 3), 8), 4),
        ("sglang:d8+eval", Placement(1, 1, (0,) * 8, 1, devices_per_rank=0), 1),  # servers have all devices
        ("embedded|eval", Placement(1, 1, (), 1), 1),
        ("sglang:d9", Placement(0, 0, (0, 0, 0, 0, 0, 0, 0, 0, 1), 1), 2),
    ],
)
def test_trainer_first_and_servers_where_devices_are_left(tmp_path, allocation, placement, num_nodes):
    assert placed(tmp_path, allocation) == placement
    assert placement.num_nodes == num_nodes


@pytest.mark.parametrize(
    ("allocation", "sentence"),
    [
        (
            "fsdp:d12",
            "trains on 12 ranks and cluster.n_gpus_per_node is 8; on several machines the first must be a",
        ),
        (
            "sglang:d1t16+fsdp:d8",
            "a server of the allocation has 16 devices and cluster.n_gpus_per_node is 8",
        ),
        (
            "sglang:d4t8+fsdp:d8",
            r"needs more than cluster.n_nodes = 4 machines with cluster.n_gpus_per_node = 8",
        ),
        ("fsdp:d40", r"needs more than cluster.n_nodes = 4 machines"),
    ],
)
def test_a_job_that_does_not_fit_is_refused_with_both_numbers(tmp_path, allocation, sentence):
    with pytest.raises(ConfigError, match=sentence):
        placed(tmp_path, allocation)


def test_environment_options_are_pairs():
    assert parse_environment("launcher.trainer_env_vars", "A=1, B=x=y") == {"A": "1", "B": "x=y"}
    assert parse_environment("launcher.trainer_env_vars", "") == {}
    with pytest.raises(
        ConfigError, match=r"launcher.trainer_env_vars is 'A'; expected variables as 'A=1,B=2'"
    ):
        parse_environment("launcher.trainer_env_vars", "A")


def test_servers_for_a_method_without_rollouts_are_refused(tmp_path):
    config = SFTConfig(experiment_name="e", trial_name="t")
    job = Job((), config, parse_allocation("sglang:d1+fsdp:d2"), {}, tmp_path)
    with pytest.raises(ConfigError, match=r"sglang:d1\+fsdp:d2 has inference servers and SFTConfig has no"):
        plan_servers(job, "cpu", share_devices=False)


def test_servers_get_the_environment_of_the_rollout_section(tmp_path):
    config = PPOConfig(experiment_name="e", trial_name="t")
    config.rollout.scheduling_spec = [{"env_vars": {"SEED": 1, "OF_ROLLOUT": "yes"}}]
    config.launcher.inference_server_env_vars = "SEED=3"
    job = Job((), config, parse_allocation("sglang:d1"), {}, tmp_path)
    [plan] = plan_servers(job, "cuda", share_devices=True)
    assert (plan.env["SEED"], plan.env["OF_ROLLOUT"]) == ("3", "yes")
