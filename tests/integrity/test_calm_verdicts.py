"""Each answer that says all is well, without what it rests on (`areal_debug/report/calm.toml`).

Of every observation at least one is taken away: absent, stale, damaged, or contradicted by another
one. The calm answer must not appear, nor code 0. Verbs that start ranks are called in the long tests.
"""

import csv
import json
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from areal_debug import Recorder
from areal_debug.serve.state import this_keeper, write_state
from recorder import Recording, RecordingOptions
from recorder.testing import write_scripted_record
from tests.command_line import invoke

from ..consistency.records import save_model, write_record
from ..debug import crosscheck_steps
from ..evaluation.test_results import write_results
from ..hangdoctor.analysis.test_samples import COMPUTE, REDUCE, ran, still, write
from ..info.test_info import fake_distribution
from ..trace.test_trace_steps import ScriptedTrace, quick_steps
from . import test_damaged_reads as scripted

GOLDEN, TINY = Path("tests/records/tiny_grpo.zip"), "tests/debug/tiny.yaml"
TABLE = tomllib.loads(Path("areal_debug/report/calm.toml").read_text())
Way = Callable[[Path], str]  # writes into a folder, and returns the arguments of the verb


@dataclass(frozen=True)
class Case:
    """A verb without one of its observations: of which verb, which one, how, and the call."""

    verb: str
    observation: str
    how: str
    way: Way
    is_long: bool = False


def damaged(folder: Path, file: str = "steps/000000/batch-00000-of-00001.safetensors") -> str:
    """Return a call's record, of which one file is damaged; `test_damaged_reads.py` has every way."""
    assert scripted.damage(folder / file, "bit")
    return str(folder)


def of_scripted(arguments: str, folder: Path) -> str:
    """Damage B, a copy of the scripted record A."""
    scripted.write_record(folder / "a", 1)
    shutil.copytree(folder / "a", folder / "b")
    damaged(folder / "b", f"steps/{scripted.DAMAGED:06}/batch-00000-of-00001.safetensors")
    return arguments.replace("A", str(folder / "a")).replace("B", str(folder / "b"))


def no_step_in_common(folder: Path) -> str:
    write_scripted_record(folder / "a", 2)
    scripted.write_record(folder / "b", 1)
    shutil.rmtree(folder / "b/steps/000001")
    return f"{folder}/a {folder}/b --no-replay"


def without_a_step(folder: Path) -> str:
    scripted.write_record(folder / "a", 1)
    shutil.rmtree(folder / "a/steps/000002")
    return str(folder / "a")


def step_of_another_run(folder: Path) -> str:
    for name, steps in (("a", 3), ("b", 4)):
        write_scripted_record(folder / name, steps, num_rows=steps)
    shutil.rmtree(folder / "a/steps/000001")
    shutil.copytree(folder / "b/steps/000001", folder / "a/steps/000001")
    return str(folder / "a")


def crosscheck_damaged(folder: Path) -> str:
    return damaged(crosscheck_steps.equal_step(1, folder / "r"))


def recorded(folder: Path, config: dict | None = None) -> str:
    """Record a step of samples of another trainer, and nothing that it computed of them."""
    row = {"prompt_tokens": [5, 6], "completion_tokens": [7, 8], "reward": 1.0, "group": 0}
    with Recorder(folder / "r", trainer="trl", config=config or {}) as recorder:
        recorder.step(0, [row] * 4)
    return str(folder / "r")


def sampled(change: Callable[[dict[str, np.ndarray]], None], folder: Path) -> str:
    """Record a step that a tiny model sampled, with its batch changed."""
    return str(write_record(folder / "r", save_model(folder / "model", seed=0), change=change))


def other_weights(record: Path | None, folder: Path) -> str:
    """Return a record, by default one that a tiny model sampled, and another model."""
    record = record or write_record(folder / "r", save_model(folder / "model", seed=0))
    return f"{record} --model {save_model(folder / 'other', seed=1)}"


def updated(folder: Path) -> str:
    """Return a step of which the weights that sampled it are not there."""
    model = save_model(folder / "model", seed=0)
    return f"{write_record(folder / 'r', model, num_steps=2, updated=True)} --step 1"


def without_results(folder: Path) -> str:
    write_scripted_record(folder / "r", options=RecordingOptions(Recording("rollout")))
    return str(folder / "r")


