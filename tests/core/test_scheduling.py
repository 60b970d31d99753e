"""`scheduling_spec` and `scheduling_strategy` of roles: their parts, and what has no effect."""

import pytest

from areal_core.config.allocation import parse_allocation
from areal_core.config.scheduling import (
    RoleSpec,
    placed_together,
    role_spec,
    specs_without_effect,
    strategies_without_effect,
    wrong_specs,
)
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


@pytest.mark.parametrize("command", ["python3 -m areal.infra.rpc.rpc_server", "", None])
def test_the_command_of_upstreams_own_worker_starts_nothing(command):
    assert role_spec({"cmd": command}, LauncherConfig(), "actor").command == ()


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"cpu": "4"}, "actor.scheduling_spec.cpu is '4'; expected a whole number, 0 or more"),
        ({"mem": -1}, "actor.scheduling_spec.mem is -1; expected a whole number, 0 or more"),
        ({"cpu": True}, "actor.scheduling_spec.cpu is True; expected a whole number, 0 or more"),
        ({"cmd": ["a"]}, "actor.scheduling_spec.cmd is ['a']; expected a text"),
        ({"env_vars": "A=1"}, "actor.scheduling_spec.env_vars is 'A=1'; expected variables and their values"),
        ("gpu", "actor.scheduling_spec is 'gpu'; expected options such as env_vars, or a list of them"),
        (
            [{"cpu": 1}, 3],
            "actor.scheduling_spec is [{'cpu': 1}, 3]; expected options such as env_vars, or a",
        ),
    ],
)
def test_a_part_of_the_wrong_kind_is_named(spec, sentence):
    [problem] = wrong_specs({"actor.scheduling_spec": spec, "rollout.scheduling_spec": None})
    assert problem.startswith(sentence)


@pytest.mark.parametrize(
    ("scheduler", "names"),
    [
        (None, "actor.scheduling_spec.cpu, actor.scheduling_spec.image, rollout.scheduling_spec.nodelist have no effect on this"),
        ("ray", "actor.scheduling_spec.image, rollout.scheduling_spec.nodelist have no effect under ray"),
        ("slurm", "rollout.scheduling_spec.nodelist has no effect under slurm"),
    ],
)  # fmt: skip
def test_each_launcher_names_the_parts_that_it_cannot_use(scheduler, names):
    values = {
        "actor.scheduling_spec": {"gpu": 1, "task_type": "worker", "cmd": "x", "cpu": 2, "image": "/a.sif"},
        "rollout.scheduling_spec": [{"nodelist": "a", "exclusive": False, "env_vars": {"A": "1"}}],
        "ref.scheduling_spec": {"cpu": 2, "image": "/a.sif", "cmd": "x"},  # as the actor's
    }
    [note] = specs_without_effect(values, scheduler)
    assert note.startswith(names)


def test_a_model_in_the_processes_of_the_actor_has_no_process_of_its_own():
    values = {"actor.scheduling_spec": None, "rollout.scheduling_spec": None}
    [note] = specs_without_effect(values | {"ref.scheduling_spec": {"cmd": "x"}}, "slurm")
    assert note == (
        "ref.scheduling_spec.cmd has no effect: only actor and rollout have processes, and other models are in those of the actor"
    )


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


def test_a_strategy_without_servers_changes_nothing():
    for allocation in map(parse_allocation, ("embedded|fsdp:d1", "fsdp:d1", "sglang:d1")):
        assert placed_together(allocation, None, TOGETHER) == allocation


def test_only_strategies_that_place_nothing_are_named():
    values = {
        "actor.scheduling_strategy": {"type": "colocation", "target": "rollout"},
        "rollout.scheduling_strategy": TOGETHER,
        "ref.scheduling_strategy": TOGETHER,
        "critic.scheduling_strategy": {"type": "colocation", "target": "ref"},
        "teacher.scheduling_strategy": {"type": "separation"},
    }
    [note] = strategies_without_effect(values)
    assert note.startswith(
        "critic.scheduling_strategy is {'type': 'colocation', 'target': 'ref'}, which has no effect"
    )
