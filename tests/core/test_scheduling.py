"""`scheduling_spec` and `scheduling_strategy` of roles: their parts, and what has no effect."""

import pytest

from areal_core.config.allocation import parse_allocation
from areal_core.config.scheduling import RoleSpec, placed_together, role_spec
from areal_core.config.services import LauncherConfig

IMAGE = {"image": "/a.sif", "mount": "/data:/data", "container_type": "none", "srun_additional_args": "-K"}


def test_a_spec_takes_what_it_leaves_out_from_the_launcher_by_role():
    launcher = LauncherConfig(trainer_cpus_per_gpu=3, inference_server_cpus_per_gpu=5)
    launcher.slurm.trainer_image, launcher.slurm.inference_server_image = "/t.sif", "/s.sif"
    shared = ("/storage:/storage", "apptainer", "--mpi=pmi2 -K --chdir $PWD")
    assert role_spec(None, launcher, "actor") == RoleSpec({}, (), 3, 32768, "/t.sif", *shared)
    assert role_spec(None, launcher, "rollout") == RoleSpec({}, (), 5, 32768, "/s.sif", *shared)
    spec = [{"cpu": 0, "mem": 2, "env_vars": {"A": 1}}, {"cmd": "numactl -N 0 python"} | IMAGE]
    expected = RoleSpec(
        {"A": "1"}, ("numactl", "-N", "0", "python"), 0, 2048, "/a.sif", "/data:/data", "none", "-K"
    )
    assert role_spec(spec, launcher, "actor") == role_spec(spec, launcher, "rollout") == expected


TOGETHER = {"type": "colocation", "target": "actor"}


@pytest.mark.parametrize(
    ("actor", "rollout", "expected"),
    [
        (None, TOGETHER, "sglang:d1|fsdp:d1"),
        ({"type": "colocation", "target": "rollout", "fork": True}, None, "sglang:d1|fsdp:d1"),
        ({"type": "separation"}, {"type": "separation", "target": None}, "sglang:d1+fsdp:d1"),
        ({"type": "colocation", "target": "ref"}, None, "sglang:d1+fsdp:d1"),
    ],
)
def test_a_strategy_places_actor_and_rollout_together(actor, rollout, expected):
    assert str(placed_together(parse_allocation("sglang:d1+fsdp:d1"), actor, rollout)) == expected