def broken_model(kind: str, folder: Path) -> str:
    """Write a model with a NaN in its weights, or without its weights."""
    model = save_model(folder / "model", seed=0)
    file = model / "model.safetensors"
    if kind == "absent":
        file.unlink()
    else:
        weights = load_file(file)
        weights["model.norm.weight"][0] = float("nan")
        save_file(weights, file, metadata={"format": "pt"})
    return str(model)


def of_server(folder: Path, *state: str, **changes: float) -> str:
    """Write the state of a server that does not answer."""
    write_state(replace(this_keeper("127.0.0.1:9", "embedded", "m", ""), **changes), *state)
    return f"--names {folder}"


def refused_package(folder: Path) -> str:
    fake_distribution(folder, "vllm", "0.30.0", "torch==1.0")
    return ""


def hang_of(processes: dict, folder: Path) -> str:
    return str(write(folder / "c", processes))


def one_sample(folder: Path) -> str:
    write(folder / "c", {f"rank_{r}": still(COMPUTE, facts=ran(9, 2.0, "R")) for r in range(2)})
    for part in ("samples", "proc"):
        shutil.rmtree(folder / f"c/{part}/1")
    file = folder / "c/collection.json"
    contents = json.loads(file.read_text())
    file.write_text(json.dumps(contents | {"samples": contents["samples"][:1]}))
    return str(folder / "c")


def cut_stacks(folder: Path) -> str:
    write(folder / "c", {f"rank_{r}": still(COMPUTE, facts=ran(9, 2.0, "R")) for r in range(2)})
    for sample in (0, 1):
        assert scripted.damage(folder / f"c/samples/{sample}/rank_1.json", "cut")
    return str(folder / "c")


def metrics(columns: dict[str, list[object]], folder: Path) -> str:
    with (folder / "m.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *columns])
        writer.writerows([i, *row] for i, row in enumerate(zip(*columns.values(), strict=True)))
    return str(folder / "m.csv")


WELL = {
    "reward": [0.1 + 0.02 * i for i in range(20)],
    "policy_loss": [0.1 - 0.001 * i for i in range(20)],
    "kl": [0.001] * 20,
    "entropy": [1.0 - 0.01 * i for i in range(20)],
    "grad_norm": [1.0 + 0.01 * (i % 3) for i in range(20)],
    "lr": [1e-6] * 20,
}


def doctor_damaged(folder: Path) -> str:
    write_scripted_record(folder / "r", 8)
    return damaged(folder / "r")


REWARDS = """
def exact(prompt, completions, prompt_ids, completion_ids, **row):
    return float(completions.strip() == str(row.get("answer")))

def not_a_number(prompt, completions, prompt_ids, completion_ids, **row):
    return float("nan")

def raises(prompt, completions, prompt_ids, completion_ids, **row):
    raise RuntimeError("no connection")

def constant(prompt, completions, prompt_ids, completion_ids, **row):
    return 1.0
"""


def probed(function: str, rows: list[dict], folder: Path) -> str:
    (folder / "fn.py").write_text(REWARDS)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"{folder}/fn.py:{function} --data {folder}/rows.jsonl"


def rescored(known: int, function: str, rows: list[dict], folder: Path) -> str:
    """Record 12 samples, of which some have a reward, and return the call."""
    with Recorder(folder / "r", trainer="other") as recorder:
        recorder.step(
            0,
            [
                {"prompt": f"{i}+1=", "completion": str(i + 1), "group": i}
                | ({"reward": 1.0} if i < known else {})
                for i in range(12)
            ],
        )
    return f"{folder}/r {probed(function, rows, folder)}"


ALL_ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(12)]


def rescored_damaged(folder: Path) -> str:
    call = rescored(12, "exact", ALL_ROWS, folder)
    damaged(folder / "r")
    return call


def carried(folder: Path, order: Callable[[int], int] = int, texts: int = 40, **config: str) -> str:
    """Write a record of 8 steps of 4 prompts, and the data."""
    rows = "".join(f'{{"prompt": "question {n}?"}}\n' for n in range(texts))
    (folder / "rows.jsonl").write_text(rows)
    with Recorder(folder / "r", config=config) as recorder:
        for step in range(8):
            numbers = [order(n) for n in range(4 * step, 4 * step + 4)]
            recorder.step(
                step,
                [{"prompt": f"question {n}?", "completion": "4", "reward": 1.0, "group": n} for n in numbers],
            )
    return str(folder / "r")


def covered(folder: Path, **how: Any) -> str:
    return f"{carried(folder, **how)} {folder / 'rows.jsonl'}"


