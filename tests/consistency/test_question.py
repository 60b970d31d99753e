"""Two real runs, one with a planted fault of its engine: `ask_engine` names side and cause."""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from areal_core.embedded import engine
from areal_core.engine.checkpoint.hf_folder import save_hf
from areal_debug.wiring import recorder_of
from consistency.entry.which_engine import Examined, Suspect, ask_engine, by_evidence, decide
from recorder import RecordingOptions, open_record

from ..replayer.conftest import tiny_config, train_sampled

STEP = 2  # the last; its weights are of version 2
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def train(folder, model, save_to=None, **changes):
    """Record three steps of the tiny run; `save_to` gets the weights before each."""

    def save(trainer):
        def observe(event, **facts):
            if event == "batch" and save_to is not None:
                save_hf(save_to / str(facts["version"]), trainer.actor, trainer.tokenizer, merged=True)

        return observe

    def record(trainer):
        return recorder_of(trainer, folder / "record", RecordingOptions())

    train_sampled(tiny_config(folder, model, STEP + 1, **changes), [save, record])
    return open_record(folder / "record")


@dataclass(frozen=True)
class Healthy:
    record: object
    weights: Path

    @property
    def models(self):
        return {folder.name: folder for folder in self.weights.iterdir()}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("healthy")
    return Healthy(train(folder, tiny_model, folder / "weights"), folder / "weights")


def without(*names):
    """The weight update of version 2 lacks tensors; all of them without names."""

    def plant(patch):
        def send(self, weights, version):
            kept = [(n, t) for n, t in weights if version < STEP or (names and n not in names)]
            real(self, kept, version)

        real = engine.ReplicaUpdate.send
        patch.setattr(engine.ReplicaUpdate, "send", send)

    return plant


def sampled_with(**options):
    """The engine samples with other options than it was asked for."""

    def plant(patch):
        def generate(forward, prompts, samplings, *arguments, **keywords):
            return real(forward, prompts, [replace(s, **options) for s in samplings], *arguments, **keywords)

        real = engine.generate
        patch.setattr(engine, "generate", generate)

    return plant


def other_seed(patch):
    real = engine.row_seed
    patch.setattr(engine, "row_seed", lambda seed, version, request: real(seed + 1, version, request))


@contextmanager
def planted(plant):
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        yield


PARTIAL = "partial weights: {} of version 1 in the engine, 2 expected"
OPTIONS, SEED = "sampling parameters", "the tokens are not those that the recorded seed draws"
HOT = "temperature 1.2 in the engine, not in the config (temperature 1.0)"
EXPECTED = {
    "stale": (without(), "weights", "stale weights: version 1 in the engine, 2 expected (1 behind)"),
    "one tensor": (without(DOWN), "weights", PARTIAL.format(DOWN)),
    "top_p": (sampled_with(top_p=0.95), OPTIONS, "top_p 0.95 (config: 1) in the engine"),
    "top_k": (sampled_with(top_k=20), OPTIONS, "top_k 20 (config: no limit) in the engine"),
    "temperature": (sampled_with(temperature=1.2), OPTIONS, HOT),
    "seed": (other_seed, "seed", f"{SEED}: another seed, or other names of the rows"),
}


EVERYDAY = {"stale"}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.long] * (name not in EVERYDAY)) for name in EXPECTED]
)
def test_a_fault_of_one_engine_is_named_with_its_side(fault, healthy, tiny_model, tmp_path):
    plant, kind, cause = EXPECTED[fault]
    with planted(plant):
        faulty = train(tmp_path, tiny_model)
    step = STEP if kind == "weights" else 0
    for left, right, side in ((healthy.record, faulty, "B"), (faulty, healthy.record, "A")):
        answer = ask_engine(left, right, step, healthy.models)
        assert (answer.side, answer.kind, answer.cause, answer.confidence) == (side, kind, cause, "high")


def test_healthy_engines_are_not_accused(healthy, tiny_model, tmp_path):
    twin = train(tmp_path, tiny_model)
    answer = ask_engine(healthy.record, twin, STEP, healthy.models)
    assert (answer.side, answer.kind) == (None, "none")
    assert all("100% of the tokens are those that the recorded seed draws" in e for e in answer.evidence)


@pytest.mark.long
def test_an_adapter_that_the_engine_lacks_is_named(tiny_model, tmp_path):
    optimizer = {"lr": 1e-2, "warmup_steps_proportion": 0.0}
    options = {"actor__use_lora": True, "actor__optimizer": optimizer}
    record = train(tmp_path / "healthy", tiny_model, tmp_path / "weights", **options)
    with planted(never_sent):
        faulty = train(tmp_path / "faulty", tiny_model, **options)
    models = {folder.name: folder for folder in (tmp_path / "weights").iterdir()} | {"base": tiny_model}
    answer = ask_engine(record, faulty, 1, models)
    assert (answer.side, answer.kind) == ("B", "adapter")
    assert answer.cause == "the adapter is missing in the engine"


def never_sent(patch):
    def send(self, weights, version):
        for _ in weights:
            pass
        self.engine.set_version(version)

    patch.setattr(engine.ReplicaUpdate, "send", send)


def test_few_tokens_and_weak_evidence_lower_the_confidence():
    graded = [by_evidence(nats, tokens) for nats, tokens in ((25, 40), (25, 31), (12, 40), (99, 7))]
    assert graded == ["high", "medium", "medium", "low"]


def test_two_different_faults_are_both_named():
    left = Examined(Suspect("weights", "stale", "high", "a"), 40, "")
    right = Examined(Suspect("sampling parameters", "top_p 0.9", "medium", "b"), 40, "")
    answer = decide(left, right)
    assert (answer.side, answer.cause, answer.confidence) == ("both", "A: stale; B: top_p 0.9", "medium")
    assert answer.evidence == ("A: a", "B: b")


def test_prompts_of_other_tokens_are_a_question_of_the_tokenizer(healthy, tmp_path):
    class OtherPrompts:
        """The record with another first token in each prompt, and another chat template."""

        path = "other"

        def __init__(self, files):
            self.header = replace(healthy.record.header, tokenizer={"path": "", "files": files})

        def step(self, number):
            return Step(healthy.record.step(number))

    class Step:
        def __init__(self, step):
            self.manifest, self.recorded, self.known = step.manifest, step, step.known

        def batch(self, rank, keys=None):
            arrays = {name: array.copy() for name, array in self.recorded.batch(rank, keys).items()}
            arrays["input_ids"][arrays["cu_seqlens"][:-1]] += 1
            return arrays

    files = healthy.record.header.tokenizer["files"]
    answer = ask_engine(healthy.record, OtherPrompts(files), 0, {})
    assert (answer.side, answer.kind, answer.confidence) == (None, "tokenizer", "medium")
    changed = OtherPrompts(files | {"chat_template.jinja": {"size_bytes": 1, "crc32c": "0"}})
    answer = ask_engine(healthy.record, changed, 0, {})
    assert (answer.side, answer.cause, answer.confidence) == ("B", "another chat template", "high")
    assert answer.evidence[0] == "16 of 16 prompts have other tokens, the first is that of prompt 0"
