"""Metrics that `doctor` reads and traces that `trace` reads, of ours and of other tools."""

import json
import random
import sqlite3
from pathlib import Path

from areal_core.telemetry.trace import TRAINER_TRACK, Trace
from areal_core.telemetry.trace_merge import MERGED, merge
from areal_debug.doctor.examine import document, examine
from areal_debug.doctor.read import UnreadableRun, read_run
from areal_debug.doctor.report import report_of
from areal_debug.report.frame import Frame
from areal_debug.report.page import write_report
from areal_debug.trace.read import read_run as read_trace
from areal_debug.trace.steps import report_on

from .fuzz_records import check_verb
from .inputs import Case, Edit, Files
from .targets import Target, read_folder

NUM_STEPS = 12


def rows() -> list[dict]:
    names = ("grad_norm", "reward", "entropy", "kl", "clip_ratio", "loss", "update_successful", "staleness")
    return [
        {"step": step} | {name: (step % 5 + place) / 7 for place, name in enumerate(names)}
        for step in range(NUM_STEPS)
    ]


def as_lines(documents: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in documents).encode()


def statistics_bases(folder: Path) -> dict[str, Files]:
    from torch.utils.tensorboard import SummaryWriter

    config = json.dumps({"seed": 1, "actor": {"optimizer": {"lr": 1e-5}}, "rollout": {"n": None}}).encode()
    checks = as_lines([{"step": 2, "mean_abs": 0.1, "k3": 0.2, "share_above_ln2": 0.0}] * 2)
    columns = ["Step", *(f"run - {name}" for name in rows()[0] if name != "step")]
    table = "\n".join([",".join(columns), *(",".join(map(str, row.values())) for row in rows())])
    with SummaryWriter(str(folder / "events")) as writer:
        for step in range(NUM_STEPS):
            writer.add_scalar("actor/grad_norm", step / 3, step)
    (events,) = read_folder(folder / "events").values()
    state = {"log_history": [{"step": 1, "loss": 0.5, "reward": 1.0}, {"step": 2, "loss": 0.25}], "epoch": 1}
    with sqlite3.connect(folder / "project.db") as project:
        project.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name TEXT, step INTEGER, metrics)")
        logged = [("a", row["step"], json.dumps(row)) for row in rows()]
        project.executemany("INSERT INTO metrics (run_name, step, metrics) VALUES (?, ?, ?)", logged)
    printed = "".join(
        f"step:{row['step']} - actor/kl_loss:{row['kl']}\n{row}\n| reward | {row['reward']} | Loss 0.5 |\n"
        for row in rows()
    )
    return {
        "trackio": {"project.db": (folder / "project.db").read_bytes()},
        "printed": {"train.log": printed.encode()},
        "ours": {"stats.jsonl": as_lines(rows()), "config.json": config, "consistency.jsonl": checks},
        "trainer": {"trainer_state.json": json.dumps(state).encode()},
        "table": {"wandb.csv": table.encode()},
        "events": {"events.out.tfevents.1.host": events},
    }


def run_statistics(case: Case, box: Path) -> None:
    """The readers, and for a share of the inputs the verb with all that it prints."""
    folder = case.write(box / "run")
    run = read_run(folder)
    found = examine(run)
    json.dumps(document(run, found))
    write_report(box / "page.html", report_of(run, found), Frame("", "", "doctor"))
    check_verb("doctor", str(folder))


def table_edit(chance: random.Random) -> Edit:
    text = chance.choice(
        [
            "step,a\n1,2\n",
            "a - b - c,Step\n",
            "Step\n1\n",
            'Step,"\n1',
            "Step,x\n1e400,1\n",
            "\x00,Step\n1,2\n",
        ]
    )
    name = chance.choice(["wandb.csv", "stats.jsonl", "trainer_state.json"])
    return chance.choice(
        [
            ["file", name, text],
            [
                "repeat",
                name,
                chance.choice(["Step,a\n", '{"step": 1}\n', "[" * 5000 + "\n", "1,2\n"]),
                300,
                "",
            ],
            [
                "set",
                "stats.jsonl",
                [chance.randrange(NUM_STEPS), "step"],
                chance.choice(["1", 10**19, 1e300, -3, 2.5, "nan"]),
            ],
        ]
    )


def trace_bases(folder: Path) -> dict[str, Files]:
    options = {"batch_size": 2, "max_head_offpolicyness": 0, "max_concurrent_rollouts": 8}
    for rank in range(2):
        trace = Trace(folder / "ranks", rank, 2, options)
        start = trace._origin_ns
        for step in range(3):
            at = start + step * 10**9
            trace.complete("rollout", "stage", at, at + 10**8, TRAINER_TRACK, {})
            args = {"step": step, "version": step, "prompts": [step], "tokens": 9}
            trace._add(
                {
                    "ph": "i",
                    "s": "p",
                    "name": "batch",
                    "cat": "batch",
                    "tid": 0,
                    "args": args,
                    "ts": 1e6 * step,
                }
            )
            counter = {"ph": "C", "name": "staleness", "cat": "counter", "tid": 0, "ts": 1e6 * step}
            trace._add(counter | {"args": {"mean": 0.5, "max": 1}})
            trace.complete("generation", "generation", at, at + 10**7, 1, {"episode": "episode 0.0"})
            args = {"prompt_id": step, "sample_id": 0, "status": "accepted", "tokens": 9}
            trace.complete("episode 0.0", "episode", at, at + 10**8, 1, args)
            trace.complete("step", "stage", at, at + 2 * 10**8, TRAINER_TRACK, {})
        trace.close()
    merged = merge(folder / "ranks").read_bytes()
    (folder / "ranks" / MERGED).unlink()
    return {"ranks": read_folder(folder / "ranks"), "merged": {MERGED: merged}}


def run_trace(case: Case, box: Path) -> None:
    folder = case.write(box / "trace")
    merged = folder / MERGED
    check_verb("trace", str(merged if merged.exists() else folder))
    report_on(read_trace(merged if merged.exists() else folder), None)


TARGETS = {
    "statistics": Target(statistics_bases, run_statistics, (UnreadableRun,), table_edit),
    "trace": Target(trace_bases, run_trace, (ValueError,)),
}
