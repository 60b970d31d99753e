"""Train the search agent of examples/ on a tiny model, and draw how its answers improve.

    python -m benchmarks.search_agent [--seeds 2] [--steps 20]

Writes docs/search_agent.json, the curves, search_agent.svg, and the table of verbs/agent.md;
tests/agent/test_search_agent.py trains seed 1. SFT on demonstrations, whose queries often miss a
word, teaches the form of tool calls; GRPO then sees only whether the last message is right.
"""

import importlib.util
import json
import random
import re
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_core.config import (
    PPOConfig,
    SFTConfig,
    load_expr_config,
)
from areal_core.paths import run_folder
from areal_core.testing import make_tiny_model
from areal_core.trainer.rl import PPOTrainer
from areal_core.trainer.sft import SFTTrainer
from areal_debug.report.charts import HEIGHT, WIDTH, shares
from areal_debug.wiring import make_recorder
from benchmarks.harness import read_options
from benchmarks.learning_curves import on_paper
from benchmarks.learning_methods import Curve, logged

ROOT = Path(__file__).parents[1]
SEARCH = ROOT / "examples" / "search"
AGENT = ROOT / "examples" / "search_agent.py"
DOCS = ROOT / "docs"
OPENS, CLOSES = '<tool_call>{"name": "search", "arguments": {"query": "', '"}}</tool_call>'
ROLES = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|tool|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
AGENT_KWARGS = {"max_turns": 3, "num_pages": 1}
NUM_DEMONSTRATIONS = 8  # of each question
OPTIONS = """
experiment_name: search
device: cpu
total_train_epochs: 1000
train_dataset: {{path: {questions}, type: {type}, batch_size: {batch_size}}}
actor:
  dtype: float32
  optimizer: {{lr: {lr}, weight_decay: 0.0, lr_scheduler_type: linear, warmup_steps_proportion: 0.1}}
  mb_spec: {{max_tokens_per_mb: 4096}}
"""
RL_OPTIONS = """
evaluator: {freq_steps: 4, eval_before_train: true}
gconfig: {n_samples: 8, max_new_tokens: 12, max_tokens: 160}
eval_gconfig: {n_samples: 2, max_new_tokens: 12, max_tokens: 160}
rollout:
  consumer_batch_size: 12
  agent: {export_style: concat, chat_template_type: concat}
"""


