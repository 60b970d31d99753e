"""The tasks: a folder with one planted fault, a question, and what the answer must name.

Faults are those of other benchmarks and tests: stacks and logs of `hang_calibration`, metrics and
samples of the doctor's tests, pairs of scripted records, a tiny run that is trained here.
"""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from transformers import AutoTokenizer

from areal_core.safety.interpreter import python_command
from areal_core.testing import make_tiny_model
from areal_debug import Recorder
from areal_debug.doctor.alarm import findings
from benchmarks.hang_calibration import own_cases
from consistency.causes import CAUSES
from hangdoctor.rules.verdict import LABELS
from recorder.testing import SCRIPTED_HEADER
from tests.consistency import records
from tests.doctor import sample_records, test_samples
from tests.doctor.runs import healthy, write_stats
from tests.doctor.test_failures import FAILURES, NAMES
from tests.replayer.test_diff import Script, record

HERE = Path(__file__).parent
TINY = HERE.parents[1] / "tests/debug/tiny.yaml"
CONFIG = {"seed": 1, "actor": {"dtype": "float32", "eps_clip": 0.2, "optimizer": {"lr": 1e-6}}}
BASE = replace(SCRIPTED_HEADER, config=CONFIG)
NONE = "none"  # the finding of a sound run
TEXTS = yaml.safe_load((HERE / "tasks.yaml").read_text())


@dataclass(frozen=True)
class Reply:
    """What an agent answers: one of the choices, and the facts that the question asks for."""

    finding: str
    ranks: tuple[int, ...] = ()
    step: int | None = None
    names: str = ""


@dataclass(frozen=True)
class Task:
    """`accept` are right findings; `ranks`, `step` (+- `near`), `names` are checked if given."""

    name: str
    kind: str
    make: Callable[[Path], Any]
    accept: tuple[str, ...]
    ranks: tuple[int, ...] | None = None
    step: int | None = None
    near: int = 0
    names: tuple[str, ...] = ()

    def question(self, folder: str) -> str:
        """Return what a user asks, with the findings to choose from."""
        choices = "; ".join(f"{id}: {words}" for id, words in choices_of(self.kind).items())
        asked = TEXTS["questions"][self.kind].format(folder=folder)
        return f"{asked} finding: one of: {choices}."

    def problems_of(self, reply: Reply) -> list[str]:
        """Return what is wrong with an answer, nothing if it solves the task."""
        wrong = [] if reply.finding in self.accept else [f"{reply.finding}, want {' or '.join(self.accept)}"]
        if self.ranks is not None and tuple(sorted(reply.ranks)) != self.ranks:
            wrong.append(f"ranks {reply.ranks}, want {self.ranks}")
        if self.step is not None and (reply.step is None or abs(reply.step - self.step) > self.near):
            wrong.append(f"step {reply.step}, want {self.step}")
        missing = [word for word in self.names if word not in reply.names]
        return [*wrong, *(f"{word!r} is not named" for word in missing)]


def choices_of(kind: str) -> dict[str, str]:
    """Return the findings of a kind, and what they mean in a line."""
    if kind == "hang":
        return {label: row["about"].strip().splitlines()[0] for label, row in LABELS.items()}
    found: dict[str, str] = dict(TEXTS["choices"][kind])
    if kind == "learning":
        titles = {id: row.get("titles", {"": row.get("title", "")}) for id, row in findings().items()}
        found |= {id: " / ".join(names.values()) for id, names in titles.items()}
    if kind == "logprobs":
        found |= {key: row.name for key, row in CAUSES.items() if "." not in key}
    return found


def hang(title: str, samples: int, ranks: tuple[int, ...] | None) -> Task:
    """Return a case of hang_calibration; two samples are a collection."""
    cases = [one for one in own_cases() if one.title == title]
    case = next(one for one in cases if ("two samples" in one.source) == (samples == 2))

    def make(folder: Path) -> None:
        for name, text in case.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)

    return Task(f"{case.label}-{samples}", "hang", make, (case.label, *case.accept), ranks)


def learning(name: str) -> Task:
    """Return metrics of a run with one of the failures of the doctor's tests."""
    id, _, begins, change = FAILURES[name]

    def make(folder: Path) -> None:
        run = healthy()
        write_stats(folder / "logs", {k: v for k, v in (run | change(run)).items() if v is not None}, NAMES)

    return Task(name.replace(" ", "-"), "learning", make, (id,), step=begins, near=12)


def samples(fault: sample_records.Fault | None, id: str) -> Task:
    """Return a record whose samples show a fault."""

    def make(folder: Path) -> None:
        model = make_tiny_model(folder / "model")
        given = {} if fault is None else {"fault": fault}
        sample_records.write_record(folder / "record", AutoTokenizer.from_pretrained(model), model, **given)

    return Task("sound-run" if fault is None else fault.__name__.replace("_", "-"), "learning", make, (id,))


