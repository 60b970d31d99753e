"""Real faults of SGLang servers, found over HTTP; weights are changed in place."""

import json

import pytest
import torch
from click.testing import CliRunner
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM

from areal_core.config import SGLangConfig
from areal_core.launch.sglang_process import SGLangServer, cpu_environment, server_args
from areal_core.servers.server import call
from areal_core.testing import make_tiny_tokenizer
from areal_debug.verbs.consistency import command
from consistency.probes import SCHEMES, quantized
from consistency.score import load_scorer

from .models import ARCHITECTURE
from .records import save_model

pytestmark = [pytest.mark.long, pytest.mark.sglang]


def serving(model, folder):
    options = SGLangConfig(
        dtype="float32", context_length=1024, max_total_tokens=16384, disable_radix_cache=False
    )
    arguments = server_args(options, "cpu")
    return SGLangServer(model, folder / "server.log", arguments, cpu_environment(), ready_timeout_s=600.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with serving(model, tmp_path_factory.mktemp("sglang")) as running:
        yield running.server


@pytest.fixture
def holding(server, model):
    """Load a checkpoint into the server; restore `model` afterwards."""

    def load(folder, **options):
        call(server, "POST", "/update_weights_from_disk", {"model_path": str(folder)} | options, 300.0)

    yield load
    load(model)


def saved(scorer, folder):
    scorer.model.save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder


def written(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def prompts_of(file, begin, end):
    rows = [{"input_ids": [5 + (7 * row + 3 * i) % 95 for i in range(24)]} for row in range(begin, end)]
    return written(file, rows)


def judged(server, model, prompts, *options):
    arguments = ["--engine", server.address, "--model", model, "--prompts", prompts, "--json"]
    done = CliRunner().invoke(command, [*map(str, [*arguments, "--max-new-tokens", "48", *options])])
    assert done.exit_code in (0, 1, 2), done.output
    assert done.stdout, done.output
    return json.loads(done.stdout)


def first_cause(found):
    assert found["verdict"] == "mismatch", found["causes"]
    return found["causes"][0]["id"]


def test_quantised_weights_in_the_engine_are_named(server, model, holding, tmp_path):
    folder = saved(quantized(load_scorer(str(model)), SCHEMES["int4"]), tmp_path / "int4")
    holding(folder)
    found = judged(server, model, prompts_of(tmp_path / "p.jsonl", 0, 32))
    assert first_cause(found) == "R44"
    assert found["causes"][0]["name"] == "the engine's weights in int4"


def test_adapter_that_was_not_loaded_is_named(server, model, tmp_path):
    merged = load_scorer(str(model))
    generator = torch.Generator().manual_seed(0)
    for layer in merged.model.base_model.layers:
        weight = layer.self_attn.q_proj.weight.data
        left, right = (torch.randn(n, 4, generator=generator) for n in weight.shape)
        weight += 0.05 * left @ right.T
    folder = saved(merged, tmp_path / "merged")
    prompts = prompts_of(tmp_path / "p.jsonl", 0, 32)
    assert first_cause(judged(server, folder, prompts, "--base", model)) == "R32"


def test_cache_kept_over_a_weight_change_is_named(server, model, holding, tmp_path):
    newer = save_model(tmp_path / "newer", seed=3)
    judged(
        server, model, prompts_of(tmp_path / "first.jsonl", 0, 20)
    )  # fills the cache with keys of the old weights
    holding(newer, flush_cache=False)
    found = judged(server, newer, prompts_of(tmp_path / "both.jsonl", 0, 40))
    assert first_cause(found) == "R29"
    sizes = {group["key"]: group["mean_abs"] for group in found["by"]["cached"]}
    assert sizes[0] < 1e-3 < sizes[1]


def test_stale_server_is_named_when_the_previous_checkpoint_is_given(server, model, tmp_path):
    newer = save_model(tmp_path / "newer", seed=3)
    prompts = prompts_of(tmp_path / "p.jsonl", 0, 32)
    assert first_cause(judged(server, newer, prompts, "--previous", model)) == "R24"


def qwen3(vocab_size):
    config = Qwen3Config(**(ARCHITECTURE | {"vocab_size": vocab_size, "head_dim": 16}), dtype="float32")
    return Qwen3ForCausalLM(config)


def gemma3(vocab_size):
    changes = {"vocab_size": vocab_size, "head_dim": 16, "tie_word_embeddings": True, "sliding_window": 32}
    return Gemma3ForCausalLM(Gemma3TextConfig(**(ARCHITECTURE | changes), dtype="float32"))


@pytest.mark.parametrize("build", [qwen3, gemma3])
def test_other_families_agree_to_under_1e_5(build, tmp_path):
    tokenizer = make_tiny_tokenizer()
    torch.manual_seed(0)
    folder = tmp_path / "model"
    build(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with serving(folder, tmp_path) as running:
        found = judged(running.server, folder, prompts_of(tmp_path / "p.jsonl", 0, 32))
    assert (found["verdict"], [cause["id"] for cause in found["causes"]]) == ("healthy", ["R35"])
    assert found["metrics"]["mean_abs"] < 1e-5
