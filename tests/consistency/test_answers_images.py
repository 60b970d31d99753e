"""`consistency --answers` with images: both sides decode greedily from the same pictures."""

import json
import shutil

import pytest
from click.testing import CliRunner

from areal_core.data.images import data_url
from areal_core.testing.embedded_server import EmbeddedServer
from areal_core.testing.tiny_vision import make_tiny_vision_model
from areal_debug.verbs.consistency import command

from ..recorder.pictured import png
from .fault_server import hosting

NUM_PROMPTS = 6


# By the first token, so that right and wrong ones occur.
GRADE = """def grade(prompt, completions, prompt_ids, completion_ids, **row):
    return float(completion_ids[0] % 2)
"""


def answers_of(model, served, folder):
    """Return the facts of `--answers`, and the exit code."""
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]}]
    rows = [{"messages": chat, "images": [data_url(png(seed, 24, 16))]} for seed in range(NUM_PROMPTS)]
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "grading.py").write_text(GRADE)
    server = EmbeddedServer(str(served))
    with hosting(server.application()) as url:
        options = ["--engine", url, "--model", str(model), "--prompts", str(prompts), "--answers", "--json"]
        grading = ["--reward", f"{folder}/grading.py:grade", "--max-new-tokens", "12"]
        done = CliRunner().invoke(command, [*options, *grading])
    server.sampler.close()
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)["answers"], done.exit_code


@pytest.mark.long
def test_greedy_answers_are_identical_until_the_engine_sees_other_pixels(tmp_path):
    model = make_tiny_vision_model(tmp_path / "model", "qwen2_5_vl", initializer_range=0.3)
    found, code = answers_of(model, model, tmp_path)
    assert code == 0
    assert (found["num_prompts"], found["identical"], found["diverges_after"]) == (6, 6, None)
    assert found["engine_right"] == found["model_right"]
    served = tmp_path / "served"
    shutil.copytree(model, served)
    file = served / "processor_config.json"
    config = json.loads(file.read_text())
    config["image_processor"] |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    file.write_text(json.dumps(config))
    found, code = answers_of(model, served, tmp_path)
    assert code == 1
    assert found["identical"] < NUM_PROMPTS
