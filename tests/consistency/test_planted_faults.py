"""Faults planted behind a live embedded server (`benchmarks/consistency_faults.py`) are named."""

import pytest
import torch

from benchmarks import consistency_faults as planted

EVERY = {fault.name: fault for fault in (*planted.SOUND, *planted.FAULTS)}
QUICK = (
    "sound, float32",
    "sound, bfloat16 engine and float32 trainer",
    "one stale tensor, not given",
    "rope base 1e6",
    "some completions exchanged",
    "all lists one short",
    "repeated seeds",
    "first logprob 0",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    families = {False: "llama", True: "qwen2_5_vl"}
    return {
        images: planted.make_model(family, tmp_path_factory.mktemp(family), 0)
        for images, family in families.items()
    }


def graded(name, models, folder):
    checked = planted.examine(EVERY[name], models[EVERY[name].images], folder / "fault", 0)
    return planted.grade(EVERY[name], checked), checked.diagnosis.causes[:1]


EVERYDAY = {"sound, float32", "all lists one short"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in EVERYDAY)) for name in QUICK]
)
def test_quick_fault_is_named(name, models, tmp_path):
    grade, causes = graded(name, models, tmp_path)
    assert grade == "right", causes


@pytest.mark.long
@pytest.mark.parametrize("name", ["sound, two servers", "one of three servers, one tensor", "int8 weights"])
def test_a_fault_in_bfloat16_is_told_from_the_rounding_of_a_small_model(name, tmp_path):
    model = planted.make_model("qwen3", tmp_path / "model", 7)
    planted.load_model(str(model), dtype=torch.bfloat16).save_pretrained(model)
    fault = planted.in_dtype(EVERY[name], "bfloat16")
    checked = planted.examine(fault, model, tmp_path / "fault", 7)
    assert planted.grade(fault, checked) in ("right", "honest"), checked.diagnosis.causes[:1]


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in EVERY if name not in QUICK])
def test_fault_is_named_or_left_open(name, models, tmp_path):
    grade, causes = graded(name, models, tmp_path)
    assert grade in ("right", "honest"), causes
