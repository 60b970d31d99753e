"""Records of verl's own trainers hold what they trained on, and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from areal_debug import verl as adapter
from areal_debug.doctor.read import read_run
from recorder import open_record, verify
from recorder.trainers import verl as recording_of_verl

from .stand_ins import run_installed

ROOT = Path(__file__).parents[2]
KEYS = ("logprobs", "versions", "rewards", "prompt_id", "finish_reason", "prompt_length")
PARAMETERS = {"global_steps": 9, "current_param_version": 4}
PLUGIN = "[verl.plugins]\nareal_debug = areal_debug.verl\n"


def rows_of(record: Path, step: int) -> list[dict]:
    """The rows of a step: values per token as lists, with the inputs to the loss at their token."""
    recorded = open_record(record).step(step)
    batch, learning = recorded.batch(0), recorded.learning(0)
    rows = []
    for row, (begin, end) in enumerate(zip(batch["cu_seqlens"], batch["cu_seqlens"][1:], strict=False)):
        values = {}
        for name, column in batch.items():
            if name != "cu_seqlens":
                per_row = len(column) == len(batch["cu_seqlens"]) - 1
                values[name] = column[row] if per_row else column[begin:end].tolist()
        for name, column in (learning or {}).items():
            if name != "cu_seqlens":
                values[name] = [0.0, *column[begin : end - 1].tolist()]
        rows.append(values | {"known": {key: recorded.known(0, key)[row] for key in KEYS}})
    return rows


def whole(values: list, size: int) -> list:
    """Values of a completion, zeros in front."""
    return [0] * (size - len(values)) + values


def run(folder: Path, **environment: str) -> tuple[list, str]:
    """Run verl_runs.py with the plugin installed; returns what was trained on, and stderr."""
    plugin = folder / "plugin" / "areal_debug-0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: areal-debug\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text(PLUGIN)
    return run_installed("verl", str(folder), PYTHONPATH=f"{plugin.parent}:{ROOT}", **environment)


def a_batch(**changes) -> SimpleNamespace:
    """Two rows of a DataProto, one prompt: [0 1 2 | 3 4 0] and [0 1 2 | 5 6 7]."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    batch = {
        "prompts": torch.tensor([[0, 1, 2]] * 2),
        "responses": torch.tensor([[3, 4, 0], [5, 6, 7]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]]),
        "response_mask": mask,
        "rollout_log_probs": -0.5 * mask,
        "old_log_probs": (-0.25 * mask).to(torch.bfloat16),
        "rm_scores": torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]),
    }
    others = {"uid": np.array(["a", "a"], object), "multi_modal_inputs": np.array([{}, {}], object)}
    return SimpleNamespace(batch=batch | changes, non_tensor_batch=others, meta_info={})


class Trainer:
    """RayPPOTrainer as far as an update goes."""

    def __init__(self, error: Exception | None = None) -> None:
        self.global_steps, self.config, self.tokenizer, self.error = 3, {"algorithm": "grpo"}, None, error

    def _update_actor(self, batch):
        if self.error is not None:
            raise self.error
        return SimpleNamespace(meta_info={"metrics": {"actor/pg_loss": [1.0, 3.0]}})


@pytest.fixture
def recording(tmp_path, monkeypatch) -> Path:
    """The folder into which updates of Trainer are recorded."""
    metric = SimpleNamespace(
        reduce_metrics=lambda given: {name: np.mean(value) for name, value in given.items()}
    )
    monkeypatch.setitem(sys.modules, "verl.utils.metric", metric)
    monkeypatch.setattr(adapter, "FOLDER", str(tmp_path / "record"))
    monkeypatch.setattr(recording_of_verl, "recorders", {})
    monkeypatch.setattr(Trainer, "_update_actor", adapter.recorded(Trainer._update_actor))
    return tmp_path / "record"


def test_an_update_is_recorded_with_what_it_measured(recording):
    """Padding is removed, what is unknown stays unknown, and the result is the trainer's."""
    result = Trainer()._update_actor(a_batch())
    assert result.meta_info["metrics"]["actor/pg_loss"] == [1.0, 3.0]
    recording_of_verl.recorders[str(recording)].end()
    assert verify(recording).problems == ()
    first, second = rows_of(recording, 3)
    assert (first["input_ids"], second["input_ids"]) == ([1, 2, 3, 4], [1, 2, 5, 6, 7])
    assert (first["loss_mask"], second["loss_mask"]) == ([0, 0, 1, 1], [0, 0, 1, 0, 1])
    assert second["logprobs"] == [0, 0, -0.5, 0, -0.5]
    assert second["prox_logp"] == [0, 0, -0.25, 0, -0.25]
    assert (first["rewards"], second["rewards"], second["prompt_length"]) == (1, 2, 2)
    assert first["prompt_id"] == second["prompt_id"]
    assert first["known"] == dict.fromkeys(KEYS, True) | {"versions": False, "finish_reason": False}
    outcome = open_record(recording).step(3).outcome(0)
    assert (outcome.version, outcome.stats) == (3, {"actor/pg_loss": 2.0})
    assert open_record(recording).header.config == {"algorithm": "grpo"}


