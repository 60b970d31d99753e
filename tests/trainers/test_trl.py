"""Record and replay of TRL's own trainers: values, identity to the bit, and differences named."""

import io
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from crc32c import crc32c

from areal_core.data.image_rows import shape_rows
from areal_core.testing.tiny_vision import make_tiny_vision_model
from areal_debug.trl import CannotReplay, layouts, record, replay
from recorder import open_record, verify
from recorder.trainers.recorder import Recorder
from replayer.trl.observing import Generators, samples_of_step
from replayer.trl.one_step import trainer_of
from tests.forks import COMMAND, run_forked

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")
SAME = {
    "default": {},
    "num_iterations": {"num_iterations": 2},
    "gradient_accumulation": {"gradient_accumulation_steps": 2},
    "several_updates_of_a_generation": {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
    "several_generations_of_an_update": {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
    "generations_across_updates": {"steps_per_generation": 3, "gradient_accumulation_steps": 2},
    "reference": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "unshuffled": {"shuffle_dataset": False},
    "truncated_masked": {"mask_truncated_completions": True},
    "checkpointing": {"gradient_checkpointing": True, "bf16": True},
    "reward_of_each_normalised": {"multi_objective_aggregation": "normalize_then_sum"},
    **{loss: {"loss_type": loss, "num_iterations": 2} for loss in LOSSES},
}
CHANGED = {
    # what is changed: options, stage, row
    "learning_rate": ({"learning_rate": 2e-3}, "learning rate", None),
    "advantages": ({"scale_rewards": "none"}, "advantages", 0),
    "reward_weights": ({"reward_weights": [1.0, 2.0]}, "rewards", 0),
    "temperature": ({"temperature": 0.7}, "log-probs", None),
    "loss": ({"loss_type": "dr_grpo"}, "loss", None),
    "clip": ({"epsilon": 1e-9}, "gradient norm", None),
    "optimizer": ({"adam_beta1": 0.5}, "weights", None),
    "iterations": ({"num_iterations": 2}, "order", None),
    "data": ({"first": 3}, "prompts", 0),
}


@pytest.fixture(scope="module")
def runs():
    """The module of real trainers, which needs TRL (`pip install areal-debug[dev]`)."""
    from . import trl_runs

    return trl_runs


@pytest.fixture(scope="module")
def model(runs, tmp_path_factory):
    return runs.tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def default(runs, model, tmp_path_factory):
    """A recorded run of four steps, with its trainer and what its reward functions got."""
    folder, seen = tmp_path_factory.mktemp("default"), []

    def keep(prompts, completions, completion_ids, **rest):
        seen.append((list(prompts), list(completions), list(completion_ids)))
        return runs.digit_share(completions)

    trainer = runs.grpo(model, folder / "out", rewards=(keep, runs.odd_length))
    record(trainer, folder / "record")
    trainer.train()
    return folder / "record", trainer, seen


def recorded(trainer, folder: Path) -> Path:
    record(trainer, folder)
    trainer.train()
    return folder


def test_record_has_the_values_of_trl(runs, default):
    folder, trainer, seen = default
    opened = open_record(folder)
    assert (opened.steps, opened.header.trainer) == ((0, 1, 2, 3), "trl")
    assert verify(folder).problems == ()
    assert opened.header.config["learning_rate"] == 1e-3
    assert "hf_abcdef" not in (folder / "record.json").read_text()
    for number, (prompts, completions, completion_ids) in enumerate(seen):
        step = opened.step(number)
        batch, samples = step.batch(0), samples_of_step(step, 0)
        assert step.manifest.version == number + 1
        assert batch["prompt_id"].tolist() == [number] * 4
        assert not step.known(0, "logprobs").any()  # TRL keeps none without vLLM
        assert np.isnan(batch["logprobs"][batch["loss_mask"] == 1]).all()
        digits, odd = runs.digit_share(completions), runs.odd_length(completions)
        rewards = np.float32([a + (b or 0) for a, b in zip(digits, odd, strict=True)])
        np.testing.assert_allclose(batch["rewards"], rewards, rtol=1e-6)
        centred = rewards - rewards.mean()
        for row, sample in enumerate(samples):
            size = sample.prompt_length
            assert trainer.processing_class.decode(sample.tokens[:size]) == prompts[row]
            assert sample.tokens[size:].tolist() == completion_ids[row]
            assert sample.loss_mask.tolist() == [0] * size + [1] * len(completion_ids[row])
            assert sample.scores["keep"] == np.float32(digits[row])
            assert math.isnan(sample.scores["odd_length"]) == (odd[row] is None)
            np.testing.assert_allclose(
                sample.learning["advantages"][size:], centred[row] / (rewards.std(ddof=1) + 1e-4), rtol=1e-4
            )
        logged = trainer.state.log_history[number]
        stats = step.outcome(0).stats
        clipped = np.mean([sample.finish_reason == 1 for sample in samples])
        assert clipped == stats["completions/clipped_ratio"]
        assert stats["grad_norm"] == pytest.approx(float(logged["grad_norm"]), rel=1e-5)
        assert stats["reward"] == pytest.approx(rewards.mean(), rel=1e-5)
        assert [line["prompt"] for line in step.text(0)] == prompts
    trained = trainer.model.named_parameters()
    weights = {name: f"{crc32c(part.detach().numpy().tobytes()):08x}" for name, part in trained}
    assert opened.step(3).outcome(0).checksums == weights


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] if options else []) for name, options in SAME.items()],
)
def test_replay_has_the_same_bits(runs, model, tmp_path, name, capsys):
    options = SAME[name]
    folder = recorded(runs.grpo(model, tmp_path / "out", **options), tmp_path / "record")
    assert verify(folder).problems == ()
    trainer = runs.grpo(model, tmp_path / "again", **options)
    result = replay(trainer, folder)
    assert result.identical, str(result)
    assert result.num_steps == result.num_recorded == len(open_record(folder).steps)
    assert capsys.readouterr().out.splitlines()[-1].startswith("Identical: ")
    assert "compute_loss" not in vars(trainer)
    assert "_generate" not in vars(trainer)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*rollout_func")
