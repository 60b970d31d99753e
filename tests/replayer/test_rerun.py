"""A replay of another shape or machine is judged by the noise floor; defects are still found."""

from dataclasses import replace

import pytest

import replayer.check
from areal_core.trainer import objective
from replayer.check import ReplayReport
from replayer.request import Request
from replayer.rerun import noise_reruns, replay_and_judge
from replayer.run import replay_and_compare

from .conftest import train_and_record


@pytest.fixture(scope="module")
def deterministic_run(tmp_path_factory, tiny_model):
    """A record whose config is deterministic, as the run is on one thread of a CPU."""
    patch = pytest.MonkeyPatch()
    patch.setattr("areal_core.trainer.build.enforce_determinism", lambda device: None)
    yield train_and_record(
        tmp_path_factory.mktemp("deterministic"),
        tiny_model,
        2,
        deterministic=True,
        actor__ppo_n_minibatches=1,
    )
    patch.undo()


def test_a_report_without_steps_is_not_identical():
    assert not ReplayReport("record").identical


def judged(run, **changes):
    messages = []
    report = replay_and_judge(Request(run.path, 0, 1, **changes), replay_and_compare, messages.append)
    return report, messages


@pytest.fixture
def another_machine(monkeypatch):
    """Emulate the fingerprint of a processor that does not exist."""
    real = replayer.check.describe_run

    def describe(facts):
        header = real(facts)
        return replace(header, environment=header.environment | {"cpu": "another"})

    monkeypatch.setattr(replayer.check, "describe_run", describe)


@pytest.fixture
def other_kernels(monkeypatch):
    """Emulate sums in another order, as the kernels of another machine compute them."""
    real = objective.policy_loss

    def rounded_otherwise(logprobs, *arguments, **options):
        loss, stats = real(logprobs * (1 + 3e-8), *arguments, **options)
        return loss * (1 + 1e-7), stats

    monkeypatch.setattr(objective, "policy_loss", rounded_otherwise)


def test_the_same_shape_is_bitwise_and_needs_no_other_run(deterministic_run):
    report, messages = judged(deterministic_run)
    assert (report.guarantee.kind, report.verdict.finding, messages) == ("bitwise", "identical", [])


@pytest.fixture(scope="module")
def divided(deterministic_run):
    """The report of a replay with other micro-batches, and its messages."""
    return judged(deterministic_run, settings=("actor.mb_spec.max_tokens_per_mb=24",))


def test_other_micro_batches_are_within_the_noise_floor_and_report_the_distance(divided):
    report, messages = divided
    assert not report.identical
    assert (report.guarantee.kind, report.verdict.finding, len(messages)) == ("noise", "within", 1)
    assert 0 < report.verdict.k <= 10
    assert report.guarantee.reasons == ("actor.mb_spec.max_tokens_per_mb is 24, recorded with 64",)


@pytest.mark.long
def test_on_another_machine_other_rounding_is_no_defect(deterministic_run, another_machine, other_kernels):
    report, _ = judged(deterministic_run)
    assert not report.identical
    assert (report.guarantee.kind, report.verdict.finding) == ("noise", "within")


def test_on_the_recorded_machine_other_rounding_is_a_difference(deterministic_run, other_kernels):
    report, messages = judged(deterministic_run)
    assert (report.guarantee.kind, report.verdict.finding, messages) == ("bitwise", "different", [])


def test_noise_is_measured_with_more_micro_batches_or_with_fewer(deterministic_run):
    record, request = deterministic_run.record, Request(deterministic_run.path, 0, 0)
    report = replay_and_compare(request)
    count = report.steps[0].replayed["ppo_actor/update/num_micro_batches"]
    (other,) = noise_reruns(record, request, report)
    assert other.settings == (f"actor.mb_spec.n_mbs={2 * int(count)}",)
    one_each = replace(report.steps[0], replayed={"ppo_actor/update/num_micro_batches": 16.0})
    (other,) = noise_reruns(record, request, ReplayReport(record.path, steps=[one_each]))
    assert other.settings[0] == "actor.mb_spec.n_mbs=1"
