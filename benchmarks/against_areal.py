"""A step, an engine and a rollout of AReaL and of this suite, in turn on one CPU thread.

    PYTHONPATH=CHECKOUT[:PACKAGES] python -m benchmarks.against_areal [--rounds 3] [--steps 6]

CHECKOUT is a checkout of AReaL; PACKAGES is a folder with what it imports and this environment
lacks. Each side is a process that reports CPU seconds; the sides take turns, and the ratio is of
the medians of a round. Both get the same model, rows and options in float32, and one row in each
micro-batch: without flash-attention AReaL's packed rows attend to each other.

engine   `train_batch` of maximum likelihood, with the optimizer's step
step     GRPO on given rows: log-probs of the proximal policy, advantages, update, statistics
rollout  groups of eight episodes that answer at once, through the executor to a list or batch

The norms of the first gradient are printed: both sides take the same engine step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

from areal_core.testing import make_tiny_model
from benchmarks.harness import cpu_seconds, read_options, report
from benchmarks.step_cost import FixedRollouts, make_config, random_batch, step_seconds
from benchmarks.train_step import engine_step, make_engine, make_rows

LENGTHS = [200, 150, 250, 160, 220, 180, 240, 140]
VOCABULARY, TOKENS, ROWS, STEP_TOKENS = 1024, 256, 32, 192  # so a micro-batch has one row
PROMPTS, GROUP = 64, 8
TOPICS = {"engine": "a step of the engine", "step": "a GRPO step", "rollout": "64 groups of 8 episodes"}


def make_model(folder: Path) -> Path:
    """Write a random Qwen3 of four layers with a tokenizer, which AReaL's engine asks for."""
    make_tiny_model(folder)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def busy(work: Callable[[], object], times: int) -> list[float]:
    """Return the CPU seconds of several runs, after one that is not counted."""
    return [cpu_seconds(work) for _ in range(times + 1)][1:]


def episode(data: dict[str, Any], version: int) -> dict[str, torch.Tensor]:
    """Return the row of an episode whose answer is there at once."""
    size = 64
    sampled = torch.arange(size) >= 16
    return {
        "input_ids": torch.full((1, size), data["number"] % 100, dtype=torch.int32),
        "attention_mask": torch.ones(1, size, dtype=torch.bool),
        "loss_mask": sampled.int()[None],
        "logprobs": -0.5 * sampled.float()[None],
        "versions": torch.where(sampled, version, -1).int()[None],
        "rewards": torch.tensor([1.0]),
        "finish_reason": torch.zeros(1, dtype=torch.int32),
    }


class NoEngine:
    """What both executors ask of an engine whose episodes need none."""

    def get_version(self) -> int:
        return 0

    def close(self) -> None: ...


class AtOnce:
    """The workflow of both sides; `version` is that of the weights that sample."""

    version = 0

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        return episode(data, self.version)


def measure_ours(model: Path, steps: int) -> dict[str, Any]:
    from areal_core.data import PromptLoader
    from areal_core.engine.ranks import join_ranks, leave_ranks
    from areal_core.rollout.pipeline import Executor, PromptFeed
    from areal_core.rollout.staleness import StalenessControl

    ranks = join_ranks("cpu")
    engine, rows = make_engine(ranks, str(model), TOKENS), make_rows(LENGTHS, VOCABULARY, seed=0)
    norm = engine_step(engine, rows)
    found: dict[str, Any] = {"norm": norm, "engine": busy(lambda: engine_step(engine, rows), steps)}
    leave_ranks()
    batch = random_batch(ROWS, STEP_TOKENS)
    config = make_config(model.parent, model, steps + 2, ROWS, "ours")
    config.actor.mb_spec.max_tokens_per_mb = TOKENS
    times = step_seconds(config, steps + 2, lambda trainer: FixedRollouts(batch))
    found["step"] = [cpu_s for _, cpu_s in times]
    engine_of_rollouts: Any = NoEngine()
    executor = Executor(engine_of_rollouts, StalenessControl(PROMPTS, PROMPTS, 0, num_steps=steps + 1))
    feed = PromptFeed(
        PromptLoader([{"number": n} for n in range(PROMPTS * (steps + 1))], PROMPTS, shuffle=False)
    )
    workflow = AtOnce()

    def roll() -> None:
        executor.prepare_batch(feed, workflow, n_samples=GROUP)
        workflow.version += 1
        executor.set_version(workflow.version)

    found["rollout"] = busy(roll, steps)
    executor.close()
    return found


