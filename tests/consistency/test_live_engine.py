"""`areal-debug consistency --engine`: every API, several servers, faulty decoding."""

import functools
import re

import pytest

from areal_core.testing import make_tiny_tokenizer
from consistency import transforms

from .fault_server import serving
from .faulty_engine import FaultyEngine
from .records import judged

SHORT = ("--max-new-tokens", 24)


@pytest.mark.parametrize(
    ("api", "software"),
    [("vllm", "vLLM 0.32.0"), ("openai", "an OpenAI-compatible server")],  # test_sglang_real.py asks SGLang
)
def test_healthy_engine_is_healthy_over_every_api(api, software, scorer, model, prompts):
    tokenizer = make_tiny_tokenizer()
    with serving(FaultyEngine(scorer, noise=0.002), api, lambda ids: tokenizer.decode(ids)) as url:
        code, found = judged("--engine", url, "--model", model, "--prompts", prompts, *SHORT)
    assert (code, found["verdict"], [cause["id"] for cause in found["causes"]]) == (0, "healthy", ["R35"])
    assert found["engines"] == [f"{software} with faulty"]
    assert found["num_tokens"] == 12 * 24
    assert 0 < found["rescoring"]["engine_repeat"] < 0.01


HALF = {"reports": functools.partial(transforms.at_temperature, temperature=0.5)}


@pytest.mark.parametrize(
    ("decoding", "scoring", "name", "wrong", "right"),
    [
        ({"noise": 0.3}, {"noise": 0.002}, "decod", "decode", "prefill"),
        pytest.param(
            *({"noise": 0.0}, HALF, "the engine's prefill differs from its own decoding"),
            *("prefill", "sampled"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_decoding_unlike_prefill_is_named(decoding, scoring, name, wrong, right, scorer, model, prompts):
    engines = [FaultyEngine(scorer, **options) for options in (decoding, scoring)]
    with serving(engines[0], "sglang", scoring=engines[1]) as url:
        code, found = judged("--engine", url, "--model", model, "--prompts", prompts, *SHORT)
    sizes = found["rescoring"] | {"sampled": found["metrics"]["mean_abs"]}
    assert (code, found["causes"][0]["id"], name in found["causes"][0]["name"]) == (1, "R40", True)
    assert sizes[right] < 0.01 < 0.1 < sizes[wrong]


@pytest.mark.long
def test_run_to_run_variation_of_the_engine_sets_the_noise_floor(scorer, model, prompts):
    with serving(FaultyEngine(scorer, noise=0.06), "sglang") as url:
        code, found = judged(
            "--engine", url, "--model", model, "--prompts", prompts, *SHORT, "--dtype", "bfloat16"
        )
    assert (code, found["verdict"]) == (0, "healthy")
    assert "two engine scorings of the same tokens differ by" in found["setting"]["noise"]["source"]


def test_an_unrequested_transform_is_named_on_a_page_that_needs_no_network(scorer, model, prompts, tmp_path):
    transform = functools.partial(transforms.top_p, top_p=0.8)
    page = tmp_path / "report.html"
    with serving(FaultyEngine(scorer, draws=transform, reports=transform, noise=0.002), "sglang") as url:
        code, found = judged(
            "--engine", url, "--model", model, "--prompts", prompts, *SHORT, "--output", page
        )
    text = page.read_text(encoding="utf-8")
    assert (code, found["causes"][0]["id"]) == (1, "R03")
    assert text.index("mismatch</span>") < text.index("R03") < text.index("Where they differ")
    assert text.count("<svg") >= 4
    assert "replaying top_p 0.8" in text
    assert "src=" not in text
    assert set(re.findall(r'href="(.*?)"', text)) <= {"data:,", "#main"}
