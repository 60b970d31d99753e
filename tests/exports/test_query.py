"""`areal-debug query`: values against NumPy, what it reads, what it refuses."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from recorder import Record, open_record
from tests.command_line import run as areal_debug
from tests.exports.given import recorded_rows

MEMORY = 1 << 29
run = partial(areal_debug, "query")


def database_of(record: Record):
    from areal_debug.query.database import Database  # of 300 modules, in one worker alone

    return Database(record, MEMORY)


def ask(folder: Path, sql: str) -> list[tuple]:
    return list(database_of(open_record(folder)).query(sql).rows())


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """A child that is forked while DuckDB's threads run, as `ask` leaves them, may wait for one."""
    monkeypatch.setattr("recorder.confine.run_confined", lambda work, bounds, announce: work())


@pytest.mark.long
@pytest.mark.parametrize("pool", ["mimalloc", "jemalloc", "system"])
def test_lower_limits_and_a_busy_machine_refuse_nothing(full, tmp_path, pool):
    """Beside eight processes that compute, under each allocator of Arrow and `ulimit`."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": pool}
    begin = (sys.executable, "-P", "-m", "areal_debug")
    options = ("--format", "parquet", "--force", "--to", f"{tmp_path}/x.parquet")
    export = ("record", "export", str(full), *options)
    try:
        for limit in ("ulimit -v 4000000", "ulimit -t 20", "true"):
            for verb in (("query", str(full), "select * from tokens"), export) * 4:
                command = ["bash", "-c", f'{limit}; exec "$@"', "bash", *begin, *verb]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
                assert done.returncode == 0, (limit, verb, done.stderr)
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_tokens_are_those_of_the_record(full):
    columns = "step, rank, row, position, token_id, logprob, version, loss_mask, prox_logp"
    found = ask(full, f"select {columns} from tokens order by step, rank, row, position")
    want = [
        (
            *(row[key] for key in ("step", "rank", "row")),
            position,
            *(row[key][position] for key in ("input_ids", "logprobs", "versions", "loss_mask")),
            row["prox_logp"][position - 1] if position else None,
        )
        for row in recorded_rows(full)
        for position in range(len(row["input_ids"]))
    ]
    assert found == want


def test_steps_and_outcomes_are_those_of_the_record(full):
    steps = ask(full, "select step, version, num_ranks, num_samples, num_tokens, mean_reward from steps")
    rewards = [float(row["rewards"]) for row in recorded_rows(full)]
    assert steps == [(0, 1, 2, 8, 42, sum(rewards[:8]) / 8), (1, 2, 2, 8, 42, sum(rewards[8:]) / 8)]
    stats = ask(full, "select step, rank, name, value from outcomes where minibatch is null order by all")
    assert stats == [
        (step, 0, name, value)
        for step in (0, 1)
        for name, value in (("clip_ratio", 0.0), ("grad_norm", 1 / (step + 3)))
    ]
    losses = ask(full, "select step, rank, value from outcomes where name = 'micro_batch/loss' order by all")
    assert losses == [(0, 0, 0.5), (0, 1, 0.5), (1, 0, 1.5), (1, 1, 1.5)]


def test_what_is_not_known_is_null(foreign):
    assert ask(foreign, "select step, mean_reward from steps") == [(0, 1.0), (1, None)]
    counts = "count(*), count(reward), count(prompt_id), count(finish_reason), count(token_ids)"
    assert ask(foreign, f"select {counts} from samples") == [(5, 1, 1, 2, 4)]
    unknown = ask(foreign, "select logprob, version, advantages from tokens where row = 1 and step = 0")
    assert unknown == [(None, None, None)] * 4
    assert ask(
        foreign, 'select "scores.format", routed_experts[2] from samples where "scores.format" > 0'
    ) == [(0.5, [[4, 5], [6, 7]])]
    assert ask(foreign, "select name, value from outcomes") == [("loss", 0.1)]


def test_only_the_columns_and_steps_of_the_query_are_read(full, tmp_path):
    copy = tmp_path / "record"
    shutil.copytree(full, copy)
    for file in (copy / "steps/000001").glob("learning-*"):
        file.write_bytes(file.read_bytes()[:-1])
    record = open_record(copy)
    reads = []
    original = record.storage.read
    object.__setattr__(record.storage, "read", lambda *a: reads.append(a[0]) or original(*a))
    database = database_of(record)
    assert len(list(database.query("select advantages from samples where step = 0").rows())) == 8
    reads.clear()
    assert (
        len(list(database.query("select step, count(*) from samples where step > 0 group by 1").rows())) == 1
    )
    assert reads == []  # step.json has both
    list(database.query("select avg(reward) from samples where step = 1").rows())
    assert {name.split("/")[1] for name in reads} == {"000001"}
    code, out, err = run(copy, "select sum(advantages[2]) from samples")
    assert (code, out.split()[:2]) == (1, ["1", "row"])  # of the other step
    assert "learning-00000-of-00002.safetensors" in err


@pytest.mark.parametrize(
    ("sql", "sentence"),
    [
        ("selec 1", "Parser Error: syntax error at or near"),
        ("select nosuch from samples", 'Referenced column "nosuch" not found'),
        ("select * from nosuch", "Table with name nosuch does not exist"),
        ("drop table samples", "give one query that only reads"),
        ("select 1; select 2", "give one query that only reads"),
        ("", "give one query that only reads"),
        ("set threads = 8", "give one query that only reads"),
        ("select * from read_text('/etc/passwd')", "file system operations are disabled"),
        ("select * from '/etc/passwd'", "does not exist"),
        ("select error('x')", "x"),
    ],
)
def test_a_wrong_query_is_one_sentence(full, sql, sentence):
    code, out, err = run(full, sql)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "sql",
    [
        "copy samples to 'FILE'",
        "attach 'FILE' as other",
        "install httpfs",
        "load httpfs",
        "export database 'FILE'",
        "set enable_external_access = true",
        "select * from read_parquet('FILE')",
        "select * from glob('*')",
    ],
)
def test_the_database_itself_refuses_files_extensions_and_settings(full, tmp_path, sql):
    import duckdb

    database = database_of(open_record(full))
    with pytest.raises(duckdb.Error):
        database.connection.execute(sql.replace("FILE", str(tmp_path / "file"))).fetchall()
    assert list(tmp_path.iterdir()) == []


def test_schema_lists_tables_and_columns(full):
    code, out, _ = run(full, "--schema", "--json")
    tables = {table["table"]: table["columns"] for table in json.loads(out)}
    assert code == 0
    assert list(tables) == ["steps", "samples", "tokens", "outcomes", "calls", "tool_calls"]
    assert tables["samples"]["advantages"] == "FLOAT[]"
    assert tables["tokens"]["logprob"] == "FLOAT"
    assert "advantages" in run(full, "--schema")[1]


FORMULAS = "select '=1+1' a, '-x' b, '@x' c, 'x=1' d, -1.5 e, null f, [1, null] g, sum(row) h from samples"


def test_csv_has_no_formula(full, tmp_path):
    code, out, _ = run(full, FORMULAS, "--csv")
    assert code == 0
    names, row = csv.reader(io.StringIO(out))
    assert names == list("abcdefgh")
    assert row == ["'=1+1", "'-x", "'@x", "x=1", "-1.5", "", "[1, null]", "24"]
    assert run(full, FORMULAS, "-o", tmp_path / "a.csv")[0] == 0
    assert (tmp_path / "a.csv").read_text() == out
    header = next(csv.reader(io.StringIO(run(full, 'select 1 as "=1+1"', "--csv")[1])))
    assert header == ["'=1+1"]


def test_json_and_files_hold_exact_values(full, tmp_path):
    from pyarrow import parquet

    sql = "select step, row, logprobs, sum(num_tokens) over () n, 'nan'::float x from samples order by 1, rank, 2"
    found = json.loads(run(full, sql, "--json")[1])
    want = recorded_rows(full)
    got = np.concatenate([np.array(row["logprobs"], np.float32) for row in found])
    assert got.tobytes() == b"".join(row["logprobs"].tobytes() for row in want)
    assert {row["n"] for row in found} == {84}
    assert found[0]["x"] == {"float": "nan"}
    for name in ("a.json", "a.jsonl", "a.parquet"):
        assert run(full, sql, "-o", tmp_path / name)[0] == 0
    assert json.loads((tmp_path / "a.json").read_text()) == found
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == found
    table = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert [row["logprobs"] for row in table] == [row["logprobs"] for row in found]
    assert run(full, "select 1 where false", "--json")[1] == "[]\n"
    code, _, err = run(full, sql, "-o", tmp_path / "a.json")
    assert (code, "exists already" in err) == (2, True)
    code, _, err = run(full, sql, "-o", tmp_path / "a.xlsx")
    assert (code, ".parquet, .csv, .json, .jsonl" in err) == (2, True)
