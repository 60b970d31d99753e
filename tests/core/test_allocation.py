"""Every spelling of an allocation, errors of invalid ones, and scheduling options of roles."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_core.config import PPOConfig
from areal_core.config.allocation import Allocation, Parallel, parse_allocation
from areal_core.config.scheduling import RoleSpec, placed_together, role_spec
from areal_core.config.services import LauncherConfig
from areal_core.errors import AllocationError


def decoupled(servers: int, ranks: int) -> Allocation:
    return Allocation(Parallel(servers), Parallel(ranks), "sglang", "fsdp", "decoupled")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sglang:d1+fsdp:d2", decoupled(1, 2)),
        ("sglang.d4p1t1+d4p1t1", decoupled(4, 4)),
        ("sglang:d4p1t1+d4p1t1", decoupled(4, 4)),
        ("sglang[rollout]:d2+fsdp[actor]:d4", decoupled(2, 4)),
        ("d4p1t1", Allocation(None, Parallel(4), None, "fsdp", "train_only")),
        ("fsdp:d2", Allocation(None, Parallel(2), None, "fsdp", "train_only")),
        ("sglang:d4", Allocation(Parallel(4), None, "sglang", None, "servers_only")),
        ("sglang:d4t2+eval", Allocation(Parallel(4, 2), None, "sglang", None, "eval")),
        ("sglang:d4+cpu", Allocation(Parallel(4), None, "sglang", None, "eval")),
        ("embedded|eval", Allocation(Parallel(), None, "embedded", None, "eval")),
        ("embedded|fsdp:d2", Allocation(Parallel(2), Parallel(2), "embedded", "fsdp", "colocated")),
        ("fsdp:d2s2t1", Allocation(None, Parallel(2, context=2), None, "fsdp", "train_only")),
        # The engine is in one of the ranks with the same rows, with a complete model.
        (
            "embedded|fsdp:d2c2t2",
            Allocation(Parallel(2), Parallel(2, 2, context=2), "embedded", "fsdp", "colocated"),
        ),
        ("sglang:d2|fsdp:d2", Allocation(Parallel(2), Parallel(2), "sglang", "fsdp", "colocated")),
    ],
)
def test_spelling_is_read(text, expected):
    assert parse_allocation(text) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "found the end at character 1"),
        ("fsdp:d1c2s2", "each letter once, and 's' was given before"),
        ("sglang:d4+", "found the end at character 11, expected sizes"),
        ("sglang:x4", "found 'x4' at character 8, expected servers take d, t and p"),
        ("sglang d4", "found ' ' at character 7, expected ':'"),
        ("sglang:d0", "expected a size of 1 or more"),
        ("sglang:d2d2", "'d' was given before"),
        ("fsdp:d2p2", "p and e need Megatron"),
        ("fsdp:d2+fsdp:d2", "found '+' at character 8, expected the end"),
        ("embedded", "expected '|'"),
        ("vllm:d2c2+fsdp:d2", "found 'c2' at character 8, expected servers take d, t and p"),
        ("sglang:d2+megatron:d2", "megatron at character 11: there is no Megatron engine; use fsdp"),
    ],
)
def test_wrong_allocation_is_refused_with_its_position(text, sentence):
    with pytest.raises(AllocationError) as error:
        parse_allocation(text)
    assert sentence in str(error.value)


@given(st.text(alphabet="sglangfdptce:.+|[]0123456789 ", max_size=24))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(AllocationError):
        assert parse_allocation(text).kind


@pytest.mark.parametrize(
    ("text", "evaluation"),
    [
        ("sglang:d2t2+fsdp:d4", "sglang:d2t2+eval"),
        ("vllm:d2+eval", "vllm:d2+eval"),
        ("sglang:d2|fsdp:d2", "sglang:d2+eval"),
        ("embedded|fsdp:d4c2", "embedded|eval"),
    ],
)
def test_an_evaluation_has_the_engine_of_the_training_and_one_process(text, evaluation):
    found = parse_allocation(text).for_evaluation(samples=True)
    assert str(found) == evaluation
    assert parse_allocation(evaluation) == found
    assert found.num_ranks == 1
    assert PPOConfig(allocation_mode=evaluation).allocation == found


def test_two_spellings_that_disagree_are_refused():
    config = PPOConfig(allocation_mode="sglang:d1+fsdp:d2")
    config.rollout.backend, config.actor.backend = "sglang:d1", "fsdp:d4"
    with pytest.raises(AllocationError, match=r"sglang:d1\+fsdp:d2.*fsdp:d4.*keep one"):
        _ = config.allocation


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