def carried_damaged(arguments: str, folder: Path) -> str:
    record = carried(folder)
    damaged(folder / "r", "steps/000002/step.json")
    return f"{record} {arguments}".replace("ROWS", f"{folder}/rows.jsonl")


def one_log(folder: Path) -> str:
    (folder / "m.jsonl").write_text("".join(f'{{"step": {n}, "loss": 1.0}}\n' for n in range(12)))
    return f"{folder / 'm.jsonl'} --at 6"


def traced(num_steps: int, folder: Path) -> str:
    run = ScriptedTrace(folder / "t")
    quick_steps(run, range(num_steps))
    run.trace.close()
    return str(folder / "t")


def cut_trace(folder: Path) -> str:
    traced(6, folder)
    (folder / "t/rank-00000.jsonl").write_bytes(b"")
    return str(folder / "t")


def evaluated(change: Callable[[Path], object], folder: Path) -> str:
    for name in ("a", "b"):
        write_results(folder / name, {"m": [[1.0], [0.0], [1.0]]}, n_samples=1)
    change(folder / "b")
    return f"{folder}/a {folder}/b"


def other_prompts(folder: Path) -> None:
    file = folder / "samples-0.jsonl"
    file.write_text(file.read_text().replace('"prompt": "', '"prompt": "another '))


def dry_run(option: str, folder: Path) -> str:
    model = save_model(folder / "model", seed=0)
    script = Path("tests/debug/train_tiny.py")
    if option == "reward":
        text = script.read_text()
        script = folder / "train_tiny.py"
        reward = "def score(prompt, gold): ...\ntrainer.train(workflow_kwargs={'reward_fn': score})\n"
        script.write_text(f"{text}\n{reward}")
        option = "seed=1"
    given = f"cluster.fileroot={folder} experiment_name=e trial_name=t actor.path={model} {option}"
    return f"{script} --config tests/debug/tiny.yaml {given}"


ALIKE = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+1=", "answer": "3"}]


def no_logprobs(batch: dict[str, np.ndarray]) -> None:
    batch["logprobs"][:] = np.nan


