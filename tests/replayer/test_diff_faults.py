"""Single faults in real tiny runs: `diff` reports step, stage, tensor and cause of each."""

from dataclasses import dataclass

import pytest
import torch

import recorder.header
from areal_core.trainer.objective import PolicyObjective
from areal_debug.wiring import recorder_of
from recorder import Recording, RecordingOptions, open_record
from recorder.environment import environment
from replayer.commits.layers import compare_calls, trace_layers
from replayer.diff import diff_records
from replayer.request import Request
from replayer.run import replay

from .conftest import tiny_config, train_sampled

NUM_STEPS = 2
FULL = RecordingOptions(Recording("full"))


@pytest.fixture(scope="module", autouse=True)
def quiet_environment():
    """Replace the fingerprint by one without the state of the repository, which may change."""
    patch = pytest.MonkeyPatch()
    fixed = {"commit": "0" * 40, "dirty_sha256": None}
    patch.setattr(recorder.header, "environment", lambda: environment() | {"code": fixed})
    yield
    patch.undo()


def train(folder, model, **changes):
    """Train the tiny configuration, recorded in full."""
    config = tiny_config(folder, model, NUM_STEPS, **changes)
    train_sampled(config, [lambda trainer: recorder_of(trainer, folder / "record", FULL)])
    return folder / "record"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, tiny_model):
    return train(tmp_path_factory.mktemp("good"), tiny_model)


@dataclass(frozen=True)
class Fault:
    """A fault in a replay of the good record, and the expected report of `diff`."""

    stage: str
    name: str
    cause: str
    settings: tuple[str, ...] = ()
    edit: str | None = None
    step: int = 0


EDIT = "def edit(batch, step):\n"
FAULTS = {
    "learning rate": Fault("weights", "lr", "configuration", ("actor.optimizer.lr=2e-3",)),
    "clip": Fault("loss", "loss of rank 0", "configuration", ("actor.eps_clip=0.0001",)),
    "discount": Fault("advantages", "returns", "configuration", ("actor.discount=0.9",)),
    "dtype": Fault("logprobs", "prox_logp", "configuration", ("actor.dtype=bfloat16",)),
    "minibatches": Fault("loss", "rows of rank 0", "configuration", ("actor.ppo_n_minibatches=1",)),
    "reward": Fault("batch", "rewards", "input", edit="    batch['rewards'][3] += 0.25\n", step=1),
    "dropped sample": Fault(
        "batch",
        "rows",
        "input",
        edit="    from areal_core.data.batch import select_rows\n"
        "    batch = select_rows(batch, [row for row in range(len(batch['rewards'])) if row != 5])\n",
        step=1,
    ),
}


def rerun(recorded, folder, fault=None, observers=()):
    """Replay the good record with a fault and record the results."""
    edit = None
    if fault is not None and fault.edit is not None:
        edit = folder / "edit.py"
        edit.write_text(
            f"{EDIT}    if step != {fault.step}:\n        return batch\n{fault.edit}    return batch\n"
        )
    settings = () if fault is None else fault.settings
    request = Request(str(recorded), 0, NUM_STEPS - 1, settings=settings, edit=edit and str(edit))

    def record_again(record, trainer, request):
        return recorder_of(trainer, folder / "record", FULL)

    replay(request, [*observers, record_again])
    return folder / "record"


def diff(left, right):
    return diff_records(open_record(left), open_record(right))


def assert_named(report, fault):
    first = report.first
    found = (report.step, first.stage, report.verdict.cause)
    assert found == (fault.step, fault.stage, fault.cause), report.differences[:3]
    assert first.name.startswith(fault.name)
    if fault.settings:
        assert report.verdict.reasons[0].where == fault.settings[0].split("=")[0]


def test_a_replay_is_the_same_as_its_record(recorded, tmp_path):
    report = diff(recorded, rerun(recorded, tmp_path))
    assert (report.same, report.num_compared, report.differences) == (True, NUM_STEPS, ())


