"""A tiny run on random tokens, recorded in this process in a few seconds, without an engine."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import yaml

from areal_core.config import PPOConfig, config_from_dict
from areal_core.data import get_dataset
from areal_core.trainer.rl import PPOTrainer
from areal_debug.wiring import recorder_of
from recorder import Record, Recording, RecordingOptions, open_record
from replayer.preflight.real_steps import RandomRollouts

TINY = Path(__file__).parents[1] / "debug" / "tiny.yaml"


@dataclass
class TinyRun:
    """A record and the bytes of all weights before each of its steps, from the run itself."""

    path: str
    weights: dict[int, str] = field(default_factory=dict)

    @property
    def record(self) -> Record:
        return open_record(self.path)


def digest_weights(trainer) -> str:
    """Return the sha256 of every weight's bytes, in order."""
    digest = hashlib.sha256()
    for name, tensor in trainer.actor.named_full_tensors():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def digest_files(folder) -> dict[str, str]:
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def tiny_config(folder, model, num_steps, **changes):
    tree = yaml.safe_load(TINY.read_text())
    tree |= {"cluster": {"fileroot": str(folder / "files")}, "total_train_steps": num_steps}
    tree["actor"] |= {"path": str(model)}
    for name, value in changes.items():
        section, _, option = name.rpartition("__")
        (tree.setdefault(section, {}) if section else tree)[option] = value
    return config_from_dict(tree, PPOConfig)


class EditedRollouts(RandomRollouts):
    """Random rows, four of each prompt, which `edit(batch, step)` changes before the run sees them."""

    def __init__(self, edit, vocabulary=100, num_prompts=4):
        super().__init__(vocabulary, num_prompts, 4, longest=16, seed=1)
        self.edit = edit

    def next_batch(self, step, version):
        return self.edit(super().next_batch(step, version), step)


def train_sampled(config, observers, reward="even_share"):
    """Train on what the embedded engine samples, with a reward of `debug/rewards.py`."""
    dataset = get_dataset(config.train_dataset)
    with PPOTrainer(config, dataset, observers=observers, print_steps=False) as trainer:
        trainer.train(workflow_kwargs={"reward_fn": f"{TINY.parent}/rewards.py:{reward}"})


def train_and_record(folder, model, num_steps, edit=lambda batch, step: batch, **changes) -> TinyRun:
    """Train on random tokens and record it; `edit` changes batches before the run sees them."""
    config = tiny_config(folder, model, num_steps, **changes)
    run = TinyRun(str(folder / "record"))
    options = RecordingOptions(Recording(config.debug.dump_scope), text=True)

    def note_weights(trainer):
        def observe(event, **facts):
            if event == "batch":
                run.weights[facts["step"]] = digest_weights(trainer)

        return observe

    with PPOTrainer(
        config,
        source=lambda trainer: EditedRollouts(edit),
        observers=[note_weights, lambda trainer: recorder_of(trainer, folder / "record", options)],
        total_steps=num_steps,
        print_steps=False,
    ) as trainer:
        trainer.train()
    return run


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_run(once, tiny_model) -> TinyRun:
    """Ten steps with anchors before steps 4 and 8. Not to be changed."""

    def make(folder: Path) -> None:
        run = train_and_record(folder, tiny_model, 10, debug__anchor_every_steps=4)
        (folder / "weights.json").write_text(json.dumps([run.weights[step] for step in range(10)]))

    folder = once("tiny_run", make)
    weights = json.loads((folder / "weights.json").read_text())
    return TinyRun(str(folder / "record"), dict(enumerate(weights)))
