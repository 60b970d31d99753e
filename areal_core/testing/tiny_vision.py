"""Tiny vision-language models with their processors, for tests, examples and the demo."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast, ProcessorMixin

from areal_core.testing import make_tiny_tokenizer

QWEN_TOKENS = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
GEMMA_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
CHAT_TEMPLATE = (
    "{{% for message in messages %}}<|{{{{ message['role'] }}}}|>"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for part in message['content'] %}}"
    "{{% if part['type'] == 'image' %}}{image}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}<|end|>{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
)
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
PATCH, MERGE = 4, 2  # pixels of a patch's side; patches of a vision token's side
QWEN_VISION = {"depth": 2, "num_heads": 2, "spatial_merge_size": MERGE, "temporal_patch_size": 2}
QWEN_TOKENS_PER_IMAGE = 2, 16  # at least and at most
GEMMA_SIZE, GEMMA_TOKENS_PER_IMAGE = 16, 4

VISION_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        "vision": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        "tie_word_embeddings": True,
    },
    "qwen2_5_vl": {
        "text": {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        "vision": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
        "tie_word_embeddings": False,
    },
    "qwen3_vl": {
        "text": {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
            },
        },
        "vision": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "text": {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
        },
        "vision": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": GEMMA_SIZE,
            "patch_size": PATCH,
            "vision_use_head": False,
        },
        "tie_word_embeddings": True,
        "mm_tokens_per_image": GEMMA_TOKENS_PER_IMAGE,
    },
}


def make_tiny_vision_model(
    folder: str | Path, family: str, *, seed: int = 0, patch: int = PATCH, **changes: Any
) -> Path:
    """Write a random float32 model of one of `VISION_FAMILIES` and its processor to `folder`.

    Args:
        family: `model_type` in Transformers.
        patch: pixels of a patch's side, of Qwen families; SGLang serves Qwen2.5-VL with 14 only.
        changes: options of the text model's config.
    """
    folder, options = Path(folder), dict(VISION_FAMILIES[family])
    processor = make_tiny_processor(family, patch)
    tokenizer = processor.tokenizer
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _tokens(family).items()}
    vision = options.pop("vision")
    if family != "gemma3":
        vision = vision | QWEN_VISION | {"patch_size": patch}
    if family == "qwen2_5_vl":
        vision["window_size"] = 2 * patch * MERGE
    text = TEXT | {"vocab_size": len(tokenizer)} | options.pop("text") | changes
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text["bos_token_id"] = None
    suffix = "_index" if family == "gemma3" else "_id"
    config = AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=vision,
        dtype="float32",
        **{f"{name}{suffix}": value for name, value in ids.items()},
        **options,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    if family == "gemma3":
        rename_tower(folder / "model.safetensors")
    processor.save_pretrained(folder)
    return folder


def rename_tower(file: Path) -> None:
    weights = load_file(file)
    tower, longer = "vision_tower.", "vision_tower.vision_model."
    save_file(
        {name.replace(tower, longer): tensor for name, tensor in weights.items()}, file, {"format": "pt"}
    )


def make_tiny_processor(family: str, patch: int = PATCH) -> ProcessorMixin:
    from transformers import (
        Gemma3ImageProcessor,
        Gemma3Processor,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLProcessor,
        Qwen2VLVideoProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    tokenizer = _tokenizer(family)
    if family == "gemma3":
        size = {"height": GEMMA_SIZE, "width": GEMMA_SIZE}
        return Gemma3Processor(
            Gemma3ImageProcessor(size=size),
            tokenizer,
            tokenizer.chat_template,
            image_seq_length=GEMMA_TOKENS_PER_IMAGE,
        )
    least, most = (count * (patch * MERGE) ** 2 for count in QWEN_TOKENS_PER_IMAGE)
    size = {"shortest_edge": least, "longest_edge": most}
    images = Qwen2VLImageProcessor(size=size, patch_size=patch, merge_size=MERGE)
    kinds: dict[str, tuple[Any, Any]] = {
        "qwen2_vl": (Qwen2VLProcessor, Qwen2VLVideoProcessor),
        "qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
        "qwen3_vl": (Qwen3VLProcessor, Qwen3VLVideoProcessor),
    }
    kind, video = kinds[family]
    videos = video(patch_size=patch, merge_size=MERGE)
    processor: ProcessorMixin = kind(images, tokenizer, videos, chat_template=tokenizer.chat_template)
    return processor


def _tokens(family: str) -> dict[str, str]:
    return GEMMA_TOKENS if family == "gemma3" else QWEN_TOKENS


def _tokenizer(family: str) -> PreTrainedTokenizerFast:
    """Return the tiny tokenizer with the special tokens of a family and a template of images."""
    tokenizer, tokens = make_tiny_tokenizer(), _tokens(family)
    tokenizer.add_tokens(list(tokens.values()), special_tokens=True)
    for name, token in tokens.items():
        tokenizer.init_kwargs[name] = token
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    image = "<start_of_image>" if family == "gemma3" else "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer.chat_template = CHAT_TEMPLATE.format(image=image)
    return tokenizer
