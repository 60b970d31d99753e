"""Every verb on a record of another trainer in which every kind of value is unknown somewhere."""

import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from areal_core.testing import make_tiny_model
from areal_debug import Recorder
from areal_debug.cli import VERBS
from areal_debug.verbs.record import command as record_group
from recorder import RecordError, open_record
from replayer.diff import diff_records
from replayer.errors import ReplayError
from replayer.preconditions import check_values
from replayer.request import replay_config
from replayer.source import recorded_batch
from replayer.why.chain import Options, explain
from tests.command_line import invoke

CONFIG = Path(__file__).parent / "tiny.yaml"
REWARDS = Path(__file__).parent / "rewards.py"
TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
OPTIONS = TABLES["options"]
STEPS = 3
WHOLE, TEXT = 0, 7
# verbs that read no record
OTHERS = {"demo", "train", "eval", "info", "check", "hang", "trace", "mcp", "serve", "agent"}
INVENTED = re.compile(r"\bnan\b|\bNaN\b|Traceback")


def rows_of(step: int, rng: np.random.Generator) -> list[dict]:
    def row(name: str, **changes) -> dict:
        logprobs = (-rng.random(6)).round(3).tolist()
        return {
            "prompt_tokens": [10 + ord(name) % 50, 11, 12],
            "completion_tokens": rng.integers(13, 60, 6).tolist(),
            "logprobs": logprobs,
            "old_logprobs": [value + 0.01 for value in logprobs],
            "advantages": 0.5,
            "reward": 1.0,
            "group": name,
            "finish_reason": "stop",
            "versions": step,
        } | changes

    one_logprob = row("f")
    one_logprob["logprobs"][1] = None
    return [
        row("a"),
        row("a", reward=0.0, finish_reason="length"),
        row("b", scores={"format": 0.25, "accuracy": None}),
        row("b", logprobs=None, old_logprobs=None),
        row("c", reward=None, finish_reason=None),
        row("d", group=None, versions=None, advantages=None),
        {"tokens": [20, 21, 22, 23], "group": "e"},
        {"prompt": "What is 7 + 5?", "completion": "It is twelve.", "reward": 1.0, "group": "t"},
        one_logprob,
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def make(model):
    """Write a record: `make(folder, change_of_a_row, config)`."""

    def write(folder, change=lambda row: row, options=OPTIONS, steps=STEPS, **settings):
        rng = np.random.default_rng(0)
        settings = {
            "model": model,
            "tokenizer": AutoTokenizer.from_pretrained(model),
            "trainer": "trl",
        } | settings
        with Recorder(folder, config=options, trainer_version="1.16.0", **settings) as recorder:
            for step in range(steps):
                stats = {"loss": 0.1 * step, "grad_norm": 1.0, "completions/mean_length": 6.0}
                rows = [change(row) for row in rows_of(step, rng)]
                details = {"not_recorded": ["pixel_values"]}
                recorder.step(step, [row for row in rows if row], stats=stats, details=details)
        return folder

    return write


@pytest.fixture(scope="module")
def record(make, tmp_path_factory):
    return make(tmp_path_factory.mktemp("record") / "r")


def run(*arguments):
    done = invoke(*arguments)
    return done.exit_code, done.output


def verbs_on(record: Path, model: Path, out: Path) -> dict[str, tuple[list[str], int]]:
    """Return the arguments of each verb that takes a record, and its exit code."""
    places = {"record": record, "model": model, "out": out, "rewards": REWARDS}
    rows = TABLES["verbs"].items()
    return {name: ([word.format(**places) for word in words], code) for name, (code, *words) in rows}


def names_of_verbs() -> set[str]:
    groups = {"record": set(record_group.list_commands(None)) - {"import"}, "reward": {"rescore"}}
    return {name for name in VERBS if name not in OTHERS | groups.keys()} | {
        f"{group} {name}" for group, names in groups.items() for name in names
    }


def test_every_verb_answers_and_invents_nothing(record, model, tmp_path):
    table = verbs_on(record, model, tmp_path)
    assert set(table) == names_of_verbs()
    for name, (arguments, code) in table.items():
        found, output = run(*name.split(), *arguments)
        assert found == code, (name, output)
        assert not INVENTED.search(output), (name, output)
        if name in ("replay", "goto", "record cut"):
            assert output.startswith("Error: "), (name, output)
            assert output.count("\n") == 1, (name, output)
            assert "a record of trl" in output


def test_what_is_not_known_is_not_known_beside_another_record_either(record, page, tmp_path):
    both = ("--compare", record, "--all-steps", "-o", tmp_path / "pages")
    assert run("open", record, *both)[0] == 0
    page.open(f"file://{tmp_path}/pages/index.html#step=0&prompt=0&sample=0&compare=B")
    page.wait_for("document.body.dataset.ready")
    assert (
        page.evaluate("at('differences').textContent") == "No difference in what both recorded of this step"
    )
    chips = "document.querySelector('.differences').textContent"
    page.evaluate(f"choose({WHOLE})")
    assert page.evaluate(chips) == "same tokensand equal values"
    page.evaluate(f"choose({TEXT})")
    assert page.evaluate(chips) == "tokens unknown"
    assert page.evaluate(f"table.rowAt({TEXT}).children[1].textContent") == "?"
    for panel in ("groups", "histograms", "samples"):
        page.evaluate(f"showPanel('{panel}')")
    assert page.evaluate("at('groups-note').textContent") == "1 sample whose prompt is not known is left out."
    assert page.errors == []


def test_another_reward_is_found_and_options_are_named_as_those_of_the_trainer(make, record, tmp_path):
    def lower(row):
        return row | {"reward": 0.25} if row.get("scores") else row

    other = make(tmp_path / "other", lower, OPTIONS | {"learning_rate": 2e-6})
    report = diff_records(open_record(record), open_record(other))
    assert (report.step, report.first.stage, report.first.name) == (0, "batch", "rewards")
    assert (report.first.left, report.first.right, report.first.place.row) == (1.0, 0.25, 2)
    assert [reason.where for reason in report.verdict.reasons] == ["learning_rate"]
    assert "where an option of trl acts is not known" in report.verdict.why
    assert run("why", record, other, "--all")[0] == 1


def test_a_record_without_config_is_accused_of_nothing_that_is_not_known(make, record, tmp_path):
    other = make(tmp_path / "other", lambda row: row, None, trainer="verl", model=None)
    report = diff_records(open_record(record), open_record(other))
    assert report.same
    assert not report.set_differently.config
    assert {"config in B", "model files in B"} <= set(report.not_known)


def test_why_uses_the_checksums_that_a_trainer_gives(make, tmp_path):
    records = []
    for name, last in (("a", "00000001"), ("b", "00000002")):
        with Recorder(tmp_path / name, trainer="slime") as recorder:
            for step, value in enumerate(("00000000", last)):
                recorder.step(step, [{"tokens": [1, 2], "loss_mask": [0, 1]}], checksums={"w": value})
        records.append(tmp_path / name)
    code, text = run("why", *records, "--no-replay", "--json")
    assert (code, json.loads(text)["step"]) == (1, 1)
    code, text = run("why", *records, "--layers")
    assert code == 1
    assert "--layers needs the plans and outcomes that our trainer records" in text


def test_replay_names_the_value_that_is_missing_and_the_option_that_does_without(make, model, tmp_path):
    def settings(*more):
        return (f"cluster.fileroot={tmp_path}", "actor.use_decoupled_loss=false", *more)

    def refusal(folder, *more, **arguments):
        opened = open_record(folder)
        filled = tmp_path / "config.yaml"
        filled.write_text(
            CONFIG.read_text().replace("path: ???", f"path: {model}").replace("???", str(tmp_path))
        )
        config = replay_config(opened, str(model), settings(*more), str(filled))
        try:
            check_values(opened, config, 0, 2, **arguments)
        except ReplayError as error:
            return str(error)
        return None

    def only(change):
        return lambda row: change(row) if "prompt_tokens" in row else None

    def filled(row):
        return row | {"logprobs": [-1.0] * 6, "reward": 1.0, "group": row["group"] or "d", "versions": None}

    whole = make(tmp_path / "whole", only(filled))
    assert refusal(whole) is None
    batch = recorded_batch(open_record(whole).step(1), 0)
    assert "unknown" not in batch
    assert set(batch["versions"][batch["loss_mask"] > 0].tolist()) == {1}
    no_logprobs = make(tmp_path / "no_logprobs", only(lambda row: filled(row) | {"logprobs": None}))
    assert "actor.recompute_logprob=true" in refusal(no_logprobs)
    assert refusal(no_logprobs, "actor.recompute_logprob=true") is None
    no_rewards = make(tmp_path / "no_rewards", only(lambda row: filled(row) | {"reward": None}))
    assert "rewards is not known in 7 of 7 rows of step 0; give --reward MODULE:FN" in refusal(no_rewards)
    assert refusal(no_rewards, has_rewards=True) is None
    no_groups = make(tmp_path / "no_groups", only(lambda row: filled(row) | {"group": None}))
    assert "normalise by batch" in refusal(no_groups)
    no_mask = make(tmp_path / "no_mask", only(lambda row: {"tokens": [1, 2, 3], "reward": 1.0, "group": 1}))
    assert "nothing says which tokens to train on" in refusal(no_mask)


@pytest.mark.long
def test_our_trainer_trains_on_the_batches_with_a_config(areal_debug, make, model, tmp_path):
    def change(row):
        if "prompt_tokens" not in row:
            return None
        return row | {"logprobs": None, "reward": float(row["reward"] or 0), "group": row["group"] or "d"}

    record = make(tmp_path / "record", change, steps=1, model=None)
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.read_text().replace("path: ???", f"path: {model}").replace("???", str(tmp_path)))
    options = ("--config", config, "actor.use_decoupled_loss=false", "actor.recompute_logprob=true")
    done = areal_debug("replay", record, *options, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 2, done.stdout + done.stderr  # nothing to compare with
    assert "a row of unknown finish reason counts as stopped" in done.stderr
    assert report["guarantee"]["kind"] == "unrecorded"
    assert report["steps"][0]["grad_norm"] > 0
    assert np.isfinite(report["steps"][0]["loss"])


def test_a_record_without_a_step_is_not_called_intact(tmp_path):
    with pytest.raises(RecordError), Recorder(tmp_path / "r", config={}, trainer="mine") as recorder:
        recorder.step(0, [{"prompt_tokens": [1]}])
    done = invoke("record", "verify", tmp_path / "r")
    assert (done.exit_code, "holds no step" in done.stdout) == (2, True)


@pytest.mark.parametrize(
    ("changed", "loss", "cause", "confidence"),
    [
        ({"logdir": "b"}, 0.75, "unknown", "low"),  # a name of a file
        ({"lr": 2.0}, 0.75, "unknown", "low"),  # acts after the loss of the first step
        ({"eps": 0.3}, 0.75, "config", "medium"),  # where it acts is not known
    ],
)
def test_an_option_of_another_trainer_is_no_sure_cause(tmp_path, changed, loss, cause, confidence):
    config = {"logdir": "a", "lr": 1.0, "eps": 0.2}
    for name, options, value in (("a", config, 0.5), ("b", config | changed, loss)):
        with Recorder(tmp_path / name, config=options, trainer="mine") as recorder:
            sample = {"prompt_tokens": [1, 2], "completion_tokens": [3], "logprobs": [-0.5], "reward": 1.0}
            recorder.step(0, [sample], stats={"loss": value})
    report = explain(open_record(tmp_path / "a"), open_record(tmp_path / "b"), Options(tmp_path)).to_dict()
    assert (report["cause"]["kind"], report["confidence"]) == (cause, confidence)
    assert "goto" not in report["next"]  # its steps cannot be replayed
    table = open_record(tmp_path / "a").to_arrow(columns=["logprobs"]).to_pylist()
    assert table == [{"logprobs": [None, None, -0.5]}]  # a prompt's log-prob is not known, and not 0
