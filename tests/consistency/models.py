"""A tiny model with large random weights, so that its distributions are peaked."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from areal_core.engine.attention import PACKED

VOCABULARY_SIZE = 160
EOS, BOS = 1, 2
ARCHITECTURE = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}


def peaked_model(seed: int = 0, **changes) -> PreTrainedModel:
    """A Llama of two layers, float32, entropy of about 3 nats, for packed scoring."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(**(ARCHITECTURE | changes), dtype="float32")
        return LlamaForCausalLM._from_config(config, attn_implementation=PACKED).eval()
