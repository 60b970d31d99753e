"""What doctor reads: files that other tools wrote, by those tools where installed; names of metrics."""

import contextlib
import json
import math
import shutil
import sqlite3
import struct
import tomllib
import zlib
from pathlib import Path

import numpy as np
import pytest

from areal_debug.doctor.checks import unread
from areal_debug.doctor.names import choose_names
from areal_debug.doctor.read import UnreadableRun, read_run
from areal_debug.doctor.report import unknown_names_of
from areal_debug.doctor.sources.locate import find_sources

STEPS = range(12)
NAMES = tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))


def rewards(run):
    return run.series["reward"].steps.tolist(), run.series["reward"].values.tolist()


def write_lines(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def wandb_folder(tmp_path_factory):
    wandb = pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("offline")
    settings = wandb.Settings(silent=True, x_disable_stats=True, x_disable_meta=True, console="off")
    with wandb.init(mode="offline", dir=folder, project="p", id="first", settings=settings) as run:
        for step in STEPS:
            # as OpenRLHF: a step of its own, and evaluations in calls of their own
            run.log({"train/reward": step / 8, "train/global_step": step, "policy": {"entropy": 2.0}})
            if step % 4 == 0:
                run.log({"eval/eval_set_pass1": step / 16, "eval/global_step": step, "text": "x" * 40_000})
            run.log({"train/kl": float("nan"), "train/global_step": step, "h": wandb.Histogram([1, 2])})
    wandb.teardown()  # its service writes the end of the file after the run has finished
    (file,) = {file.resolve() for file in folder.rglob("*.wandb")}
    (file.parents[1] / "offline-run-2").mkdir()
    shutil.copy(file, file.parents[1] / "offline-run-2" / "run-second.wandb")
    return folder


def test_an_offline_run_of_wandb_is_read_without_wandb(wandb_folder):
    assert len(find_sources(wandb_folder)) == 2
    run = read_run(wandb_folder, "run-first.wandb")
    assert rewards(run) == (list(STEPS), [step / 8 for step in STEPS])
    assert run.series["eval_reward"].steps.tolist() == [0, 4, 8]
    assert run.series["entropy"].name == "policy/entropy"
    assert np.isnan(run.series["reference_kl"].values).all()
    assert "h/bins" not in run.by_name
    assert "_runtime" not in run.unknown_names


def test_a_run_of_wandb_that_is_cut_off_anywhere_is_read_to_there(wandb_folder, tmp_path):
    (file,) = wandb_folder.rglob("run-first.wandb")
    data = file.read_bytes()
    lengths = []
    for size in np.linspace(len(data) // 3, len(data), 40).astype(int):
        (tmp_path / "cut.wandb").write_bytes(data[:size])
        lengths.append(len(rewards(read_run(tmp_path / "cut.wandb"))[0]))
    assert lengths == sorted(lengths)
    assert lengths[-1] == len(STEPS)


def test_a_damaged_run_of_wandb_is_one_sentence(wandb_folder, tmp_path):
    (file,) = wandb_folder.rglob("run-first.wandb")
    data, chance = file.read_bytes(), np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(data)
        for place in chance.integers(0, len(data), 3):
            damaged[place] ^= 1 << int(chance.integers(8))
        (tmp_path / "x.wandb").write_bytes(damaged)
        with contextlib.suppress(UnreadableRun):  # any other error is a defect
            assert set(STEPS) >= set(rewards(read_run(tmp_path / "x.wandb"))[0])


def test_a_project_of_trackio_is_read_as_its_runs(tmp_path, monkeypatch):
    database = tmp_path / "project.db"
    with sqlite3.connect(database) as project:
        project.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name, step, metrics)")
        for name in ("a", "b"):
            rows = [(name, step, json.dumps({"reward": step / 8}).encode()) for step in STEPS]
            project.executemany("INSERT INTO metrics (run_name, step, metrics) VALUES (?, ?, ?)", rows)
    assert [source.name for source in find_sources(tmp_path)] == ["project.db/b", "project.db/a"]
    assert rewards(read_run(database, "a")) == (list(STEPS), [step / 8 for step in STEPS])
    with pytest.raises(UnreadableRun, match=r"2 runs found in .*project.db, the last written first: b, a"):
        read_run(database)


def test_the_database_of_mlflow_is_read_as_its_runs(tmp_path):
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("CREATE TABLE runs (run_uuid, name)")
        database.execute("CREATE TABLE metrics (key, value, timestamp, run_uuid, step, is_nan)")
        for time, run in enumerate("ab"):
            database.execute("INSERT INTO runs VALUES (?, 'kind')", [run * 32])
            rows = [("reward", step / 8, time, run * 32, step, step == STEPS[-1]) for step in STEPS]
            database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", rows)
    assert [source.name for source in find_sources(tmp_path)] == [
        f"mlflow.db/kind-{run * 32}" for run in "ba"
    ]
    steps, values = rewards(read_run(tmp_path, "kind-aa"))
    assert (steps, values[:-1]) == (list(STEPS), [step / 8 for step in STEPS[:-1]])
    assert math.isnan(values[-1])


STEP_FORMS = tomllib.loads(Path(__file__).with_name("steps.toml").read_text(encoding="utf-8"))["forms"]


@pytest.mark.parametrize("form", STEP_FORMS, ids=lambda form: form["lines"][0])
def test_the_step_of_a_row_is_found_in_each_of_its_forms(tmp_path, form):
    lines = [line.replace("@", str(step)) for step in STEPS for line in form["lines"]]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    run = read_run(tmp_path / "log.jsonl")
    assert run.series["reward"].name == form["reward"]
    assert rewards(run) == (list(STEPS), [float(step) for step in STEPS])


def test_exports_as_json_as_tables_of_tags_and_as_a_table_of_several_runs(tmp_path):
    rows = [{"_step": step, "reward": step / 8} for step in STEPS]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    columns = {name: {str(row["_step"]): row[name] for row in rows} for name in rows[0]}
    (tmp_path / "columns.json").write_text(json.dumps(columns))
    (tmp_path / "lists.json").write_text(json.dumps({name: [r[name] for r in rows] for name in rows[0]}))
    write_lines(tmp_path / "lines.json", rows)  # RLlib
    for tag in ("Environment_Cumulative_Reward", "Policy_Entropy"):  # TensorBoard
        table = "Wall time,Step,Value\n" + "".join(f"9,{step},{step / 8}\n" for step in STEPS)
        (tmp_path / f"run-a-tag-{tag}.csv").write_text(table)
    for name in ("rows.json", "columns.json", "lists.json", "lines.json", "run-a-tag-Policy_Entropy.csv"):
        assert rewards(read_run(tmp_path / name)) == (list(STEPS), [step / 8 for step in STEPS])
    header = '"Step","one - reward","one - reward__MIN","one - reward__MAX","two - reward"\n'
    (tmp_path / "several.csv").write_text(header + "".join(f"{s},{s / 8},-1,9,{s / 4}\n" for s in STEPS))
    with pytest.raises(UnreadableRun, match=r"2 runs found .*: one, two; choose"):
        read_run(tmp_path / "several.csv")
    run = read_run(tmp_path / "several.csv", "two")
    assert (rewards(run)[1], run.unknown_names) == ([step / 4 for step in STEPS], ())


PRINTED = tomllib.loads(Path(__file__).with_name("printed.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("framework", PRINTED)
def test_what_a_framework_prints_is_read_by_step(tmp_path, framework):
    form, names = PRINTED[framework]["form"], set(PRINTED[framework]["names"])
    lines = "".join(form.format(s=step, r=step / 16) + "\nloading 5/9\n" for step in range(1, 10))
    (tmp_path / "train.log").write_text(lines)
    run = read_run(tmp_path)
    assert set(run.by_name) == names
    first = PRINTED[framework].get("first", 1)  # 0: the lines are counted
    assert rewards(run) == (list(range(first, first + 9)), [step / 16 for step in range(1, 10)])
    assert (run.unit == "row") == (first == 0)


SEVERAL = tomllib.loads(Path(__file__).with_name("several_files.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("files", SEVERAL.values(), ids=SEVERAL)
def test_a_run_in_several_files_is_one(tmp_path, files):
    for name, (head, line) in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        lines = [line.format(s=step, v=step / 8) for step in STEPS]
        (tmp_path / name).write_text("\n".join(filter(None, [head, *lines])))
    run = read_run(tmp_path)
    assert (rewards(run)[1], set(run.by_name)) == ([step / 8 for step in STEPS], {"reward", "kl"})


def test_a_run_of_swanlab_is_read(tmp_path):
    numbers = [{"key": "train/reward", "step": step, "metric": {"data": step / 8}} for step in STEPS]
    found = [{"model_type": "Header", "data": {}}, *({"model_type": "Scalar", "data": of} for of in numbers)]
    records = [json.dumps(record).encode() for record in found]
    fragments = (struct.pack("<IHB", zlib.crc32(b"\1" + one), len(one), 1) + one for one in records)
    (tmp_path / "backup.swanlab").write_bytes(b":SWL\xd6\xe1\1" + b"".join(fragments))
    assert rewards(read_run(tmp_path)) == (list(STEPS), [step / 8 for step in STEPS])


MALFORMED = tomllib.loads(Path(__file__).with_name("malformed.toml").read_text(encoding="utf-8"))["files"]


@pytest.mark.parametrize("file", MALFORMED, ids=lambda file: file["sentence"])
def test_a_malformed_file_is_one_sentence(tmp_path, file):
    content = file["content"].encode("latin-1") * file.get("times", 1)
    (tmp_path / file["name"]).write_bytes(content)
    with pytest.raises(UnreadableRun, match=file["sentence"]):
        read_run(tmp_path / file["name"])


def test_events_are_read_as_tensorboard_reads_them(tmp_path):
    """Several values of an event, tensors of TensorFlow 2, a restart, a record that is cut off."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
    from tensorboard.util.tensor_util import make_tensor_proto

    writer = EventFileWriter(str(tmp_path))
    for step in (0, 1, 2, 5, 3, 4):
        if step == 3:
            writer.add_event(Event(step=3, session_log=SessionLog(status=SessionLog.START)))
        scalars = [Summary.Value(tag=tag, simple_value=step + 0.5) for tag in ("reward", "loss")]
        tensor = Summary.Value(tag="kl", tensor=make_tensor_proto(step * 0.25))
        writer.add_event(Event(step=step, summary=Summary(value=[*scalars, tensor])))
    writer.close()
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    theirs = accumulator.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    found = read_run(tmp_path).by_name
    for name in ("reward", "loss"):
        expected = [(event.step, event.value) for event in theirs.Scalars(name)]
        assert list(zip(found[name].steps, found[name].values, strict=True)) == expected
    assert dict(zip(found["kl"].steps, found["kl"].values, strict=True)) == {0: 0, 1: 0.25, 2: 0.5, 3: 0.75}


def test_steps_that_begin_again_in_each_epoch_are_counted_on(tmp_path):
    form = "Epoch {}, Step {}, Reward: {}: 5%|1 | 2/99 [0:02]\n"
    (tmp_path / "train.log").write_text("".join(form.format(n // 3, n % 3, n / 10) for n in range(9)))
    assert rewards(read_run(tmp_path / "train.log")) == (list(range(9)), [n / 10 for n in range(9)])


def test_a_run_that_died_before_its_first_step_is_told_with_its_last_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rank0.log").write_text("loading\nTraceback:\n  File 1\nValueError: no chat template\n")
    with pytest.raises(UnreadableRun, match=r"first step, or prints none\. Last error: ValueError: no chat"):
        read_run(tmp_path)


def test_terms_of_the_reward_are_judged_and_offered_for_nothing_else(tmp_path):
    rows = [{"step": s, "reward": s / 9, "rewards/accuracy_reward/mean": s / 9, "foo": 1} for s in STEPS]
    run = read_run(write_lines(tmp_path / "log.jsonl", rows))
    assert unread(run) == {}
    assert unknown_names_of(run).startswith("Also logged, but not judged by any check: foo;")


@pytest.mark.parametrize(("quantity", "name"), [(known, name) for known in NAMES for name in NAMES[known]])
def test_a_quantity_is_known_by_the_words_that_its_name_ends_with(quantity, name):
    name, *beside = name.split(" beside ")
    assert choose_names([name, *beside]) == ({} if quantity == "none" else {quantity: name})
