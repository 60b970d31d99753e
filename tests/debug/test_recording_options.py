"""Recording options on real tiny runs: their files, and the effect of a failing disk."""

from pathlib import Path

import pytest
import torch
import yaml

import recorder.writer
from areal_core.config import PPOConfig, config_from_dict
from areal_core.data import get_dataset
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import make_recorder
from recorder import RecordingFailed, open_record, verify

HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_config(folder, model, **debug):
    tree = yaml.safe_load((HERE / "tiny.yaml").read_text())
    tree |= {"cluster": {"fileroot": str(folder / "files")}, "total_train_steps": 4}
    tree["actor"] |= {"path": str(model)}
    tree["debug"] = {"path": str(folder / "record"), **debug}
    return tree


def train(tree, **arguments):
    config = config_from_dict(tree, PPOConfig)
    dataset = get_dataset(config.train_dataset)
    with PPOTrainer(config, dataset, observers=[make_recorder], print_steps=False, **arguments) as trainer:
        trainer.train(workflow_kwargs={"reward_fn": f"{HERE}/rewards.py:even_share"})
        return open_record(config.debug.path)


@pytest.mark.parametrize(
    ("options", "steps", "removed", "every"),
    [
        ({"max_keep": 1, "pin_steps": [1]}, (1, 3), ((0, 0), (2, 2)), 1),
        pytest.param({"dump_every": 2, "dump_queue_steps": 0}, (0, 2), (), 2, marks=pytest.mark.long),
        pytest.param({"dump_steps": [1, 2], "dump_scope": "rollout"}, (1, 2), (), 1, marks=pytest.mark.long),
    ],
)
def test_limits_and_sampling_hold_in_a_real_run(tmp_path, tiny_model, options, steps, removed, every):
    record = train(make_config(tmp_path, tiny_model, **options))
    assert (record.steps, record.gaps.removed) == (steps, removed)
    assert record.header.recording.every == every
    assert verify(tmp_path / "record").intact


def test_the_full_scope_contains_what_was_trained_on(tmp_path, tiny_model):
    tree = make_config(tmp_path, tiny_model, dump_scope="full")
    tree["ref"] = {"path": str(tiny_model), "dtype": "float32"}
    tree["actor"] |= {"kl_ctl": 0.1}
    step = train(tree).step(1)
    learning, batch, outcome = step.learning(0), step.batch(0), step.outcome(0)
    assert {"prox_logp", "ref_logp", "advantages", "returns"} <= set(learning)
    trained = batch["loss_mask"].astype(bool)
    # on policy: the trainer's logprobs are the engine's, a position earlier
    proximal = learning["prox_logp"][:-1][trained[1:]]
    assert abs(proximal - batch["logprobs"][trained]).max() < 1e-4
    # one step has moved the weights away from the reference
    assert abs(learning["prox_logp"] - learning["ref_logp"]).max() > 1e-4
    assert len(outcome.minibatches) == 2
    assert outcome.minibatches[1].weights == outcome.checksums
    assert outcome.minibatches[0].gradients.keys() == outcome.checksums.keys()
    assert outcome.minibatches[0].weights != outcome.checksums


def fail_in_step(monkeypatch, step):
    write_rank = recorder.writer.write_rank

    def failing(folder, rank, num_ranks, recorded):
        if recorded.step == step:
            raise OSError(28, "No space left on device")
        return write_rank(folder, rank, num_ranks, recorded)

    monkeypatch.setattr(recorder.writer, "write_rank", failing)


@pytest.mark.parametrize("queue_steps", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_full_disk_stops_the_run_or_the_recording_as_configured(
    tmp_path, tiny_model, monkeypatch, capfd, queue_steps
):
    fail_in_step(monkeypatch, 1)
    tree = make_config(tmp_path / "stop", tiny_model, dump_queue_steps=queue_steps)
    with pytest.raises(RecordingFailed, match="No space left on device"):
        train(tree)
    assert open_record(tmp_path / "stop/record").steps == (0,)
    tree = make_config(
        tmp_path / "on", tiny_model, dump_queue_steps=queue_steps, dump_when_failing="continue"
    )
    assert train(tree).steps == (0,)
    stderr = capfd.readouterr().err
    assert "the run continues without recording" in stderr
    assert "the record is not complete" in stderr
    assert len((next((tmp_path / "on/files").rglob("stats.jsonl"))).read_text().splitlines()) == 4


@pytest.mark.long
def test_a_continued_run_continues_its_record(tmp_path, tiny_model):
    tree = make_config(tmp_path, tiny_model)
    tree["recover"] = {"mode": "auto", "freq_steps": 1}
    assert train(tree, stop_after=1).steps == (0, 1)
    record = train(tree)
    assert record.steps == (0, 1, 2, 3)
    assert [record.step(step).outcome(0).version for step in record.steps] == [1, 2, 3, 4]
    assert verify(tmp_path / "record").intact