def test_what_cannot_be_recorded_is_one_sentence_and_the_run_continues(recording, capsys):
    """Recording ends there."""
    wrong = a_batch(responses=torch.tensor([[-3, 4, 0], [5, 6, 7]]))
    trainer = Trainer()
    assert trainer._update_actor(wrong).meta_info["metrics"]
    trainer.global_steps = 4
    assert trainer._update_actor(a_batch()).meta_info["metrics"]
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "sample 0: token ids from -3 to 4" in lines[0]


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"global_steps": 5}, (5, 5)),
        ({"global_steps": 5, "parameter_sync_step": 1, "local_trigger_step": 0}, (5, 5)),
        ({"global_steps": 2, "parameter_sync_step": 3, "local_trigger_step": 1}, (5, 1)),
        ({"global_steps": 2, "parameter_sync_step": 3, "local_trigger_step": 2}, (6, 2)),
        (dict.fromkeys(("local_trigger_step", "trigger_parameter_sync_step"), 2) | PARAMETERS, (9, 5)),
    ],
)
def test_updates_are_numbered_and_have_the_version_that_rollouts_see_next(trainer, expected):
    """Several updates of one step of an asynchronous trainer have one weight update."""
    assert adapter.count(SimpleNamespace(**trainer)) == expected


def test_trainers_are_wrapped_when_verl_imports_them_and_only_if_asked(tmp_path):
    """Without the variable the plugin imports nothing."""
    package = tmp_path / "verl" / "trainer" / "ppo"
    package.mkdir(parents=True)
    (package / "ray_trainer.py").write_text("class RayPPOTrainer:\n    def _update_actor(self, batch): ...\n")
    code = (
        "import sys, areal_debug.verl; heavy = {'numpy', 'recorder', 'torch'} & sys.modules.keys();"
        "from verl.trainer.ppo.ray_trainer import RayPPOTrainer as trainer;"
        "print(sorted(heavy), hasattr(trainer._update_actor, '__wrapped__'))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "AREAL_DEBUG_RECORD"}
    environment["PYTHONPATH"] = f"{ROOT}:{tmp_path}"
    for extra, expected in (({}, "[] False"), ({"AREAL_DEBUG_RECORD": "r"}, "[] True")):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment | extra, timeout=60
        )
        assert done.stdout.strip() == expected, done.stderr


@pytest.mark.long
def test_two_steps_of_the_default_trainer_are_recorded_to_the_last_value(tmp_path):
    """PPOTrainerSync.fit with real Ray and TransferQueue; verl's padding rows are not recorded."""
    record = tmp_path / "record"
    seen, stderr = run(tmp_path, AREAL_DEBUG_RECORD=str(record))
    assert "not recorded" not in stderr
    opened = open_record(record)
    assert list(opened.steps) == [1, 2]
    assert opened.header.trainer == "verl"
    assert opened.header.config["algorithm"]["adv_estimator"] == "grpo"
    assert verify(record).problems == ()
    assert json.loads((record / "end.json").read_text())["finished"] is True
    for step, truth in zip((1, 2), seen, strict=True):
        assert truth["padded"] > 0
        found = {tuple(row["input_ids"]): row for row in rows_of(record, step)}
        assert len(found) == len(truth["rows"]) == 5
        groups: dict[str, set] = {}
        for expected in truth["rows"]:
            row = found[tuple(expected["input_ids"])]
            size = len(expected["input_ids"])
            mask = whole(expected["response_mask"], size)
            assert row["prompt_length"] == len(expected["prompts"])
            assert row["loss_mask"] == mask
            assert row["logprobs"] == whole(expected["rollout_log_probs"], size)
            assert row["rewards"] == np.float32(sum(expected["rm_scores"]))
            for name, theirs in (
                ("advantages", "advantages"),
                ("returns", "returns"),
                ("prox_logp", "old_log_probs"),
                ("entropy", "entropy"),
            ):
                assert row[name] == whole(expected[theirs], size), name
            assert row["routed_experts"] == expected["routed_experts"]
            tag = expected["tag"]
            same = tag["min_global_steps"] == tag["max_global_steps"]
            version = tag["min_global_steps"] if same else -1
            assert row["versions"] == [version if sampled else -1 for sampled in mask]
            assert row["known"] == dict.fromkeys(KEYS, True) | {"versions": same, "finish_reason": False}
            assert row["scores.acc"] == (row["rewards"] > 0.5)
            assert row["scores.num_turns"] == 2
            groups.setdefault(expected["key"].split("_")[0], set()).add(row["prompt_id"])
        assert [len(ids) for ids in groups.values()] == [1, 1]
        assert len(set.union(*groups.values())) == 2
        outcome = opened.step(step).outcome(0)
        assert outcome.version == step
        assert outcome.stats["actor/pg_loss"] == pytest.approx(truth["loss"], abs=0)
        assert outcome.stats["actor/grad_norm"] == 2.0
    logged = read_run(tmp_path / "project")
    assert logged.family == "verl"
    assert logged.series["policy_loss"].values.tolist() == [truth["loss"] for truth in seen]
