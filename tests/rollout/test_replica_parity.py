"""The embedded engine samples only from models whose log-probs it computes as their class does."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_core.embedded.replica import Replica
from areal_core.errors import ModelError
from benchmarks import model_families as families


@pytest.mark.parametrize(
    "name",
    [
        "gemma2",
        "gpt_oss",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("llama", "granite", "phi3, LongRoPE", "bloom")
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)])
def test_a_family_with_a_cache_of_keys_and_values_is_sampled_from(tmp_path, name, dtype):
    families.write_tiny(name, str(tmp_path))
    replica = Replica(str(tmp_path), dtype, torch.device("cpu"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager")
    ids = torch.arange(3, 12)[None]
    found, expected = (
        model(input_ids=ids).logits.float().log_softmax(-1) for model in (replica.model, plain)
    )
    assert (found - expected).abs().max() < {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]


@pytest.mark.parametrize("name", ["mamba", "lfm2", "qwen3_next"])
def test_a_family_with_another_state_is_refused_with_a_sentence(tmp_path, name):
    families.write_tiny(name, str(tmp_path))
    with pytest.raises(
        ModelError, match=f"cannot sample from '{name}' models, use sglang in allocation_mode"
    ):
        Replica(str(tmp_path), torch.float32, torch.device("cpu"))