def test_replay_of_an_engines_log_probs_and_a_tools_tokens(runs, model, tmp_path):
    """The corrections for an engine's log-probs are applied without the engine."""
    trainer = runs.grpo(model, tmp_path / "out", rollout_func=runs.rollout)
    trainer.use_vllm, trainer._last_loaded_step = True, 0
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    folder = recorded(trainer, tmp_path / "record")
    step = open_record(folder).step(0)
    for sample in samples_of_step(step, 0):
        size = sample.prompt_length
        assert sample.loss_mask[size:].tolist() == [1, 1, 0, 1, 1, 1]
        assert sample.extras["tool_mask"][size:].tolist() == [1, 1, 0, 1, 1, 1]
        wanted = np.float32([-4.5, -4.6, -4.7, -4.8, -4.9, np.nan])  # as given, of tools too
        np.testing.assert_array_equal(sample.logprobs[size:], wanted)
        assert "current_logp" in sample.learning
    again = runs.grpo(model, tmp_path / "again", rollout_func=runs.rollout)
    assert replay(again, folder).identical
    assert not again.use_vllm


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGED)
def test_replay_names_the_first_difference(runs, model, default, tmp_path, name):
    options, stage, row = CHANGED[name]
    result = replay(runs.grpo(model, tmp_path, **options), default[0])
    assert not result.identical
    assert (result.step, result.stage) == (0, stage)
    assert row is None or result.row == row
    assert [option.where for option in result.options if option.where in options] == [
        option for option in options if option != "first"
    ]
    assert not list(tmp_path.glob("**/*"))  # nothing was saved


def changed_record(folder: Path, new: Path, number: int, row: int, change) -> Path:
    """Write a record again with one sample changed."""
    opened = open_record(folder)
    with Recorder(new, config=opened.header.config, model="m", trainer="trl", text=False) as recorder:
        for step in map(opened.step, opened.steps):
            samples = samples_of_step(step, 0)
            if step.manifest.step == number:
                samples[row] = change(samples[row])
            recorder.step(
                step.manifest.step,
                [replace(sample, group=0) for sample in samples],
                version=step.manifest.version,
                details=step.plan(0).details,
            )
    return new


def other_token(sample):
    tokens = sample.tokens.copy()
    tokens[sample.prompt_length + 1] ^= 1
    return replace(sample, tokens=tokens)


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "stage"),
    [
        (other_token, "log-probs"),
        (lambda sample: replace(sample, reward=sample.reward + 1), "rewards"),
    ],
)
def test_replay_finds_a_changed_value_of_the_record(runs, model, default, tmp_path, change, stage):
    folder = changed_record(default[0], tmp_path / "changed", 1, 2, change)
    result = replay(runs.grpo(model, tmp_path / "out"), folder)
    assert (result.step, result.stage, result.row) == (1, stage, 2)


