"""Real trainers of TRL on a tiny model, for test_trl.py and the benchmark."""

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer

from areal_core.testing import make_tiny_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

STEPS = 4
ARGUMENTS = {
    "use_cpu": True,
    "bf16": False,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "hub_token": "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
}
GENERATION = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 12}


def digit_share(completions: list[str], **_: Any) -> list[float]:
    return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in completions]


def odd_length(completions: list[str], **_: Any) -> list[float | None]:
    """Return the length of a completion, and no reward if it is even."""
    return [len(text) / 100 if len(text) % 2 else None for text in completions]


def tiny_model(folder: Path, **changes: Any) -> Path:
    """Return the folder of a tiny model with its tokenizer, and changed options of its config."""
    sizes = {name: changes.pop(name) for name in ("hidden_size",) if name in changes}
    if not (folder / "config.json").exists():
        make_tiny_model(folder, **sizes)
    if changes:
        model = AutoModelForCausalLM.from_pretrained(folder)
        changed = folder.with_name(f"{folder.name}-{'-'.join(changes)}")
        model.config.update(changes)
        model.save_pretrained(changed)
        AutoTokenizer.from_pretrained(folder).save_pretrained(changed)
        return changed
    return folder


def grpo(
    model: Path, folder: Path, *, rewards: Any = (digit_share, odd_length), first: int = 0, **options: Any
) -> Any:
    """Return a GRPOTrainer whose data begin with the prompt of number `first`."""
    extra = {
        name: options.pop(name) for name in ("rollout_func", "peft_config", "callbacks") if name in options
    }
    rows = [{"prompt": f"{number}+{number + 3}="} for number in range(first, first + 40)]
    return GRPOTrainer(
        model=str(model),
        reward_funcs=list(rewards),
        args=GRPOConfig(output_dir=str(folder), **ARGUMENTS | GENERATION | options),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        **extra,
    )


def grpo_with_pictures(model: Path, folder: Path, pictures: list[Any], **options: Any) -> Any:
    """Return a GRPOTrainer of a vision model, whose prompts have a picture each."""
    rows = {
        "prompt": [[{"role": "user", "content": f"How many? {number}"}] for number in range(len(pictures))],
        "image": pictures,
    }
    return GRPOTrainer(
        model=str(model),
        reward_funcs=[lambda completions, **rest: [float(len(str(one)) % 3) for one in completions]],
        args=GRPOConfig(output_dir=str(folder), **ARGUMENTS | GENERATION | options),
        train_dataset=Dataset.from_dict(rows),
        processing_class=AutoProcessor.from_pretrained(model),
    )


def sft(model: Path, folder: Path, **options: Any) -> Any:
    rows = [{"prompt": f"{number}+{number + 3}=", "completion": str(2 * number + 3)} for number in range(40)]
    return SFTTrainer(
        model=str(model),
        args=SFTConfig(output_dir=str(folder), **ARGUMENTS | {"per_device_train_batch_size": 3} | options),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )


def dpo(model: Path, folder: Path, **options: Any) -> Any:
    rows = [
        {"prompt": f"{number}+{number + 3}=", "chosen": str(2 * number + 3), "rejected": "no"}
        for number in range(40)
    ]
    return DPOTrainer(
        model=str(model),
        args=DPOConfig(output_dir=str(folder), **ARGUMENTS | {"per_device_train_batch_size": 2} | options),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Sample with log-probs as an engine does, one of them missing, and a token of a tool."""
    tokens = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completions = [[5 + int(token) for token in torch.randint(0, 90, (6,))] for _ in prompts]
    return {
        "prompt_ids": tokens,
        "completion_ids": completions,
        "logprobs": [[-4.5 - 0.1 * place for place in range(5)] + [None] for _ in prompts],
        "env_mask": [[1, 1, 0, 1, 1, 1] for _ in prompts],
    }
