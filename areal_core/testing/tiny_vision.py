"""Tiny vision-language models with their processors, for tests, examples and the demo."""

import tomllib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast, ProcessorMixin

from areal_core.testing import make_tiny_tokenizer

CHAT_TEMPLATE = (
    "{{% for message in messages %}}<|{{{{ message['role'] }}}}|>"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for part in message['content'] %}}"
    "{{% if part['type'] == 'image' %}}{image}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}<|end|>{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}"
)
SIZES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
VISION_FAMILIES: dict[str, dict[str, Any]] = SIZES["families"]
GEMMA = VISION_FAMILIES["gemma3"]
PATCH, MERGE = 4, SIZES["qwen"]["vision"]["spatial_merge_size"]  # pixels, patches of a side
QWEN_TOKENS_PER_IMAGE = 2, 16  # at least and at most


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
        vision = vision | SIZES["qwen"]["vision"] | {"patch_size": patch}
    if family == "qwen2_5_vl":
        vision["window_size"] = 2 * patch * MERGE
    text = SIZES["text"] | {"vocab_size": len(tokenizer)} | options.pop("text") | changes
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
        size = dict.fromkeys(("height", "width"), GEMMA["vision"]["image_size"])
        return Gemma3Processor(
            Gemma3ImageProcessor(size=size),
            tokenizer,
            tokenizer.chat_template,
            image_seq_length=GEMMA["mm_tokens_per_image"],
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
    tokens: dict[str, str] = SIZES["gemma3" if family == "gemma3" else "qwen"]["tokens"]
    return tokens


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
