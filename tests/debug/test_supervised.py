"""Runs of supervised methods: recorded as any run, and replayed to the same bits, also on fewer ranks."""

import json
from pathlib import Path

import pytest
import yaml

from areal_debug.resume.coverage import coverage_of
from recorder import open_record
from tests import json_schema

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {"sft": "gsm8k_sft.py", "dpo": "dpo.py", "rw": "reward_model.py"}
DATA = [
    {"prompt": f"{i} + 3 = ", "completion": "so " * (i % 7) + str(i + 3), "chosen": str(i + 3),
     "rejected": "no " * (i % 4 + 1)}
    for i in range(40)
]  # fmt: skip
# Micro-batches are uneven: rows have other lengths, and ranks other numbers of them.
ACTOR = {
    "dtype": "float32",
    "mb_spec": {"max_tokens_per_mb": 64},
    "optimizer": {"lr": 1e-3, "warmup_steps_proportion": 0.0, "gradient_clipping": 0.5},
}


@pytest.fixture
def record(areal_debug, tiny_model, tmp_path):
    """Record three steps: `record("sft", 2, "debug.reduction=fixed")`."""

    def run(method: str, num_ranks: int = 1, *options: str) -> Path:
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DATA))
        tree = {
            "experiment_name": "e", "trial_name": "t", "total_train_steps": 3, "device": "cpu",
            "deterministic": True, "cluster": {"fileroot": str(tmp_path)},
            "allocation_mode": f"fsdp:d{num_ranks}", "actor": ACTOR | {"path": str(tiny_model)},
            "train_dataset": {"path": str(tmp_path / "data.jsonl"), "type": method, "batch_size": 8},
        }  # fmt: skip
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
        script = EXAMPLES / SCRIPTS[method]
        dump = ("--dump-rollout", tmp_path / "record", *options)
        done = areal_debug("train", script, "--config", tmp_path / "config.yaml", *dump)
        assert done.returncode == 0, done.stdout + done.stderr
        return tmp_path / "record"

    return run


@pytest.fixture
def replay(areal_debug):
    def run(record: Path, *options: object) -> tuple[int, dict]:
        done = areal_debug("replay", record, *options, "--json")
        assert done.stdout, done.stderr
        document = json.loads(done.stdout)
        if "--find-faulty" not in options:
            json_schema.check("replay", document)
        return done.returncode, document

    return run


def test_fine_tuning_is_recorded_and_replays_to_the_same_bits(record, replay, areal_debug):
    valid = (f"valid_dataset.{name}=${{train_dataset.{name}}}" for name in ("path", "type", "batch_size"))
    folder = record("sft", 1, *valid, "evaluator.eval_before_train=true")
    opened = open_record(folder)
    step = opened.step(1)
    assert (opened.header.method, step.num_rows(0)) == ("sft", 8)
    assert step.num_unknown() == dict.fromkeys(("logprobs", "versions", "rewards", "finish_reason"), 8)
    batch = step.batch(0)
    first = slice(*batch["cu_seqlens"][:2])
    assert batch["loss_mask"][first].tolist() == sorted(batch["loss_mask"][first].tolist())
    ends = batch["input_ids"][batch["cu_seqlens"][1:] - 1]
    assert (ends == ends[0]).all()
    code, report = replay(folder)
    assert (code, report["result"], len(report["steps"])) == (0, "identical", 3)
    assert report["steps"][2]["num_compared"] > 30
    assert coverage_of(opened, DATA).verdict == "unknown"  # 24 of 40 rows, in another order than their own
    for asked in ("--explain 1", "--step 1 --layouts", "--reward a:b", "--filter reward>0"):
        done = areal_debug("replay", folder, *asked.split())
        assert done.returncode == 2
        assert "is for policy optimisation, and" in done.stderr
        assert "is a record of sft" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("reduction", ["fixed", "library"])
@pytest.mark.parametrize(
    ("method", "num_ranks", "processes"),
    [("sft", 2, "1"), ("sft", 4, "21"), ("sft", 8, "421"), ("dpo", 2, "1"), ("rw", 4, "21")],
)
def test_fewer_processes_repeat_the_bits_of_all_ranks(
    record, replay, areal_debug, method, num_ranks, processes, reduction
):
    folder = record(method, num_ranks, f"debug.reduction={reduction}", "debug.anchor_every_steps=2")
    micro_batches = [len(open_record(folder).step(0).outcome(r).micro_batches) for r in range(num_ranks)]
    assert max(micro_batches) > 1 or num_ranks > 2
    for count in (str(num_ranks), *processes):
        code, report = replay(folder, "--nproc", count)
        assert (code, report["result"], len(report["steps"])) == (0, "identical", 3)
    changed = replay(folder, "actor.optimizer.lr=0.002", "--nproc", "1")[1]
    assert (changed["guarantee"]["kind"], changed["weights_diverge_at"]) == ("changed", 0)
    code, report = replay(folder, "--find-faulty", "--step", "1", "--nproc", "1")
    assert (code, report["kind"]) == (0, "sound")
    done = areal_debug("goto", folder, "--step", "2", "--nproc", "1", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["faithful"], report["anchor"]) == (0, True, 2)
    if method != "sft":
        done = areal_debug("replay", folder, "--filter", "prompt_id > 3")
        assert done.returncode == 2
        assert f"is a record of {method}, whose rows are pairs" in done.stderr