def example() -> ModuleType:
    """Import examples/search_agent.py."""
    spec = importlib.util.spec_from_file_location("search_agent_example", AGENT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SEARCH / name).read_text(encoding="utf-8").splitlines()]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of the words of the corpus; the frame of a search is two tokens."""
    splitter = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    texts = [page["text"] for page in read("corpus.jsonl")]
    texts += [row["messages"][0]["content"] for row in read("questions.jsonl")]
    texts.append("no page has these words error:")
    words = {word for text in texts for word, _ in splitter.pre_tokenize_str(text.lower())}
    vocabulary = {word: number for number, word in enumerate([*ROLES, "<unk>", *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), splitter
    tokenizer.add_tokens([AddedToken(frame, normalized=False) for frame in (OPENS, CLOSES)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=ROLES[0],
        eos_token=ROLES[1],
        unk_token="<unk>",
        additional_special_tokens=ROLES[2:],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def make_model(folder: Path, seed: int) -> Path:
    """Write a random Llama of two layers, width 64, and its tokenizer."""
    return make_tiny_model(
        folder,
        tokenizer=make_tokenizer(),
        num_kv_heads=4,
        seed=seed,
        max_position_embeddings=512,
        initializer_range=0.1,  # with 0.02 a model of this width needs several times as many steps
    )


def demonstrations(seed: int) -> list[dict[str, list[int]]]:
    """Return conversations of the training questions: prompts and completions for SFT.

    They search with a few words of the question, often too few, and then answer from the page. The
    facts on their pages are drawn at random, so that no answer can be learned without the page.
    """
    tokenizer, dice, pages = make_tokenizer(), random.Random(seed), example().Pages()
    answers = defaultdict(list)
    for text in pages.texts:
        answers[text.split()[1]].append(text.strip(".").split()[-1])
    found = []
    for row in read("questions.jsonl") * NUM_DEMONSTRATIONS:
        question = row["messages"][0]["content"]
        topic, town = question.strip("?").split()[-3::2]
        spoken = [f"<|user|>{question}<|end|><|assistant|>"]  # the model says every second text
        for last in (False, True):
            query = " ".join(dice.choices([[town], [topic], [topic, town]], [3, 2, 1])[0])
            [page] = pages.search(query, 1)
            page = f"{page.rpartition(' ')[0]} {dice.choice(answers[page.split()[1]])}."
            spoken += [f"{OPENS}{query}{CLOSES}<|end|>", f"<|tool|>{page}<|end|><|assistant|>"]
            if last or (topic in page and town in page) or dice.random() < 0.5:
                break
        spoken.append(f"{page.strip('.').split()[-1]}<|end|>")
        ids, mask = [], []
        for number, text in enumerate(spoken):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            ids += tokens
            mask += [number % 2] * len(tokens)
        found.append({"input_ids": ids, "loss_mask": mask})
    return found


def options_of(kind: str, batch_size: int, lr: float) -> str:
    return OPTIONS.format(questions=SEARCH / "questions.jsonl", type=kind, batch_size=batch_size, lr=lr)


def load(folder: Path, name: str, text: str, kind: type[Any], *overrides: str) -> Any:
    """Load the config of a training, whose files go to `folder`."""
    file = folder / f"{name}.yaml"
    file.write_text(text)
    named = (f"trial_name={name}", f"cluster.fileroot={folder}")
    config, _ = load_expr_config(["--config", str(file), *named, *overrides], kind)
    return config


def teach(folder: Path, seed: int, steps: int = 250) -> Path:
    """Fine-tune a random model on demonstrations; return its folder."""
    config = load(
        folder,
        "sft",
        options_of("sft", 48, 4e-3),
        SFTConfig,
        "allocation_mode=fsdp:d1",
        "actor.optimizer.lr_scheduler_type=constant",
        "actor.optimizer.beta2=0.99",
        f"actor.path={make_model(folder / 'random', seed)}",
        f"total_train_steps={steps}",
        f"seed={seed}",
    )
    with SFTTrainer(config, demonstrations(seed)) as trainer:
        trainer.train()
    return run_folder(config, "checkpoints") / "default" / "final"


def learn(folder: Path, model: Path, seed: int, steps: int = 20, record: bool = False) -> Curve:
    """Train the agent by GRPO; return the share of held-out questions that are answered."""
    config = load(
        folder,
        "grpo",
        options_of("rl", 12, 2e-3) + RL_OPTIONS,
        PPOConfig,
        "allocation_mode=embedded|fsdp:d1",
        f"actor.path={model}",
        "actor.ppo_n_minibatches=2",
        f"total_train_steps={steps}",
        f"seed={seed}",
        *(("debug.dump_rollout_data=true", f"debug.path={folder / 'record'}") if record else ()),
    )
    observers = [make_recorder] if record else []
    rows, held_out = read("questions.jsonl"), read("held_out.jsonl")
    with PPOTrainer(config, rows, held_out, observers=observers, print_steps=False) as trainer:
        trainer.train(workflow=example().SearchAgent, workflow_kwargs=AGENT_KWARGS)
    return logged(config, "eval-rollout/reward")


def table(trained: list[dict[str, Any]]) -> str:
    """Return the first and last points of each seed, as Markdown."""
    lines = ["| seed | share answered, before → after | steps | CPU seconds |", "|---|---|---|---|"]
    for one in trained:
        (_, first), (steps, last) = one["curve"][0], one["curve"][-1]
        lines.append(f"| {one['seed']} | {first:.2f} → {last:.2f} | {steps} | {one['cpu_s']} |")
    return "\n".join(lines)


def draw(trained: list[dict[str, Any]], page: str) -> dict[str, str]:
    """Return the documents by file name; `page` is docs/verbs/agent.md with any table."""
    curves = [one["curve"] for one in trained]
    return {
        "search_agent.svg": on_paper(shares(curves, "0", f"{curves[0][-1][0]} steps"), WIDTH, HEIGHT),
        "verbs/agent.md": re.sub(r"\| seed .*?(?=\n\n)", lambda _: table(trained), page, flags=re.DOTALL),
    }


def main() -> None:
    options = read_options(__doc__, seeds=2, steps=20)
    trained = []
    for seed in range(1, options.seeds + 1):
        with tempfile.TemporaryDirectory() as name:
            began = time.process_time()
            curve = learn(Path(name), teach(Path(name), seed), seed, options.steps)
        trained.append({"seed": seed, "cpu_s": round(time.process_time() - began), "curve": curve})
        print(trained[-1], flush=True)
    (DOCS / "search_agent.json").write_text(json.dumps(trained).replace('{"seed"', '\n{"seed"') + "\n")
    for file, text in draw(trained, (DOCS / "verbs/agent.md").read_text()).items():
        (DOCS / file).write_text(text)


if __name__ == "__main__":
    main()
