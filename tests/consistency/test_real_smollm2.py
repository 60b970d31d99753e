"""A small chat model in bfloat16 on SGLang: noise is healthy, a wrong chat template is not."""

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from areal_core.config import SGLangConfig
from areal_core.launch.sglang_process import SGLangServer, cpu_environment, server_args
from areal_core.servers.server import call
from areal_debug.verbs.consistency import command
from consistency.case import Request
from consistency.check import check
from consistency.source import Sampled, Sampling
from consistency.tokens import Completion, sequences_from_completions

pytestmark = [pytest.mark.long, pytest.mark.sglang]
ROOT = Path(__file__).parents[2]
QUESTIONS = [f"Tom has {3 + n} apples and buys {2 * n + 1} more. How many apples has he?" for n in range(32)]
OTHER_TEMPLATE = "{% for m in messages %}### Instruction:\n{{ m.content }}\n\n### Response:\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "examples" / "smollm2.py")
    smollm2 = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(smollm2)
    return smollm2.prepare_smollm2(tmp_path_factory.mktemp("smollm2") / "model")


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    options = SGLangConfig(dtype="bfloat16", context_length=512, max_total_tokens=16384)
    log = tmp_path_factory.mktemp("sglang") / "server.log"
    arguments = server_args(options, "cpu")
    with SGLangServer(model, log, arguments, cpu_environment(), ready_timeout_s=600.0) as running:
        yield running.server


def test_bfloat16_engine_is_healthy_and_its_noise_is_reported(server, model, tmp_path):
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text("".join(json.dumps({"question": question}) + "\n" for question in QUESTIONS))
    arguments = ["--engine", server.address, "--model", model, "--prompts", prompts, "--max-new-tokens", 48]
    done = CliRunner().invoke(command, [*map(str, arguments), "--json"])
    found = json.loads(done.stdout)
    assert (done.exit_code, found["verdict"], found["dtype"]) == (0, "healthy", "bfloat16")
    assert [cause["id"] for cause in found["causes"]] == ["R35"]
    assert 0.001 < found["metrics"]["mean_abs"] < 0.05
    assert found["rescoring"]["engine_repeat"] < 0.02


def test_prompts_that_another_chat_template_rendered_are_named(server, model):
    """Each side renders the chat itself, and one of the templates is wrong."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    completions = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        believed, sent = (
            tokenizer.apply_chat_template(
                chat, chat_template=template, add_generation_prompt=True, return_dict=False
            )
            for template in (None, OTHER_TEMPLATE)
        )
        params = {"temperature": 1.0, "max_new_tokens": 48, "ignore_eos": True}
        payload = {"input_ids": sent, "sampling_params": params, "return_logprob": True}
        rows = json.loads(call(server, "POST", "/generate", payload))["meta_info"]["output_token_logprobs"]
        completions.append(Completion(believed, [row[1] for row in rows], [row[0] for row in rows]))
    sampling = Sampling(1.0, 1.0, None, False, "bfloat16", "bfloat16")
    sampled = Sampled({"rows": sequences_from_completions(completions)}, sampling)
    found = check(sampled, Request(str(model))).diagnosis
    assert (found.verdict, found.causes[0].id) == ("mismatch", "R16")
