"""A nondeterministic run is detected before it starts, with its noise floor; how the verb repeats steps."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from areal_core.environment import DETERMINISTIC
from areal_core.trainer import objective
from areal_debug.verbs.check import Repeats, repeat_steps
from recorder import Outcome, open_record
from recorder.testing import write_scripted_record
from replayer.preflight import settings as checks
from replayer.preflight.real_steps import run_steps, save_bits
from replayer.preflight.repeats import compare_repeats, measure_noise, read_repeat, write_repeat

from .conftest import tiny_config

GOOD = checks.Process(
    rank=0,
    world_size=2,
    device="cuda",
    now=DETERMINISTIC | {"OMP_NUM_THREADS": "1"},
    at_start=DETERMINISTIC | {"OMP_NUM_THREADS": "1"},
    warn_only=False,
    algorithms_deterministic=True,
    cudnn_benchmark=False,
    num_threads=1,
    num_cores=8,
    dropouts={},
)
CONFIG = {"deterministic": True, "actor": {"attn_impl": "sdpa", "disable_dropout": False}}


def problems(process, config=CONFIG):
    return [(f.check, f.seen) for f in checks.check_process(config, process) if f.status == "problem"]


def without(name):
    return {n: v for n, v in GOOD.at_start.items() if n != name}


@pytest.mark.parametrize(
    ("change", "check", "words"),
    [
        ({"warn_only": True}, "warn_only", "only warn"),
        ({"at_start": without("CUBLAS_WORKSPACE_CONFIG")}, "environment", "was set after Python had started"),
        (
            {"now": GOOD.now | {"NCCL_PROTO": "LL"}, "at_start": without("NCCL_PROTO")},
            "environment",
            "NCCL_PROTO is 'LL'",
        ),
        ({"at_start": GOOD.at_start | {"NCCL_ALGO": "Tree"}}, "NCCL", "NCCL_ALGO is 'Tree'"),
        ({"cudnn_benchmark": True}, "autotune", "cudnn.benchmark is on"),
        ({"now": GOOD.now | {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}}, "autotune", "by timing"),
        ({"algorithms_deterministic": False}, "attention", "uses atomic adds"),
    ],
)
def test_each_cause_is_named(change, check, words):
    found = problems(replace(GOOD, **change))
    assert any(name == check and words in seen for name, seen in found), found


def test_deterministic_false_is_a_problem_and_dropout_and_threads_are_notes():
    assert ("mode", "deterministic is false") in problems(GOOD, CONFIG | {"deterministic": False})
    process = replace(GOOD, dropouts={"attention_dropout": 0.1}, at_start=without("OMP_NUM_THREADS"))
    notes = {f.check: f.seen for f in checks.check_process(CONFIG, process) if f.status == "note"}
    assert notes["dropout"] == "on: attention_dropout 0.1"
    assert notes["threads"] == "1 of 8 cores, chosen by torch"
    disabled = {"deterministic": True, "actor": {"attn_impl": "sdpa", "disable_dropout": True}}
    assert "dropout" not in {f.check for f in checks.check_process(disabled, process) if f.status == "note"}


def test_rows_of_a_record_in_no_canonical_order_are_named(tmp_path, monkeypatch):
    write_scripted_record(tmp_path / "record", num_ranks=2)
    assert checks.order_of_record(open_record(tmp_path / "record")).status == "ok"
    real = checks.Record.step

    class Unsorted:
        def __init__(self, step):
            self.manifest, self.inner = step.manifest, step

        def batch(self, rank, keys):
            batch = self.inner.batch(rank, keys)
            return {key: array[::-1] for key, array in batch.items()} if rank == 1 else batch

    monkeypatch.setattr(checks.Record, "step", lambda record, step: Unsorted(real(record, step)))
    found = checks.order_of_record(open_record(tmp_path / "record"))
    assert (found.status, found.seen) == ("problem", "rows of step 0, rank 1 are not in canonical order")


def take(folder: Path, config, keep=(), num_steps=1):
    folder.mkdir()
    bits = run_steps(config, num_steps, keep)
    save_bits(bits, folder, 0)
    write_repeat(folder, bits.outcomes, checks.check_process(CONFIG, bits.process))
    return folder


@pytest.fixture
def config(tmp_path, tiny_model):
    return lambda: tiny_config(tmp_path, tiny_model, 3)


def test_two_repeats_of_real_steps_have_the_same_bits(tmp_path, config):
    repeats = [take(tmp_path / name, config(), num_steps=2) for name in ("a", "b")]
    comparison = compare_repeats(*repeats)
    assert comparison.identical
    assert comparison.num_compared > 100
    outcomes = read_repeat(repeats[0])[0]
    assert [outcome.step for outcome in outcomes] == [0, 1]
    assert outcomes[0].checksums.keys() >= {"model.embed_tokens.weight"}
    assert outcomes[0].checksums != outcomes[1].checksums


def test_a_kernel_that_is_not_deterministic_is_seen_and_its_noise_measured(tmp_path, config, monkeypatch):
    calls, real = itertools.count(), objective.policy_loss

    def jittery(logprobs, *arguments, **options):
        loss, stats = real(logprobs, *arguments, **options)
        return loss * (1 + 1e-3 * next(calls)), stats

    monkeypatch.setattr(objective, "policy_loss", jittery)
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    repeats = [take(tmp_path / name, config(), names) for name in ("a", "b")]
    assert not compare_repeats(*repeats).identical
    noise = measure_noise(*repeats)
    assert sorted(one.name for one in noise) == names
    for one in noise:
        assert 0 < one.num_different <= one.num_elements
        assert 1e-4 < one.gradient_share < 0.1
        assert one.weight > 0


class Scripted(Repeats):
    """Runs whose loss in the last step is `bits(number of the run)`."""

    def run(self, folder, keep=()):
        folder.mkdir()
        losses = (1.0, 1.0 + self.bits(next(self.numbers)))
        outcomes = [Outcome(step, step + 1, (), {"loss": loss}, {}) for step, loss in enumerate(losses)]
        write_repeat(folder, outcomes, [])
        return folder


@pytest.mark.parametrize(
    ("num_runs", "bits", "step"),
    [
        (2, lambda number: 0.0, None),
        (2, float, 1),
        (3, lambda number: float(number == 2), 1),  # more runs find what two miss
        (8, lambda number: float(number == 7), 1),
    ],
)
def test_a_run_that_differs_in_any_repeat_is_found(num_runs, bits, step, tmp_path):
    repeats = Scripted([], 1, 2, num_runs, False)
    object.__setattr__(repeats, "bits", bits)
    object.__setattr__(repeats, "numbers", iter(range(100)))
    report = repeat_steps(tmp_path, repeats)
    assert (report.identical, report.num_runs, report.step) == (step is None, num_runs, step)
