"""The sides of against_trl.py: each is a process that trains and prints `@step TOKENS` per step.

Both sides of a comparison get the same rows in the same order, compute in one dtype with float32
weights and AdamW, skip the pass for old logprobs (the engine's are used), keep activations, and use
no reference.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import read_options

NEW_TOKENS = 64  # of a completion
SFT_ROWS = 16  # of a step
SFT_DATA = {"sft_long_tailed": (16, 320), "sft_equal": (100, 100)}  # fewest and most tokens of a row


@dataclass(frozen=True)
class Shape:
    """Rows of a GRPO step; `prompt_tokens` 0 for the prompts as they are."""

    questions: int
    samples: int
    prompt_tokens: int

    @property
    def num_rows(self) -> int:
        return self.questions * self.samples


@dataclass(frozen=True)
class Dtypes:
    """Of a model of TRL's."""

    weights: str
    compute: str


def say(tokens: int) -> None:
    """Report the end of a step to the benchmark."""
    print(f"@step {tokens}", flush=True)


def digit_share(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any
) -> float:
    """Return the share of digits: a reward that differs within a group, so gradients are not 0."""
    return sum(character.isdigit() for character in completions) / max(len(completions), 1)


def token_rows(kind: str, steps: int) -> list[list[int]]:
    """Return rows of token ids with log-uniform lengths: many short ones and a few long ones."""
    shortest, longest = SFT_DATA[kind]
    numbers = random.Random(0)
    lengths = [round(shortest * (longest / shortest) ** numbers.random()) for _ in range(steps * SFT_ROWS)]
    return [[numbers.randrange(100, 40_000) for _ in range(length)] for length in lengths]


def questions_of(model: Path, prompt_tokens: int) -> list[dict[str, Any]]:
    """Return rows of arithmetic whose prompts have `prompt_tokens` tokens, by words before them."""
    from transformers import AutoTokenizer

    from areal_core.data import arithmetic_rows

    rows, tokenizer = (
        arithmetic_rows(num_rows=256, max_operand=99, seed=3),
        AutoTokenizer.from_pretrained(model),
    )

    def length(messages: Iterable[dict[str, str]]) -> int:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    for row in rows:
        asked = row["messages"][-1]
        missing = prompt_tokens - length(row["messages"])
        if missing > 0:
            asked["content"] = "word " * missing + asked["content"]
    return rows


def ours_grpo(model: Path, steps: int, folder: Path, shape: Shape, dtype: str, *, as_tree: bool) -> None:
    from areal_core.config import GRPOConfig, load_expr_config
    from areal_core.trainer.rl import PPOTrainer

    def observer(event: str, **facts: Any) -> None:
        if event == "weights":
            say(shape.num_rows * NEW_TOKENS)

    file = Path(__file__).with_name("against_trl.yaml")
    changes = [f"actor.path={model}", f"total_train_steps={steps}", f"cluster.fileroot={folder}"]
    changes += [f"train_dataset.batch_size={shape.questions}", f"gconfig.n_samples={shape.samples}"]
    changes += [f"rollout.consumer_batch_size={shape.questions}", f"actor.enable_tree_training={as_tree}"]
    changes += [f"actor.reward_norm.group_size={shape.samples}", f"actor.dtype={dtype}"]
    config, _ = load_expr_config(["--config", str(file), *changes], GRPOConfig)
    with PPOTrainer(
        config, questions_of(model, shape.prompt_tokens), observers=[lambda trainer: observer]
    ) as trainer:
        trainer.takes_checksums = False  # not needed here
        trainer.train(workflow_kwargs={"reward_fn": f"{__file__}:digit_share"})