@pytest.mark.long
def test_a_run_that_resumes_in_the_middle_of_a_generation_is_replayed_over_it(runs, model, tmp_path):
    """TRL then generates anew, and leaves the second update of the generation before."""
    saving = {"save_strategy": "steps", "save_steps": 3, "num_iterations": 2, "max_steps": 6}
    folder = recorded(runs.grpo(model, tmp_path / "out", **saving), tmp_path / "record")
    resumed = runs.grpo(model, tmp_path / "out", **saving)
    record(resumed, folder)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    steps = [open_record(folder).step(number) for number in open_record(folder).steps]
    assert [step.plan(0).details["optimizer_step"] for step in steps] == [0, 2, 3, 5]
    again = replay(runs.grpo(model, tmp_path / "again", **saving), folder)
    assert (again.identical, again.num_steps) == (True, 4)


@pytest.mark.long
def test_a_resumed_run_continues_its_record_and_is_replayed_from_its_checkpoint(runs, model, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    folder = recorded(runs.grpo(model, tmp_path / "out", **saving), tmp_path / "record")
    first = open_record(folder).step(3).outcome(0).checksums
    resumed = runs.grpo(model, tmp_path / "out", **saving)
    record(resumed, folder)
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    resumed.train(resume_from_checkpoint=checkpoint)
    assert open_record(folder).steps == (0, 1, 2, 3)
    assert verify(folder).problems == ()
    assert open_record(folder).step(3).outcome(0).checksums == first
    again = replay(runs.grpo(model, tmp_path / "again", **saving), folder, resume_from_checkpoint=checkpoint)
    assert (again.identical, again.num_steps) == (True, 2)


@pytest.mark.long
def test_two_processes_record_their_own_rows_and_replay_them(runs, model, tmp_path):
    """A group of four lies on two processes of two rows."""

    def launch(verb: str) -> str:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [str(HERE / "trl_ranks.py"), verb, str(model), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=400)
        assert done.returncode == 0, done.stderr
        return done.stdout

    launch("record")
    folder = tmp_path / "record"
    opened = open_record(folder)
    assert (opened.header.num_ranks, opened.steps) == (2, (0, 1, 2, 3))
    assert verify(folder).problems == ()
    for rank in (0, 1):
        batch = opened.step(1).batch(rank)
        assert batch["prompt_id"].tolist() == [1, 1]
        assert batch["sample_id"].tolist() == [2 * rank, 2 * rank + 1]
    assert "Identical: TRL computed the same bits in 4 of 4 recorded steps." in launch("replay")
    changed = launch("change")
    assert "step 0 (optimizer step 0), advantages, row 0" in changed
    assert changed.count("Different:") == 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=["one", "accumulated"])
def test_batches_of_supervised_trainers(runs, model, tmp_path, kind, options):
    build = getattr(runs, kind)
    trainer = build(model, tmp_path / "out", **options)
    folder = recorded(trainer, tmp_path / "record")
    assert verify(folder).problems == ()
    opened = open_record(folder)
    step = opened.step(0)
    samples, batch = samples_of_step(step, 0), step.batch(0)
    assert opened.steps == (0, 1, 2, 3)
    assert np.isnan(batch["rewards"]).all()
    assert not step.known(0, "rewards").any()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [opened.step(n).outcome(0).stats["loss"] for n in opened.steps] == pytest.approx(logged)
    texts = [trainer.processing_class.decode(sample.tokens[sample.prompt_length :]) for sample in samples]
    if kind == "dpo":
        pairs = 2 * options.get("gradient_accumulation_steps", 1)
        assert batch["prompt_id"].tolist() == [pair for pair in range(pairs) for _ in range(2)]
        assert all("no" in text for text in texts[1::2])
        assert not any("no" in text for text in texts[::2])
    else:
        assert len(samples) == 3 * options.get("gradient_accumulation_steps", 1)
        for sample, text in zip(samples, texts, strict=True):
            prompt = trainer.processing_class.decode(sample.tokens[: sample.prompt_length])
            assert text.startswith(str(eval(prompt.rstrip("=")))), (prompt, text)
    assert replay(build(model, tmp_path / "again", **options), folder).identical
    other = replay(build(model, tmp_path / "again", **options, learning_rate=2e-3), folder)
    assert (other.step, other.stage) == (0, "learning rate")
    shuffled = replay(build(model, tmp_path / "again", **options, seed=5), folder)
    assert (shuffled.step, shuffled.stage, shuffled.row) == (0, "batch", 0)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def test_generators_keep_only_what_changed_and_restore_it():
    generators = Generators(torch.device("cpu"))
    state = torch.get_rng_state()
    try:
        generators.leave()
        assert generators.changes() == {}
        torch.rand(1)
        changes = generators.changes()
        expected = torch.rand(5)
        generators.restore(changes)
        assert torch.equal(torch.rand(5), expected)
    finally:
        torch.set_rng_state(state)