def difference(
    name: str,
    accept: str,
    change: Callable[[Script], Any] | None = None,
    step: int | None = None,
    names: tuple[str, ...] = (),
    **header: Any,
) -> Task:
    """Return two records, of which B has another header and another value in a step."""

    def change_at(at: int, script: Script) -> None:
        if change is not None and at == step:
            change(script)

    def make(folder: Path) -> None:
        record(folder / "A", header=BASE)
        record(folder / "B", header=replace(BASE, **header), change=change_at)

    return Task(name, "difference", make, (accept,), step=step, names=names)


def with_actor(**options: Any) -> dict[str, Any]:
    return {"config": CONFIG | {"actor": {**CONFIG["actor"], **options}}}  # type: ignore[dict-item]


def member(name: str, *index: Any, value: Any) -> Callable[[Script], None]:
    """Set a value of a scripted step; a function of one gets the value."""

    def change(script: Script) -> None:
        holder = getattr(script, name)
        for at in index[:-1]:
            holder = holder[at]
        holder[index[-1]] = value(holder[index[-1]]) if callable(value) else value

    return change


def gap(name: str, id: str, size: Callable[[int], float | None]) -> Task:
    """Return a record in which the log-probs of the engine differ by so much in each step."""

    def make(folder: Path) -> None:
        rng = np.random.default_rng(0)
        with Recorder(folder / "record", trainer="slime") as recorder:
            for step in range(24):
                recorder.step(step, [row(rng, step, n, size(step)) for n in range(12)])

    return Task(name, "logprobs", make, (id,))


def row(rng: np.random.Generator, step: int, group: int, size: float | None) -> dict[str, Any]:
    trainer = -rng.exponential(1.0, 10)
    reference = trainer + rng.normal(0, 0.02 * (1 + step), 10)
    engine = reference if size is None else trainer + rng.normal(0, size, 10)
    made = {"logprobs": engine, "old_logprobs": trainer, "ref_logprobs": reference, "versions": step}
    made |= {"prompt_tokens": [1, group + 2], "completion_tokens": rng.integers(3, 90, 10)}
    return made | {"reward": 0.0, "group": group}


def sampled(name: str, id: str, **transforms: Any) -> Task:
    """Return a record that an engine with a fault sampled, and the model."""

    def make(folder: Path) -> None:
        model = records.save_model(folder / "model", 0)
        records.write_record(folder / "record", model, **transforms)

    return Task(name, "logprobs", make, (id,))


def damaged(folder: Path) -> None:
    record(folder / "record", header=BASE)
    file = next((folder / "record/steps/000001").glob("batch-*"))
    data = bytearray(file.read_bytes())
    data[-7] ^= 4
    file.write_bytes(data)


def incomplete(folder: Path) -> None:
    record(folder / "record", header=BASE)
    shutil.rmtree(folder / "record/steps/000001")


def trained(folder: Path, options: tuple[str, ...] = ()) -> None:
    """Train a tiny run with the script of this folder."""
    model = make_tiny_model(folder / "model", hidden_size=32, num_heads=2, num_kv_heads=1)
    paths = [f"actor.path={model}", f"cluster.fileroot={folder / 'files'}"]
    words = ["train", str(HERE / "train_tiny.py"), "--config", str(TINY), *paths, *options]
    command = python_command("-m", "areal_debug", *words, "--dump-rollout", str(folder / "record"))
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


TASKS = [
    *(hang(title, samples, ranks and tuple(ranks)) for title, samples, ranks in TEXTS["hang"]),
    *map(learning, TEXTS["learning"]),
    samples(None, NONE),
    samples(test_samples.rewarded_loops, "S01"),
    samples(test_samples.open_tags, "S05"),
    difference("same-run", NONE),
    difference("clip-range", "config", member("losses", 1, value=0.75), 1, ("loss", "eps_clip"), **with_actor(eps_clip=0.1)),
    difference("learning-rate", "config", member("weights", "head", value="f" * 8), 2, ("weights", "lr"),
               **with_actor(optimizer={"lr": 1e-5})),
    difference("another-torch", "environment", member("updates", 0, "grad_norm", value=(1.75).hex()), 1, ("gradient", "torch"),
               environment=BASE.environment | {"torch": {"build": "2.14.0"}}),
    difference("another-prompt", "data", member("batch", "input_ids", (2, 1), value=lambda id: id + 1), 0, ("batch", "input_ids")),
    difference("random-reward", "nondeterminism", member("batch", "rewards", 3, value=lambda one: 1 - one), 2, ("batch", "rewards")),
    Task("flipped-bit", "data", damaged, ("damaged",), names=("000001",)),
    Task("lost-step", "data", incomplete, ("incomplete", "damaged"), names=("1",)),
    gap("frozen-engine", "R24", lambda step: None),
    gap("jump-at-an-update", "R25", lambda step: 0.004 if step < 14 else 0.05),
    sampled("other-temperature", "R01", temperature=0.7),
    Task("replays", "replay", trained, ("identical",)),
    Task("changed-gradients", "replay", partial(trained, options=("trial_name=changed",)), ("different",), step=1),
]  # fmt: skip
