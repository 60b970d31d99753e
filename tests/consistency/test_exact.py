"""Certificates of engines and servers, and conformance of weight updates: each fault is named."""

import json

import pytest

from consistency.entry.exact import compare
from tests.command_line import invoke
from tests.marks import late

from . import unsound_server as unsound


def test_values_are_compared_bit_for_bit_and_the_first_difference_is_kept():
    near = -1.0 - 2.0**-23
    check = compare("x", [([4, 5], [-1.0, -2.0]), ([6], [-1.0])], [[-1.0, -2.0], [near]])
    assert (check.num_tokens, check.num_different, check.max_abs) == (3, 1, 2.0**-23)
    first = check.first
    assert (first.row, first.position, first.token, first.engine, first.trainer) == (1, 0, 6, -1.0, near)
    assert compare("x", [([4], [float("nan")])], [[float("nan")]]).max_abs == float("inf")


def test_the_embedded_engine_is_proven_and_then_compared(tiny_model, tmp_path):
    file = tmp_path / "certificate.json"
    arguments = ["--exact", "--engine", "embedded", "--max-new-tokens", "8", "--tokens", "1"]
    done = invoke("consistency", *arguments, "--model", tiny_model, "-o", file)
    assert done.exit_code == 0, done.output
    assert "Proven: " in done.stdout
    saved = json.loads(file.read_text())
    found = (saved["verdict"], saved["num_different"], saved["max_abs_difference"])
    assert found == ("proven", 0, "0x0.0p+0")
    by_name = {check["name"]: check for check in saved["checks"]}
    assert by_name["next turn, cached"]["cached_tokens"] > 0
    assert by_name["next turn, cache emptied"]["cached_tokens"] == 0
    assert by_name["after a weight update"]["num_tokens"] > 0


@pytest.mark.sglang
@pytest.mark.long
def test_a_real_server_gets_an_honest_verdict_and_conforms(tiny_model, sglang):
    lora = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["all-linear"]}
    with sglang(tiny_model, **lora) as running:
        address = running.server.address
        given = ["--exact", "--engine", address, "--model", str(tiny_model)]
        done = invoke("consistency", *given, "--json")
        conformed = invoke("consistency", "--conform", *given[1:], "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == {"proven": 0, "refuted": 1}[found["verdict"]], done.output
    assert all(check["num_tokens"] > 0 for check in found["checks"])
    assert float.fromhex(found["max_abs_difference"]) < 1e-5
    verdicts = {check["name"]: check["verdict"] for check in json.loads(conformed.stdout)["checks"]}
    assert verdicts.pop("sleep and wake") == "not offered"  # without --enable-memory-saver
    assert set(verdicts.values()) == {"pass"}


def conform(address, model, *options):
    return invoke("consistency", "--conform", "--engine", address, "--model", model, *options)


def test_a_sound_engine_passes_and_keeps_its_weights(tiny_model):
    with unsound.serving(str(tiny_model)) as address:
        done = conform(address, tiny_model)
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith("Conforms: 14 pass")


@pytest.mark.parametrize(
    ("plant", "names", "evidence"),
    [
        (unsound.drops_a_tensor, ("full update, folder", "full update, broadcast"), f"{unsound.DROPPED} as"),
        late(unsound.reports_the_version_before_the_load, ("versions",), "was loaded"),
        late(unsound.keeps_the_prefix_cache, ("prefix cache",), "after, on the cache of the old weights"),
        # An adapter of the same layers is a repeated part, too.
        late(unsound.ignores_a_repeated_part, ("chain, doubled part", "LoRA adapter"), ""),
        late(unsound.keeps_the_first_adapter, ("LoRA adapter",), "first adapter"),
    ],
)
def test_a_fault_is_named(tiny_model, plant, names, evidence):
    with unsound.serving(str(tiny_model), plant) as address:
        checks = json.loads(conform(address, tiny_model, "--json").stdout)["checks"]
    found = {check["name"]: check for check in checks if check["verdict"] == "fail"}
    assert tuple(found) == names
    assert all(evidence in check["held"] + check["evidence"] for check in found.values())


def test_a_wrong_model_is_one_sentence(tiny_model, model):
    with unsound.serving(str(model)) as address:
        done = conform(address, tiny_model)
    assert (done.exit_code, "does not hold the weights of" in done.stderr) == (2, True)
