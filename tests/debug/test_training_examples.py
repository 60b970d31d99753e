"""The examples that train, run on a tiny model with the smallest data; and the list of examples."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_core.environment import DETERMINISTIC
from areal_core.telemetry.loggers import read_stats

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text()
TINY = (
    *("device=cpu", "total_train_steps=2", "tokenizer_path=${actor.path}"),
    *("actor.dtype=float32", "actor.gradient_checkpointing=false"),
)
SUPERVISED = (
    "allocation_mode=fsdp:d1",
    *("valid_dataset=null", "evaluator={}", "train_dataset.batch_size=4", "recover.mode=disabled"),
)
ROLLOUTS = (
    "allocation_mode=embedded|fsdp:d1",
    *(
        "train_dataset.path=arithmetic",
        "train_dataset.split=null",
        "train_dataset.dataset_kwargs={num_rows: 8}",
    ),
    *("train_dataset.batch_size=2", "gconfig.n_samples=2", "gconfig.max_new_tokens=6"),
    *("rollout.max_concurrent_rollouts=4", "actor.weight_update_mode=disk"),
)
VALIDATED = (
    *("valid_dataset.path=arithmetic", "valid_dataset.split=null", "evaluator.freq_steps=2"),
    *("valid_dataset.dataset_kwargs={num_rows: 3, seed: 9}", "eval_gconfig.max_new_tokens=4"),
)
PAIRS = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "0"} for n in range(8)]
SOLUTIONS = [{"question": f"{n}+1=", "answer": f"it is {n + 1}\n#### {n + 1}"} for n in range(8)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "config", "rows", "number"),
    [
        ("gsm8k_sft", "gsm8k_sft", SOLUTIONS, "loss"),
        ("dpo", "dpo", PAIRS, "loss"),
        ("reward_model", "reward_model", PAIRS, "loss"),
        ("gsm8k_grpo", "gsm8k_grpo", None, "grad_norm"),
        ("gsm8k_grpo", "ppo", None, "grad_norm"),
        ("synchronous", "synchronous", None, "grad_norm"),
    ],
)
def test_an_example_trains_two_steps(areal_debug, tiny_model, tmp_path, script, config, rows, number):
    data = (*ROLLOUTS, *VALIDATED * (script == "synchronous"))
    if rows:
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        data = (*SUPERVISED, f"train_dataset.path={tmp_path}/rows.jsonl", "train_dataset.split=null")
    files = (EXAMPLES / f"{script}.py", "--config", EXAMPLES / f"{config}.yaml")
    paths = (f"cluster.fileroot={tmp_path}", f"actor.path={tiny_model}")
    done = areal_debug("train", *files, *TINY, *data, *paths, **DETERMINISTIC)
    assert done.returncode == 0, done.stdout + done.stderr
    stats = read_stats(next(tmp_path.rglob("stats.jsonl")))
    assert len(stats) == 2
    assert [step.get("eval-rollout/n_seqs") for step in stats if script == "synchronous"] in ([], [3, 3])
    values = [value for step in stats for name, value in step.items() if number in name]
    assert values
    assert all(value == value and abs(value) < 1e6 for value in values)


@pytest.mark.long  # half a minute
def test_the_job_that_hangs_is_diagnosed_as_its_docstring_says(areal_debug):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    job = subprocess.Popen(
        [*launch, str(EXAMPLES / "hang.py")], stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        found = {}
        while found.get("label") != "collective_mismatch" and time.monotonic() < deadline:
            done = areal_debug("hang", "--pid", job.pid, "--json")
            found = json.loads(done.stdout) if done.stdout.startswith("{") else {}
        assert (found["label"], found["culprit_ranks"]) == ("collective_mismatch", [0])
    finally:
        os.killpg(job.pid, signal.SIGTERM)
        job.wait(30)


def test_each_example_is_listed_with_a_test_that_names_it():
    rows = re.findall(
        r"^\| \[([\w./]+)\]\(([\w./]+)\) \|.*\| \[\w+\]\(\.\./(tests/[\w/]+\.py)\) \|$", README, re.M
    )
    listed = {path: test for _, path, test in rows}
    files = {f.name for f in EXAMPLES.iterdir() if f.suffix in (".py", ".yaml")}
    files |= {f"custom_algorithm/{f.name}" for f in (EXAMPLES / "custom_algorithm").glob("*.*")}
    files |= {f"notebooks/{f.name}" for f in EXAMPLES.glob("notebooks/*.ipynb")}
    assert set(listed) == files
    for path, test in listed.items():
        scripts = [EXAMPLES / name for name in listed if listed[name] == test and name.endswith(".py")]
        texts = [file.read_text() for file in (ROOT / test, *scripts) if file.name != path]
        assert any(Path(path).stem in text for text in texts), (path, test)
