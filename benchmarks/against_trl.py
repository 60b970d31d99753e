"""One whole RL step of SmolLM2-135M, ours beside TRL's GRPOTrainer: sample, reward, advantages, update, weights to the sampler.

    python benchmarks/against_trl.py [--steps 4] [--model FOLDER]

Same questions, same sampling (temperature 1, 4 questions x 4 completions x exactly 64 tokens), bfloat16 compute, same CPU and
threads. Ours keeps float32 master weights, and so does TRL by default; beside it stands TRL with bfloat16 weights, which is faster
and forgets small updates. Each runs in a process of its own, one after the other; the first step is left out. Prints one JSON line;
the goal is a ratio of at least 3 to TRL's default.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GOAL = 3.0
SIDES = ("ours", "trl", "trl_bf16")
CONFIG = Path(__file__).with_suffix(".yaml")


def digit_share(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any
) -> float:
    """Digits among the characters: a reward that differs within a group, so that there is a gradient."""
    return sum(character.isdigit() for character in completions) / max(len(completions), 1)


def run_ours(model: Path, steps: int, out: Path) -> None:
    """Trains with our trainer and writes the seconds of each step."""
    from areal_core.config import GRPOConfig, load_expr_config
    from areal_core.dataset import get_dataset
    from areal_core.paths import run_folder
    from areal_core.trainer.rl import PPOTrainer

    changes = [f"actor.path={model}", f"total_train_steps={steps}", f"cluster.fileroot={out.parent}"]
    config, _ = load_expr_config(["--config", str(CONFIG), *changes], GRPOConfig)
    with PPOTrainer(config, get_dataset(config.train_dataset)) as trainer:
        trainer.train(workflow_kwargs={"reward_fn": f"{__file__}:digit_share"})
    lines = (run_folder(config, "logs") / "stats.jsonl").read_text().splitlines()
    out.write_text(json.dumps([json.loads(line)["timeperf/step"] for line in lines]))


def run_trl(model: Path, steps: int, out: Path, dtype: str) -> None:
    """Trains with TRL, with weights of `dtype`, and writes the seconds of each step."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from areal_core.dataset import arithmetic_rows

    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(time.perf_counter() - self.began)

    def reward(completions: list[list[dict[str, str]]], **rows: Any) -> list[float | None]:
        return [digit_share("", c[0]["content"], [], []) for c in completions]

    rows = arithmetic_rows(num_rows=256, max_operand=99, seed=3)
    arguments = GRPOConfig(
        output_dir=str(out.parent / "trl"),
        model_init_kwargs={"dtype": dtype},
        bf16=True,
        use_cpu=True,
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=64,
        generation_kwargs={"min_new_tokens": 64},
        temperature=1.0,
        learning_rate=1e-6,
        max_steps=steps,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        beta=0.0,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": row["messages"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[Clock()],
    )
    trainer.train()
    out.write_text(json.dumps(seconds))


def seconds_per_step(side: str, model: Path, steps: int, folder: Path) -> float:
    """Runs one side in a process of its own; the median second of its steps after the first."""
    out = folder / f"{side}.json"
    command = [
        sys.executable,
        __file__,
        "--side",
        side,
        "--model",
        str(model),
        "--steps",
        str(steps),
        "--out",
        str(out),
    ]
    with (folder / f"{side}.log").open("wb") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        sys.exit(f"the {side} side failed:\n{(folder / f'{side}.log').read_text()[-3000:]}")
    return statistics.median(json.loads(out.read_text())[1:])


def compare(model: Path | None, steps: int) -> None:
    """Prints the verdict as one JSON line."""
    os.environ["OMP_NUM_THREADS"] = str(os.cpu_count())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if model is None:
            sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
            from smollm2 import prepare_smollm2

            model = prepare_smollm2(folder / "smollm2")
        seconds = {}
        for side in SIDES:
            print(f"{side}: {steps} steps ...", flush=True)
            seconds[side] = seconds_per_step(side, model, steps, folder)
            print(f"{side}: {seconds[side]:.1f} s a step", flush=True)
    ratios = {f"{side} / ours": round(seconds[side] / seconds["ours"], 2) for side in SIDES[1:]}
    measured = {f"{side}_s_per_step": round(value, 2) for side, value in seconds.items()}
    print(json.dumps({**measured, "ratios": ratios, "goal": GOAL, "reached": ratios["trl / ours"] >= GOAL}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4, help="of each side; the first is not counted")
    parser.add_argument("--model", type=Path, help="checkpoint folder; by default SmolLM2 is downloaded")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is None:
        compare(options.model, options.steps)
    elif options.side == "ours":
        run_ours(options.model, options.steps, options.out)
    else:
        dtype = "bfloat16" if options.side == "trl_bf16" else "float32"
        run_trl(options.model, options.steps, options.out, dtype)


if __name__ == "__main__":
    main()
