"""Placement: the trainer first, servers on the remaining devices, and environment presets."""

import pytest

from areal_core.config import PPOConfig
from areal_core.config.allocation import parse_allocation
from areal_core.launch.debug_env import debug_environment, make_folders
from areal_core.launch.job import Job
from areal_core.launch.placement import Placement, place


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


def test_presets_add_up_and_name_files_of_the_run(tmp_path):
    env = debug_environment(["hang", "nccl"], tmp_path)
    assert env["NCCL_DEBUG"] == "INFO"
    assert env["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/flight_recorder/rank_"
    make_folders(env)
    assert (tmp_path / "flight_recorder").is_dir()
    assert debug_environment([], tmp_path) == {}
