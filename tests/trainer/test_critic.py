"""PPO with a critic in the complete trainer.

Tested against plain torch and numpy, other ranks, its record and its checkpoints.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from areal_debug.wiring import recorder_of
from recorder import Recording, RecordingOptions, open_record
from replayer.anchors import AnchorPolicy, AnchorTaker
from replayer.diff import diff_records
from replayer.goto import goto
from replayer.request import Request
from replayer.rerun import noise_reruns
from replayer.run import replay_and_compare
from tests.trainer import critic_program

PROGRAM = Path(__file__).with_name("critic_program.py")
build, measure_into = critic_program.build, critic_program.measure_into
norms_of_weights = critic_program.norms_of_weights


def values_of(model, inputs):
    """Compute the scores of a Hugging Face classifier at every real position, one row at a time."""
    values = torch.zeros(inputs["attention_mask"].shape)
    for row, mask in enumerate(inputs["attention_mask"]):
        ids = inputs["input_ids"][row, mask][None].long()
        values[row, : mask.sum()] = model.score(model.model(ids).last_hidden_state)[0, :, 0]
    return values


def gae_by_numpy(inputs, discount, lam):
    """Compute advantages and returns in float64, by sums over the tokens in the loss mask."""
    advantages = np.zeros(inputs["values"].shape)
    for row, mask in enumerate(inputs["loss_mask"].bool().numpy()):
        steps, values = np.flatnonzero(mask), inputs["values"][row].double().numpy()
        length = int(inputs["attention_mask"][row].sum())
        is_truncated = inputs["finish_reason"][row] == critic_program.LENGTH
        chosen = np.append(values[steps], values[length - 1] if is_truncated else 0.0)
        delta = discount * chosen[1:] - chosen[:-1]
        delta[-1] += 0.0 if is_truncated else float(inputs["rewards"][row])
        for k, step in enumerate(steps):
            advantages[row, step] = ((discount * lam) ** np.arange(len(steps) - k) * delta[k:]).sum()
    returns = np.where(inputs["loss_mask"].bool(), advantages + inputs["values"].double().numpy(), 0.0)
    return advantages, returns


def test_values_advantages_and_the_update_are_those_of_plain_torch(tiny_model, tmp_path):
    kept, steps = [], []
    overrides = [
        "saver.freq_steps=1",
        "actor.adv_norm=null",
        "actor.mask_no_eos_with_zero=true",
        "critic.eps_clip=0.02",
        "critic.optimizer.gradient_clipping=1e9",
    ]
    with build(
        tiny_model,
        tmp_path,
        3,
        *overrides,
        observers=[critic_program.keep(kept, "advantages", "inputs"), measure_into(steps)],
    ) as trainer:
        trainer.train()
    assert kept[0]["values"].abs().max() == 0  # a new head
    for inputs in kept:
        advantages, returns = gae_by_numpy(inputs, 0.97, 0.9)
        np.testing.assert_allclose(inputs["advantages"], advantages, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(inputs["returns"], returns, rtol=1e-4, atol=1e-5)
    before, after = (saved_critic(tmp_path, step) for step in (1, 2))
    inputs, stats = kept[2], steps[2]
    values = values_of(before, inputs)
    assert inputs["values"].abs().max() > 0.01
    torch.testing.assert_close(inputs["values"], values.detach(), rtol=1e-4, atol=1e-5)
    mask = inputs["loss_mask"].bool()
    clipped = inputs["values"] + (values - inputs["values"]).clamp(-0.02, 0.02)
    errors = torch.maximum((values - inputs["returns"]) ** 2, (clipped - inputs["returns"]) ** 2) / 2
    errors[mask].mean().backward()
    with torch.no_grad():
        for parameter in before.parameters():
            parameter -= stats["ppo_critic/lr"] * (
                parameter.grad + 0.01 * parameter
            )  # of SGD with weight decay
    for (name, expected), found in zip(before.named_parameters(), after.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=name)
    assert stats["ppo_critic/critic_loss/avg"] == pytest.approx(errors[mask].mean().item(), rel=1e-4)
    assert stats["ppo_critic/new_value/avg"] == pytest.approx(values[mask].mean().item(), rel=1e-4)
    assert stats["ppo_critic/target_value/max"] == pytest.approx(inputs["returns"][mask].max().item())
    explained = 1 - (inputs["returns"] - inputs["values"])[mask].var() / inputs["returns"][mask].var()
    assert stats["ppo_critic/explained_variance"] == pytest.approx(explained.item(), rel=1e-3)


def saved_critic(folder, step):
    [saved] = folder.glob(f"checkpoints/*/tiny/test/critic/globalstep{step}")
    return AutoModelForSequenceClassification.from_pretrained(saved, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def teacher_options(tiny_model, tmp_path_factory):
    """Options of a teacher and a reference, so that every loss is included."""
    teacher = critic_program.make_teacher(tmp_path_factory.mktemp("teacher"))
    return [
        f"ref.path={tiny_model}",
        "ref.dtype=float32",
        "actor.kl_ctl=0.1",
        f"teacher.path={teacher}",
        "teacher.dtype=float32",
        "teacher.rl_loss_weight=0.5",
        "teacher.distill_loss_weight=0.1",
    ]


@pytest.fixture(scope="module")
def undivided(tiny_model, tmp_path_factory, teacher_options):
    """Train on one rank with one micro-batch; return (statistics of each step, weight norms)."""
    steps, folder = [], tmp_path_factory.mktemp("undivided")
    limit = "actor.mb_spec.max_tokens_per_mb=4096"
    with build(tiny_model, folder, 3, limit, *teacher_options, observers=[measure_into(steps)]) as trainer:
        trainer.train()
        return steps, norms_of_weights(trainer)


def assert_same(found, expected):
    """Compare within the noise floor of float32 sums over three steps."""
    (steps, weights), (expected_steps, expected_weights) = found, expected
    for step, expected_step in zip(steps, expected_steps, strict=True):
        assert computed(step) == pytest.approx(computed(expected_step), rel=2e-4, abs=2e-6)
    assert weights == pytest.approx(expected_weights, rel=1e-5)


TREES = "actor.enable_tree_training=true"


@pytest.mark.long
@pytest.mark.parametrize("options", [(), (TREES,)], ids=["packed", "trees"])
@pytest.mark.parametrize("split", ["d2", "d1c2", "d1t2"])
def test_ranks_do_not_change_what_is_learned(
    split, options, tiny_model, tmp_path, torchrun, teacher_options, undivided
):
    given = (f"allocation_mode=embedded|fsdp:{split}", *options, *teacher_options)
    found = torchrun(PROGRAM, 2, tiny_model, tmp_path, *given)
    assert_same((found["steps"], found["weights"]), undivided)


def computed(stats):
    """Return the statistics that do not depend on the number of micro-batches or ranks."""
    divided = ("num_micro_batches", "__count", "timeperf/")
    return {name: value for name, value in stats.items() if not any(part in name for part in divided)}


def recorded(folder):
    """Return a factory of a recorder in scope `full`, with anchors before every second step."""

    def make(trainer):
        record = recorder_of(trainer, folder, RecordingOptions(Recording("full"), text=False))
        anchors = AnchorTaker(folder, trainer.ranks.rank, AnchorPolicy(every_steps=2))

        def observe(event, **facts):
            record(event, **facts)
            anchors(event, **facts)

        return observe

    return make


@pytest.mark.long
def test_a_recorded_run_replays_bitwise_and_actor_and_critic_are_distinguished(tiny_model, tmp_path):
    folder = tmp_path / "record"
    with build(tiny_model, tmp_path / "run", 4, observers=[recorded(folder)]) as trainer:
        trainer.train()
        num_parameters = sum(
            1 for engine in trainer.engines.values() for _ in engine.model.named_parameters()
        )
    record = open_record(folder)
    step = record.step(3)
    assert "critic.score.weight" in step.outcome(0).checksums
    assert len(step.outcome(0).checksums) == num_parameters
    assert [len(update["rows"]) for update in step.plan(0).details["critic"]] == [critic_program.NUM_ROWS]
    assert np.abs(step.learning(0)["values"]).max() > 0
    report = replay_and_compare(Request(str(folder), 0, 3))
    assert report.identical, report.first_different
    assert report.steps[-1].num_parameters == num_parameters
    own, of_values = noise_reruns(record, Request(str(folder), 0, 3), report)[-1].settings
    assert own.replace("actor", "critic") == of_values  # the noise of values is measured as well
    reached = goto(str(folder), 3, lambda scene: None)  # from the anchor, which contains the critic as well
    assert (reached.anchor, reached.faithful, reached.num_parameters) == (2, True, num_parameters)

    with build(
        tiny_model,
        tmp_path / "other",
        2,
        "critic.optimizer.lr=0.05",
        observers=[recorded(tmp_path / "slower")],
    ) as trainer:
        trainer.train()
    differences = diff_records(record, open_record(tmp_path / "slower"))
    assert (differences.step, differences.first.stage, differences.first.name) == (
        0,
        "weights",
        "lr of the critic",
    )
    assert differences.verdict.cause == "configuration"
