"""`areal-debug eval`: an unchanged training script, results as JSON, wrong input."""

import json
import subprocess
from pathlib import Path

import pytest

from areal_core.testing import make_tiny_model
from recorder import open_record
from tests.command_line import invoke
from tests.forks import COMMAND, run_forked

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "gsm8k_grpo.py"
CONFIG = """
actor: {path: MODEL, dtype: float32, optimizer: {lr: 1.0e-3}}
allocation_mode: embedded|fsdp:d2
train_dataset: {path: arithmetic, type: rl, batch_size: 4, dataset_kwargs: {num_rows: 8}}
valid_dataset: {path: arithmetic, type: rl, dataset_kwargs: {num_rows: 6, seed: 1}}
gconfig: {n_samples: 2, max_new_tokens: 4}
recover: {mode: auto}
stats_logger: {tensorboard: {path: TOP/tensorboard}}
debug: {dump_rollout_data: true, dump_every: 5, path: TOP/record}
device: cpu
cluster: {fileroot: TOP/runs}
"""


@pytest.fixture
def config(tmp_path, tiny_model) -> Path:
    file = tmp_path / "own.yaml"
    file.write_text(CONFIG.replace("MODEL", str(tiny_model)).replace("TOP", str(tmp_path)))
    return file


def areal_debug(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_forked([COMMAND, *map(str, arguments)], timeout_s=900)


def refusal(*arguments: object) -> str:
    """Return the one line that is printed instead of an evaluation."""
    done = invoke("eval", *arguments)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    return " ".join(done.stderr.split())


def test_a_training_script_evaluates_two_models_unchanged(config, tiny_model, tmp_path):
    (tmp_path / "saved").mkdir()
    for name in ("globalstep9", "globalstep10"):
        (tmp_path / "saved" / name).symlink_to(tiny_model)
    options = ["--baseline", "--ckpt", tmp_path / "saved", "--samples", "3", "--rows", "4", "--k", "1,2"]
    done = areal_debug("eval", SCRIPT, "--config", config, "--json", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["run"] == "own/trial0-eval"
    assert (report["settings"]["num_rows"], report["settings"]["n_samples"]) == (4, 3)
    assert [Path(model["path"]).name for model in report["models"]] == [
        tiny_model.name, "globalstep9", "globalstep10"
    ]  # fmt: skip
    for model in report["models"]:
        assert (model["num_rows"], model["facts"]["num_samples"], model["facts"]["missing"]) == (4, 12, 0)
        assert model["measures"]["mean reward"] == {"value": 0.0, "low": None, "high": None}
        assert model["measures"]["pass@2"]["high"] == pytest.approx(0.4899, abs=1e-4)  # Wilson: 0 of 4
        assert len(Path(model["file"]).read_text().splitlines()) == 12
    assert [item["verdict"] for item in report["comparisons"]] == ["no difference found"] * 2
    record = open_record(report["record"])
    assert record.steps == (0, 1, 2)
    assert len(record.step(2).batch(0)["rewards"]) == 12
    assert invoke("record", "verify", report["record"]).exit_code == 0
    # the files of the training run stay as they are
    assert not (tmp_path / "record").exists()
    assert not (tmp_path / "tensorboard").exists()
    assert not list(tmp_path.glob("runs/logs/*/own/trial0"))


@pytest.mark.long  # five minutes where several servers share two cores
@pytest.mark.sglang
def test_a_real_server_loads_both_models_and_completes_as_the_embedded_engine_does(
    config, random_model, tmp_path
):
    models = [str(random_model(tmp_path / name, seed)) for seed, name in enumerate(("first", "second"))]
    own = [f"actor.path={models[0]}", "gconfig.greedy=true", "gconfig.max_new_tokens=8"]
    served = ["allocation_mode=sglang:d1+fsdp:d1", "sglang.dtype=float32", "sglang.context_length=256"]
    reports = []
    for engine in (served, ["trial_name=embedded"]):
        arguments = ("eval", SCRIPT, "--config", config, "--baseline", "--ckpt", models[1], "--json")
        done = areal_debug(*arguments, *own, *engine)
        assert done.returncode == 0, done.stdout + done.stderr
        reports.append(json.loads(done.stdout))
    of_server, of_embedded = ([Path(item["file"]).read_text() for item in r["models"]] for r in reports)
    assert of_server == of_embedded
    assert of_server[0] != of_server[1]


def test_wrong_input_is_one_sentence(config, tiny_model, tmp_path):
    ours = (SCRIPT, "--config", config)
    (tmp_path / "empty").mkdir()
    (tmp_path / "recovery").mkdir()
    (tmp_path / "recovery" / "checkpoint.json").touch()
    for name, sentence in {
        "absent": "absent is not a folder: give a model that a run has saved",
        "empty": "empty holds no config.json or adapter_config.json, so no model",
        "recovery": "recovery is a recovery checkpoint, of shards: give a model of saver",
    }.items():
        assert sentence in refusal(*ours, "--ckpt", tmp_path / name)
    wider = make_tiny_model(tmp_path / "wider", hidden_size=128)
    of_servers = refusal(*ours, "--ckpt", wider, "allocation_mode=sglang:d1+fsdp:d1")
    assert "wider has hidden_size 128, and the servers start with" in of_servers
    assert "--k is '4' and each row has 2 samples: give numbers from 1 to 2" in refusal(*ours, "--k", "4")
    assert "--k is 'x,1' and each row has" in refusal(*ours, "--k", "x,1")
    assert "fsdp:d1 has no rollout engine" in refusal(*ours, "allocation_mode=fsdp:d1")
    assert "gsm8k_grpo.py passes none to its trainer and the config has no valid_dataset" in refusal(
        *ours, "~valid_dataset"
    )
    assert "unknown option 'evaluation'" in refusal(*ours, "evaluation.rows=train")
    assert "cannot be read" in refusal(SCRIPT, "--config", tmp_path / "no.yaml")
    unknown = refusal("no_such_example", "--config", config)
    assert "there is no script 'no_such_example'" in unknown
    assert "tldr_ppo, tldr_reward, tldr_sft" in unknown  # and not tldr_data, which trains nothing
    supervised = tmp_path / "sft.yaml"
    supervised.write_text("actor: {path: m, optimizer: {lr: 1.0e-3}}\ntrain_dataset: {path: d, type: sft}\n")
    sft = (ROOT / "examples" / "gsm8k_sft.py", "--config", supervised)
    assert "--samples and --k is of samples, and gsm8k_sft.py trains with SFTConfig" in refusal(
        *sft, "--samples", "2", "--k", "1"
    )
    assert "gsm8k_sft.py passes none to its trainer" in refusal(*sft)