@pytest.mark.long
def test_images_of_prompts_are_recorded(runs, tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    make_tiny_vision_model(tmp_path / "model", family="qwen2_5_vl")
    pictures = [pillow.open(io.BytesIO(row["images"][0])) for row in shape_rows(num_rows=8, size=32)]
    trainer = runs.grpo_with_pictures(tmp_path / "model", tmp_path / "out", pictures, max_steps=1)
    record(trainer, tmp_path / "record")
    trainer.train()
    step = open_record(tmp_path / "record").step(0)
    names = step.pictures_of_rows(0)
    assert [len(row) for row in names] == [1] * step.num_rows(0)
    prompts = step.batch(0, ["prompt_id"])["prompt_id"].tolist()
    of_prompt = {prompt: row[0][0] for prompt, row in zip(prompts, names, strict=True)}
    assert all(row[0][0] == of_prompt[prompt] for prompt, row in zip(prompts, names, strict=True))
    recorded = [pillow.open(io.BytesIO(step.picture(*row[0]))).convert("RGB").tobytes() for row in names]
    assert set(recorded) <= {picture.convert("RGB").tobytes() for picture in pictures}
    assert step.plan(0).details["not_recorded"] == []
    assert verify(tmp_path / "record").intact
    with pytest.raises(CannotReplay, match="run with images, which a replay does not give to TRL"):
        replay(trainer, tmp_path / "record")


@pytest.mark.parametrize(
    ("options", "is_wrong", "named"),
    [
        pytest.param({"gradient_accumulation_steps": 2}, False, set(), marks=pytest.mark.long),
        (
            {"loss_type": "bnpo"},
            False,
            {"loss_type=bnpo: TRL documents that it divides by the tokens of each micro-batch"},
        ),
        ({"gradient_accumulation_steps": 2}, True, {"divided by the micro-batches"}),
    ],
    ids=["equal", "documented", "divided again"],
)
def test_layouts_of_a_step_by_trls_own_trainer(runs, model, tmp_path, monkeypatch, options, is_wrong, named):
    folder = recorded(runs.grpo(model, tmp_path / "out", max_steps=2, **options), tmp_path / "record")
    loss = runs.GRPOTrainer._compute_loss

    def divided_again(self, *given):
        return loss(self, *given) / self.current_gradient_accumulation_steps

    if is_wrong:
        monkeypatch.setattr(runs.GRPOTrainer, "_compute_loss", divided_again)
    found = layouts(partial(trainer_of, open_record(folder), None, 0), str(folder), 0)
    assert (found.faithful, found.layouts) == (not is_wrong, ("whole", "accumulation 2", "accumulation 4"))
    assert {one.named for _, one in found.variants} == named
    assert {one.layout for _, one in found.variants} >= (
        {"accumulation 2", "accumulation 4"} if named else set()
    )


def test_layouts_that_cannot_be_computed_are_refused(runs, model, tmp_path, default):
    def build(**changed):
        return runs.grpo(model, tmp_path / "again", learning_rate=2e-3)

    with pytest.raises(CannotReplay, match=r"up to step 1: step 0 .*, learning rate: 0.001 in"):
        layouts(build, str(default[0]), 1)
    with pytest.raises(CannotReplay, match=r"was built without the given .*gradient_accumulation_steps"):
        layouts(build, str(default[0]), 0)
    apart = {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "max_steps": 1}
    folder = recorded(runs.grpo(model, tmp_path / "out", **apart), tmp_path / "apart")
    with pytest.raises(CannotReplay, match="8 rows in an update and 1 micro-batches in a generation"):
        layouts(partial(runs.grpo, model, tmp_path / "again", **apart), str(folder), 0)
    supervised = recorded(runs.sft(model, tmp_path / "out", max_steps=1), tmp_path / "sft")
    done = run_forked([COMMAND, "replay", str(supervised), "--step", "0", "--layouts"])
    assert (done.returncode, done.stderr.count("Error")) == (2, 1)
    assert "is of a SFTTrainer, and this is for a GRPOTrainer" in done.stderr
