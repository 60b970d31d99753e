"""A run whose engine has another image processor: replayed to the same bits, its setting named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from areal_core.data.image_rows import shape_rows
from areal_core.data.images import data_url
from areal_core.launch.sglang_process import SGLangServer
from areal_core.testing.tiny_vision import make_tiny_vision_model

pytestmark = pytest.mark.long
EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT = 512  # pixels of an image in the engine; those of the run have 32 x 32
# 256 gives these images the same size.
NAME = f"another image processor: images of at most 256 pixels or images of at most {LIMIT} pixels"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "AREAL_LLM_SERVER_ADDRS": ""}


def areal_debug(*arguments, expected=0, **environment):
    """Run the command line, check its exit code, and return its standard output."""
    command = [sys.executable, "-m", "areal_debug", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | environment)
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout


def train(script, folder, model, *options, **environment):
    files = [EXAMPLES / f"{script}.py", "--config", EXAMPLES / options[0]]
    paths = [f"cluster.fileroot={folder}", f"actor.path={model}"]
    return areal_debug("train", *files, *paths, *options[1:], **environment)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model that counts shapes a little, by supervised fine-tuning."""
    folder = tmp_path_factory.mktemp("shapes")
    untrained = make_tiny_vision_model(folder / "untrained", "qwen2_5_vl", seed=1)
    train("vision_sft", folder, untrained, "vision_shapes_sft.yaml")
    (tuned,) = (folder / "checkpoints").glob("*/vision-shapes/sft/default/final")
    return Path(tuned.rename(folder / "model"))


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    """A server of the same weights, in a folder with another limit of the size of images."""
    folder = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(model, folder)
    file = folder / "processor_config.json"
    config = json.loads(file.read_text())
    config["image_processor"]["size"]["longest_edge"] = LIMIT
    file.write_text(json.dumps(config))
    module = "areal_core.testing.embedded_server"
    with SGLangServer(
        folder, folder.parent / "server.log", ["--dtype", "float32"], {}, module=module
    ) as started:
        started.wait_until_ready()
        yield started.server.address


@pytest.fixture(scope="module")
def run(model, served, tmp_path_factory):
    """Two recorded steps with that engine, and the model that it holds after them."""
    folder = tmp_path_factory.mktemp("run")
    options = [
        *("--dump-rollout", folder / "record", "allocation_mode=sglang:d1+fsdp:d1", "total_train_steps=2"),
        *("valid_dataset=null", "evaluator.freq_steps=null", "evaluator.eval_before_train=false"),
    ]
    train("vision_grpo", folder, model, "vision_shapes.yaml", *options, AREAL_LLM_SERVER_ADDRS=served)
    (saved,) = (folder / "checkpoints").glob("*/vision-shapes/grpo/default/globalstep1")
    return folder / "record", saved


def test_the_run_is_replayed_to_the_same_bits(run):
    assert "Bit-identical: 2 of 2 steps" in areal_debug("replay", run[0])


def named_by(*arguments):
    found = json.loads(areal_debug("consistency", *arguments, "--json", expected=1))
    return found["verdict"], found["causes"][0]["id"], found["causes"][0]["name"]


def test_the_record_names_the_processor_with_its_setting(run):
    verdict, cause, name = named_by(run[0])
    assert (verdict, cause) == ("mismatch", "R62")
    assert name == NAME


def test_the_live_engine_names_the_processor_with_its_setting(run, served, tmp_path):
    question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]
    rows = [{"messages": question, "images": [data_url(row["images"][0])]} for row in shape_rows(64, seed=7)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--engine", served, "--model", run[1], "--prompts", prompts]
    verdict, cause, name = named_by(*arguments, "--num-samples", 2, "--max-new-tokens", 3)
    assert (verdict, cause) == ("mismatch", "R62")
    assert name == NAME