# Scripted records have a difference in every stage (test_diff.py); of real runs, these two do.
EVERYDAY = {"dtype", "reward"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in EVERYDAY)) for name in FAULTS]
)
def test_the_stage_of_every_planted_fault_is_named(recorded, tmp_path, name):
    assert_named(diff(recorded, rerun(recorded, tmp_path, FAULTS[name])), FAULTS[name])


@pytest.mark.long
def test_what_changes_the_rollout_is_named(recorded, tmp_path, tiny_model):
    report = diff(recorded, train(tmp_path, tiny_model, gconfig__max_new_tokens=7))
    assert (report.step, report.first.stage, report.verdict.cause) == (0, "batch", "configuration")
    assert report.verdict.reasons[0].where == "gconfig.max_new_tokens"


@pytest.mark.long
def test_another_model_file_is_an_input(recorded, tmp_path):
    from areal_core.testing import make_tiny_model

    report = diff(recorded, train(tmp_path, make_tiny_model(tmp_path / "model", seed=5)))
    assert (report.step, report.first.stage, report.verdict.cause) == (0, "batch", "input")
    assert [item.where.split(".")[0] for item in report.verdict.reasons] == ["model"] * len(
        report.verdict.reasons
    )


@pytest.mark.long
def test_a_library_flag_is_the_environment(recorded, tmp_path):
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        report = diff(recorded, rerun(recorded, tmp_path))
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert (report.first.stage, report.verdict.cause) == ("logprobs", "environment")
    assert [item.where for item in report.verdict.reasons] == ["torch.attention_backends.flash"]


def flip_last_bit(parameter):
    """Emulate an atomic addition in another order."""
    parameter.grad.view(-1)[0:1].view(torch.int32).bitwise_xor_(1)


def test_a_last_bit_of_a_gradient_is_kernel_noise(recorded, tmp_path):
    def disturb(record, trainer, request):
        def observe(event, **facts):
            if event == "gradients" and facts["step"] == 1 and facts["minibatch"] == 1:
                flip_last_bit(dict(trainer.actor.model.named_parameters())["model.norm.weight"])

        return observe

    report = diff(recorded, rerun(recorded, tmp_path, observers=[disturb]))
    assert (report.step, report.first.stage, report.first.name) == (1, "gradient", "model.norm.weight")
    assert (report.first.minibatch, report.verdict.cause) == (1, "kernel noise")


@pytest.mark.long
def test_code_that_no_record_knows_of_is_not_taken_for_noise(recorded, tmp_path, monkeypatch):
    loss = PolicyObjective.loss
    monkeypatch.setattr(PolicyObjective, "loss", lambda self, *arguments: loss(self, *arguments) * 1.01 + 0.1)
    report = diff(recorded, rerun(recorded, tmp_path))
    assert (report.step, report.first.stage, report.verdict.cause) == (0, "loss", "unknown")
    assert "is more than the noise of float32" in report.verdict.why


def trace(recorded, *observers):
    """Return the calls of layers in step 1 of a replay, rank by rank."""
    traces = []
    request = Request(str(recorded), 1, 1)
    replay(request, [*observers, trace_layers(1, traces.extend)])
    return traces


@pytest.mark.long
def test_the_first_layer_that_differs_is_named(recorded):
    def disturb(record, trainer, request):
        layer = dict(trainer.actor.model.named_modules())["model.layers.1.mlp.down_proj"]

        def observe(event, **facts):
            if event == "batch" and facts["step"] == 1:
                layer.register_forward_hook(lambda module, arguments, result: result * 1.0001)

        return observe

    calls = trace(recorded)
    report = compare_calls(1, calls, trace(recorded, disturb))
    assert (report.name, report.input_differs, report.rank) == ("model.layers.1.mlp.down_proj", False, 0)
    same = compare_calls(1, calls, trace(recorded))
    assert (same.name, same.index, same.num_calls) == (None, len(calls[0]), len(calls[0]))
    assert len(calls[0]) > 100
