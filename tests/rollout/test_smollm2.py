"""The small real model of the examples: one preparation, then it answers."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_smollm2_is_prepared_once_and_adds(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "examples" / "smollm2.py")
    smollm2 = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(smollm2)
    folder = smollm2.prepare_smollm2(tmp_path / "model")
    assert "[4/4]" in capsys.readouterr().out

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 7 + 5?"}],
        add_generation_prompt=True,
        return_dict=False,
        return_tensors="pt",
    )
    answer = model.float().generate(  # in bfloat16, kernels of some processors word it otherwise
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False
    )
    assert "7 + 5 = 12" in tokenizer.decode(answer[0])

    smollm2.prepare_smollm2(folder)
    assert capsys.readouterr().out == ""  # nothing to do the second time