def measure_areal(model: Path, steps: int) -> dict[str, Any]:
    from areal.api import FinetuneSpec
    from areal.api.cli_args import (
        InferenceEngineConfig,
        MicroBatchSpec,
        NormConfig,
        OptimizerConfig,
        PPOActorConfig,
    )
    from areal.engine.fsdp_engine import FSDPPPOActor
    from areal.infra.remote_inf_engine import GroupedRolloutWorkflow
    from areal.infra.workflow_executor import WorkflowExecutor
    from areal.utils import logging

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(29_000 + os.getpid() % 1000)
    actor = FSDPPPOActor(
        PPOActorConfig(
            experiment_name="cost",
            trial_name="areal",
            path=str(model),
            dtype="float32",
            attn_impl="sdpa",
            gradient_checkpointing=False,
            mb_spec=MicroBatchSpec(max_tokens_per_mb=TOKENS),
            optimizer=OptimizerConfig(lr=1e-4, warmup_steps_proportion=0.0),
            backend="fsdp:d1",
            kl_ctl=0.0,
            ppo_n_minibatches=1,
            adv_norm=None,
            reward_norm=NormConfig(mean_level="group", std_level="group", group_size=4),
        )
    )
    actor.create_process_group(None)
    actor.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=8 * ROWS, train_batch_size=ROWS))
    rows = make_rows(LENGTHS, VOCABULARY, seed=0)
    trained = int(rows["loss_mask"].sum())

    def loss(logprobs: Any, entropy: Any, part: dict[str, Any], **_: Any) -> Any:
        return -(logprobs * part["loss_mask"]).sum() / part["loss_mask"].sum()

    def engine() -> float:
        return actor.train_batch(dict(rows), loss, lambda part: part["loss_mask"].sum().float())["grad_norm"]

    found: dict[str, Any] = {"norm": engine(), "tokens": trained, "engine": busy(engine, steps)}
    batch = random_batch(ROWS, STEP_TOKENS)
    keys = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions", "rewards")
    groups = [{key: batch[key][row : row + 4] for key in keys} for row in range(0, ROWS, 4)]

    def step() -> None:
        data = [dict(group) for group in groups]
        for group, prox in zip(data, actor.compute_logp(data), strict=True):
            group["prox_logp"] = prox
        actor.ppo_update(actor.compute_advantages(data))
        actor.lr_scheduler_step()
        actor.export_stats()

    found["step"] = busy(step, steps)
    actor.destroy()

    config = InferenceEngineConfig(
        consumer_batch_size=PROMPTS, max_concurrent_rollouts=PROMPTS, max_head_offpolicyness=steps + 2
    )
    executor = WorkflowExecutor(config, NoEngine())
    executor.initialize(logger=logging.getLogger("cost"), train_data_parallel_size=1)
    grouped = GroupedRolloutWorkflow(AtOnce(), GROUP, logging.getLogger("cost"))
    prompts = [{"number": n} for n in range(PROMPTS)]
    found["rollout"] = busy(lambda: executor.rollout_batch(prompts, grouped), steps)
    executor.destroy()
    return found


def of_side(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one side in a process of its own, and return what it printed last."""
    command = [sys.executable, "-m", "benchmarks.against_areal", f"--side={side}", f"--steps={options.steps}"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    options = read_options(__doc__, rounds=3, steps=6, side=("", "ours", "areal"))
    if options.side:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(Path(folder) / "model")
            measure = {"ours": measure_ours, "areal": measure_areal}[options.side]
            print("\n" + json.dumps(measure(model, options.steps)), flush=True)
        return
    rounds = [{side: of_side(side, options) for side in ("areal", "ours")} for _ in range(options.rounds)]
    norms = ", ".join(f"{one['areal']['norm']:.6f} and {one['ours']['norm']:.6f}" for one in rounds)
    print(f"norms of the first gradient of the engine, AReaL's and ours: {norms}")
    for topic, what in TOPICS.items():
        medians = [{side: statistics.median(one[side][topic]) for side in one} for one in rounds]
        report(what, "AReaL", "CPU s", [one["ours"] for one in medians], [one["areal"] for one in medians])


if __name__ == "__main__":
    main()