def ours_sft(kind: str, model: Path, steps: int, folder: Path, dtype: str) -> None:
    from areal_core.config import SFTConfig
    from areal_core.config.train_engine import OptimizerConfig
    from areal_core.trainer.sft import SFTTrainer

    rows = [{"input_ids": ids, "loss_mask": [0] + [1] * (len(ids) - 1)} for ids in token_rows(kind, steps)]
    config = SFTConfig(
        experiment_name="against_trl", trial_name=kind, device="cpu", allocation_mode="fsdp:d1"
    )
    config.cluster.fileroot, config.actor.path, config.actor.dtype = str(folder), str(model), dtype
    config.actor.optimizer = OptimizerConfig(lr=1e-6, weight_decay=0.0)
    config.train_dataset.batch_size, config.train_dataset.shuffle = SFT_ROWS, False

    def stop(step: int) -> bool:
        say(sum(len(row["input_ids"]) for row in rows[step * SFT_ROWS : (step + 1) * SFT_ROWS]))
        return step + 1 == steps

    with SFTTrainer(config, rows) as trainer:
        trainer.train(stop)


def trl_arguments(steps: int, folder: Path, dtypes: Dtypes, num_rows: int) -> dict[str, Any]:
    """Return the options that both of TRL's trainers get; the others have their defaults."""
    return {
        "output_dir": str(folder / "trl"),
        "model_init_kwargs": {"dtype": dtypes.weights},
        "bf16": dtypes.compute == "bfloat16",
        "use_cpu": True,
        "per_device_train_batch_size": num_rows,
        "learning_rate": 1e-6,
        "max_steps": steps,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
    }


def step_reporter(tokens: list[int]) -> Any:
    """Return a callback that reports the end of every step, with its number of tokens."""
    from transformers import TrainerCallback

    class Reporter(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            say(tokens[state.global_step - 1])

    return Reporter()


def trl_grpo(model: Path, steps: int, folder: Path, dtypes: Dtypes, shape: Shape) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    def reward(completions: list[list[dict[str, str]]], **rows: Any) -> list[float | None]:
        return [digit_share("", c[0]["content"], [], []) for c in completions]

    rows = questions_of(model, shape.prompt_tokens)
    GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=GRPOConfig(
            **trl_arguments(steps, folder, dtypes, shape.num_rows),
            num_generations=shape.samples,
            max_completion_length=NEW_TOKENS,
            generation_kwargs={"min_new_tokens": NEW_TOKENS},
            temperature=1.0,
            shuffle_dataset=False,
            beta=0.0,
        ),
        train_dataset=Dataset.from_list([{"prompt": row["messages"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[step_reporter([shape.num_rows * NEW_TOKENS] * steps)],
    ).train()


def trl_sft(kind: str, model: Path, steps: int, folder: Path, dtypes: Dtypes) -> None:
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    rows = token_rows(kind, steps)
    lengths = [len(row) for row in rows]
    SFTTrainer(
        model=str(model),
        args=SFTConfig(
            **trl_arguments(steps, folder, dtypes, SFT_ROWS), train_sampling_strategy="sequential"
        ),
        train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
        callbacks=[step_reporter([sum(lengths[i : i + SFT_ROWS]) for i in range(0, len(lengths), SFT_ROWS)])],
    ).train()


def main() -> None:
    positions = {"comparison": str, "side": str, "model": Path, "steps": int, "folder": Path}
    positions |= {"questions": int, "samples": int, "prompt_tokens": int, "dtype": str}
    o = read_options(__doc__, positions)
    shape = Shape(o.questions, o.samples, o.prompt_tokens)
    dtypes = Dtypes("bfloat16" if o.side == "trl_bf16" else "float32", o.dtype)
    match o.side, o.comparison:
        case "ours" | "ours_packed", "grpo":
            ours_grpo(o.model, o.steps, o.folder, shape, o.dtype, as_tree=o.side == "ours")
        case "ours", kind:
            ours_sft(kind, o.model, o.steps, o.folder, o.dtype)
        case _, "grpo":
            trl_grpo(o.model, o.steps, o.folder, dtypes, shape)
        case _, kind:
            trl_sft(kind, o.model, o.steps, o.folder, dtypes)


if __name__ == "__main__":
    main()
