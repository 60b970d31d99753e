"""A record of realistic conversations in the real format, with a byte-level tokenizer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from recorder import RecordWriter
from recorder.environment import folder_identity
from recorder.format import Recording
from recorder.testing import SCRIPTED_HEADER, SCRIPTED_RNG
from recorder.writer import RecordingOptions
from tests.recorder.ranks import begin

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
QUESTIONS = (
    "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many did she sell altogether?",
    "A train leaves at 9:40 and arrives at 13:05. How many minutes does it travel? Answer in one line.",
    "Wie viel ist 17 mal 23? Schreibe den Rechenweg auf; das Ergebnis ist natürlich eine ganze Zahl.",
    "小明有12个苹果，给了朋友5个 🍎。还剩几个？",
)
THOUGHTS = (
    "In May she sold 48 / 2 = 24 clips.\nAltogether that is 48 + 24 = 72.\n\nThe answer is 72.",
    "From 9:40 to 13:40 are 4 hours, which is 240 minutes.\nThat is 35 minutes too many: 240 - 35 = 205.\n\n#### 205",
    "17 * 23 = 17 * 20 + 17 * 3\n        = 340 + 51\n        = 391\n\nDas Ergebnis ist **391**.",
    "12 - 5 = 7。还剩7个苹果 🍎🍎。\n\n答案：7",
)
CALLS = ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "48 / 2"}}\n</tool_call>', "24")


def train_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level BPE of 400 entries, saved as `tokenizer.json` in the model's folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    tokenizer.train_from_iterator(QUESTIONS[:3] + THOUGHTS[:3], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    return tokenizer


def turns_of(prompt: int, sample: int) -> list[tuple[str, bool]]:
    """Make a conversation as pieces of text, each a prompt or sampled; every third calls a tool."""
    question, thought = QUESTIONS[prompt % 4], THOUGHTS[(prompt + (sample == 3)) % 4]
    start = f"<|im_start|>system\nYou are careful.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    if prompt % 3:
        return [(start, False), (f"{thought}<|im_end|>", True)]
    call, result = CALLS
    answer = f"<|im_end|>\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"
    return [(start, False), (f"{call}<|im_end|>", True), (answer, False), (f"{thought}<|im_end|>", True)]


def chat_batch(
    tokenizer: Tokenizer, num_rows: int, step: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Make a padded batch of `num_rows` conversations, groups of four, some tokens stale."""
    rows = []
    for row in range(num_rows):
        pieces = [(tokenizer.encode(text).ids, own) for text, own in turns_of(row // 4, row % 4)]
        rows.append(([t for ids, _ in pieces for t in ids], [int(own) for ids, own in pieces for _ in ids]))
    width = max(len(ids) for ids, _ in rows)
    ids, mask = np.zeros((num_rows, width), np.int32), np.zeros((num_rows, width), np.int32)
    for row, (tokens, own) in enumerate(rows):
        ids[row, : len(tokens)], mask[row, : len(own)] = tokens, own
    real = np.arange(width) < np.array([len(tokens) for tokens, _ in rows])[:, None]
    logprobs = -rng.exponential(0.25, mask.shape) - (rng.random(mask.shape) < 0.04) * rng.exponential(
        4, mask.shape
    )
    is_stale = (np.cumsum(mask, 1) < mask.sum(1, keepdims=True) * rng.random((num_rows, 1))) & (step > 0)
    return {
        "input_ids": ids,
        "attention_mask": real,
        "loss_mask": mask,
        "logprobs": np.where(mask, logprobs, 0).astype(np.float32),
        "versions": np.where(mask, step - is_stale.astype(int), np.where(real, -1, 0)).astype(np.int32),
        "rewards": (rng.random(num_rows) < 0.3 + 0.05 * step).astype(np.float32),
        "prompt_id": np.arange(num_rows, dtype=np.int64) // 4 + 100 * step,
        "sample_id": np.arange(num_rows, dtype=np.int32) % 4,
        "finish_reason": (rng.random(num_rows) < 0.1).astype(np.int32),
    }


def learned(batch: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Compute what a trainer adds to the batch, next-token aligned."""
    here = np.roll(batch["loss_mask"], -1, 1)
    moved = np.roll(batch["logprobs"], -1, 1) + rng.normal(0, 0.08, here.shape) * (
        rng.random(here.shape) < 0.2
    )
    group = batch["rewards"].reshape(-1, 4)
    advantage = ((group - group.mean(1, keepdims=True)) / (group.std(1, keepdims=True) + 1e-6)).reshape(-1, 1)
    return {
        "prox_logp": np.where(here, moved, 0).astype(np.float32),
        "advantages": np.where(here, advantage, 0).astype(np.float32),
        "returns": np.where(here, batch["rewards"][:, None], 0).astype(np.float32),
        "entropy": np.where(here, rng.exponential(0.5, here.shape), 0).astype(np.float32),
    }


def begin_chats(folder: Path, scope: str = "full", text: bool = False) -> tuple[RecordWriter, Tokenizer]:
    """Open a record for writing, with or without `text`; its tokenizer is in `model`."""
    model = folder.parent / "model"
    tokenizer = train_tokenizer(model)
    identity = folder_identity(str(model))
    config = {"actor": {"eps_clip": 0.2, "eps_clip_higher": 0.28}}
    header = replace(SCRIPTED_HEADER, model=identity, tokenizer=identity, config=config)
    (writer,) = begin(folder, options=RecordingOptions(Recording(scope), text=text), header=header)
    writer.tokenizer = tokenizer
    return writer, tokenizer


def write_chats(
    folder: Path, num_rows: int = 32, num_steps: int = 12, scope: str = "full", text: bool = False
) -> Path:
    writer, tokenizer = begin_chats(folder, scope, text)
    rng = np.random.default_rng(0)
    for step in range(num_steps):
        send(writer, step, chat_batch(tokenizer, num_rows, step, rng), rng)
    return folder


def send(writer: RecordWriter, step: int, batch: dict[str, Any], rng: np.random.Generator) -> None:
    writer("batch", step=step, version=step, batch=batch, rng=SCRIPTED_RNG)
    writer("advantages", step=step, inputs=batch | learned(batch, rng))
    stats = {
        "ppo_actor/update/loss": 0.1 / (step + 1) - 0.02,
        "ppo_actor/update/grad_norm": 0.5 + 0.3 * rng.random(),
    }
    writer("step", step=step, version=step + 1, plan={}, stats=stats, checksums={"w": "00000000"})


OTHER_TOKENS = slice(3, 7)  # of the completion of sample 0 of each prompt, in `write_other`


def write_other(folder: Path, num_rows: int = 8, num_steps: int = 3, prompts_from: int = 0) -> Path:
    """Write what `write_chats` writes, but from step 1 on with other tokens, logprobs and rewards.

    Four tokens of the completion of each sample 0 are replaced and one is inserted; a logprob of
    each sample 1 is 0.5 less; sample 2 has another reward.

    Args:
        prompts_from: added to the numbers of the prompts.
    """
    writer, tokenizer = begin_chats(folder)
    rng = np.random.default_rng(0)
    for step in range(num_steps):
        batch = chat_batch(tokenizer, num_rows, step, rng)
        other = changed(batch) if step else batch
        other["prompt_id"] = other["prompt_id"] + prompts_from
        send(writer, step, other, rng)
    return folder


def changed(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch of `write_other`, of the same shape."""
    keys = ("input_ids", "loss_mask", "logprobs", "versions", "attention_mask")
    found = {key: batch[key].copy() for key in keys}
    for row, sample in enumerate(batch["sample_id"]):
        own = np.flatnonzero(batch["loss_mask"][row])
        if sample == 0:
            found["input_ids"][row, own[OTHER_TOKENS]] = found["input_ids"][row, own[OTHER_TOKENS]] % 200 + 5
            for key in keys:
                found[key][row] = np.insert(found[key][row, :-1], own[7], found[key][row, own[7]])
            found["input_ids"][row, own[7]] = 390
        if sample == 1:
            found["logprobs"][row, own[4]] -= 0.5
    rewards = np.where(batch["sample_id"] == 2, 1 - batch["rewards"], batch["rewards"])
    return batch | found | {"rewards": rewards}
