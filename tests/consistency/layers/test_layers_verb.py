"""`areal-debug consistency --layers`: what it prints, its exit codes, and its refusals."""

import json
import shutil

import pytest

from areal_core.testing import make_tiny_model
from tests.command_line import invoke

from ..records import save_model, write_record


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, the same with another rope base, and prompts."""
    folder = tmp_path_factory.mktemp("layers")
    make_tiny_model(folder / "model")
    shutil.copytree(folder / "model", folder / "other")
    config = json.loads((folder / "other/config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 20000.0
    (folder / "other/config.json").write_text(json.dumps(config))
    rows = [{"input_ids": [10 + row, 20, 30 + row, *range(40, 60)]} for row in range(3)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(folder, *arguments):
    prompts = ["--prompts", str(folder / "prompts.jsonl"), "--model", str(folder / "model")]
    done = invoke("consistency", *prompts, *arguments)
    return done.exit_code, done.output


def test_other_rope_base_is_named_with_layer_and_next_step(folder):
    code, text = run(folder, "--layers", f"transformers={folder / 'other'}")
    assert code == 1
    assert text.startswith("Mismatch: layer 0, rope in Transformers with")
    assert "compare rope_parameters" in text
    assert "layer 1, rope" in text


def test_rows_of_a_record_are_run_through_the_engine(tmp_path):
    model = save_model(tmp_path / "model", seed=0)
    record = write_record(tmp_path / "record", model)
    done = invoke("consistency", record, "--layers", "transformers", "--dtype", "float32", "--json")
    facts = json.loads(done.output)
    assert (done.exit_code, facts["verdict"], facts["num_rows"]) == (0, "healthy", 8)
    assert facts["num_tokens"] > 8 * 50