CASES = [
    *(
        Case(verb, "bytes", "damaged", partial(of_scripted, call))
        for verb, call in (
            ("why", "A B --no-replay"),
            ("record verify", "B"),
            ("replay", "B"),
            ("goto", "B --step 3"),
            ("agent replay", "B agents.py:Agent"),
            ("consistency", "B --step 2"),
        )
    ),
    Case("crosscheck", "bytes", "damaged", crosscheck_damaged),
    Case("doctor", "bytes", "damaged", doctor_damaged),
    Case("reward rescore", "bytes", "damaged", rescored_damaged),
    Case("record seam", "bytes", "damaged", partial(carried_damaged, "--at 4")),
    Case("record coverage", "bytes", "damaged", partial(carried_damaged, "ROWS")),
    Case("why", "steps", "absent", no_step_in_common),
    Case("record verify", "steps", "absent", without_a_step),
    Case("record verify", "steps", "contradictory", step_of_another_run),
    Case("crosscheck", "options", "absent", recorded),
    Case("crosscheck", "numbers", "absent", partial(recorded, config=crosscheck_steps.TRL)),
    Case("consistency", "logprobs", "absent", partial(sampled, no_logprobs)),
    Case("consistency", "tokens", "absent", partial(sampled, lambda batch: batch["loss_mask"].fill(0))),
    Case("consistency", "weights", "stale", partial(other_weights, None), is_long=True),
    Case("consistency", "weights", "absent", updated),
    Case("hang", "samples", "absent", one_sample),
    Case("hang", "movement", "absent", partial(hang_of, {f"rank_{r}": still(COMPUTE) for r in range(2)})),
    Case(
        "hang",
        "movement",
        "contradictory",
        partial(hang_of, {"rank_0": still(COMPUTE), "rank_1": still(REDUCE)}),
    ),
    Case("hang", "stacks", "damaged", cut_stacks),
    Case("hang", "stacks", "absent", partial(hang_of, {})),
    Case("doctor", "names", "absent", partial(metrics, {f"m{i}": list(WELL["kl"]) for i in range(6)})),
    Case("doctor", "names", "absent", partial(metrics, {"reward": WELL["reward"], "x": WELL["kl"]})),
    Case("doctor", "steps", "absent", partial(metrics, {name: of[:3] for name, of in WELL.items()})),
    Case("doctor", "numbers", "absent", partial(metrics, {name: [""] * 20 for name in WELL})),
    Case("doctor", "numbers", "damaged", partial(metrics, {name: ["?"] * 20 for name in WELL})),
    Case("doctor", "numbers", "contradictory", partial(metrics, {name: ["nan"] * 20 for name in WELL})),
    Case("reward probe", "rows", "absent", partial(probed, "exact", [{"prompt": "1+1="}]), is_long=True),
    *(
        Case("reward probe", "rewards", how, partial(probed, function, ALIKE), is_long=how != "absent")
        for how, function in (("absent", "raises"), ("damaged", "not_a_number"), ("stale", "constant"))
    ),
    Case("reward rescore", "rewards", "absent", partial(rescored, 0, "exact", ALL_ROWS)),
    Case(
        "reward rescore", "rewards", "contradictory", partial(rescored, 12, "raises", ALL_ROWS), is_long=True
    ),
    Case("reward rescore", "rows", "absent of most", partial(rescored, 12, "exact", ALL_ROWS[:2])),
    Case("trace", "steps", "3 of 4", partial(traced, 3)),
    Case("record seam", "states", "absent", one_log),
    Case("record coverage", "rows", "absent of some", partial(covered, texts=20)),
    Case("record coverage", "order", "shuffled", partial(covered, order=lambda n: 17 * n % 40)),
    Case(
        "record coverage",
        "order",
        "filtered",
        partial(covered, order=lambda n: n + n // 3, filter_groups="on"),
    ),
    Case("trace", "file", "damaged", cut_trace),
    *(
        Case(verb, "model", "stale", lambda folder, step=step: f"{other_weights(GOLDEN, folder)}{step}")
        for verb, step in (("replay", ""), ("goto", " --step 0"))
    ),
    Case("replay", "results", "absent", without_results),
    Case("goto", "results", "absent", lambda folder: f"{without_results(folder)} --step 2"),
    Case("check run", "repeats", "absent", lambda to: f"--config {TINY} actor.path={to}/no", is_long=True),
    *(
        Case("check model", "model", kind, partial(broken_model, kind), is_long=True)
        for kind in ("absent", "damaged")
    ),
    Case("serve --status", "servers", "absent", lambda folder: f"--names {folder}"),
    Case("serve --status", "answers", "absent", of_server),
    Case("serve --status", "answers", "stale", lambda folder: of_server(folder, "ready", keeper_started=1.0)),
    Case("serve --status", "answers", "contradictory", lambda folder: of_server(folder, "ready")),
    Case("train --dry-run", "code", "damaged", partial(dry_run, "reward")),
    Case("info", "packages", "contradictory", refused_package),
    Case("eval --compare", "results", "absent", partial(evaluated, shutil.rmtree)),
    Case("eval --compare", "results", "contradictory", partial(evaluated, other_prompts)),
    Case(
        "eval --compare",
        "results",
        "damaged",
        partial(evaluated, lambda folder: scripted.damage(folder / "samples-0.jsonl", "cut")),
    ),
    Case("agent replay", "episodes", "absent", lambda folder: f"{without_agents(folder)} agents.py:Agent"),
    *(
        Case("train --dry-run", "files", f"no {option}", partial(dry_run, f"{option}=/no/such"))
        for option in ("actor.path", "train_dataset.path")
    ),
]


def without_agents(folder: Path) -> str:
    write_scripted_record(folder / "a", 2)
    return str(folder / "a")


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.long] * c.is_long) for c in CASES],
    ids=lambda c: f"{c.verb}-{c.observation}-{c.how}".replace(" ", "-"),
)
def test_no_calm_answer_without_its_evidence(case, tmp_path, monkeypatch):
    if case.verb != "info":  # which asks what a confined child may do
        monkeypatch.setattr("recorder.confine.run_confined", lambda work, *_, **__: work())
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = "hang diagnose" if case.verb == "hang" else case.verb
    done = invoke(*words.split(), *case.way(tmp_path).split())
    if not isinstance(done.exception, SystemExit | None):
        raise done.exception
    assert done.exit_code in (1, 2), done.output
    assert not done.output.startswith(TABLE[case.verb]["says"]), done.output


def test_each_observation_of_the_table_is_taken_away():
    asked = {(case.verb, case.observation) for case in CASES}
    listed = {(verb, observation) for verb, row in TABLE.items() for observation in row["needs"]}
    assert asked == listed
