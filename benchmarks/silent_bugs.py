"""How many silent bugs of other trainers the suite names, and how many fixed runs it accuses.

    python -m benchmarks.silent_bugs [--only NAME ...] [--keep FOLDER] [--made] [--answers] [--json
    FILE]

Each pair is a bug that was explained in public, rebuilt from its description on a tiny model that
samples and trains (`silent_runs.py`): once with the mechanism of the bug, once without. Both sides
are asked what a user of the documents would ask. A bug is *named* if the answer has its mechanism,
*seen* if a problem is reported without it, *missed* otherwise; any problem on the side with the fix
is an accusation. Exits with 1 below 70 % named, or with an accusation. rldoctor and rlprobe (`make
bench`) get the logged metrics under TRL's names; they *cannot read* less than two steps.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import torch

from benchmarks.doctor_peers import found_by_rldoctor, found_by_rlprobe
from benchmarks.harness import SomeOf, read_options
from benchmarks.silent_runs import (
    ANSWER,
    GROUP,
    LIMIT,
    Row,
    Run,
    first_weights,
    ids,
    kl3,
    load,
    policy_loss,
    save,
    text,
    write,
)
from recorder import open_record

ENOUGH = 0.7
PEERS = {"rldoctor": found_by_rldoctor, "rlprobe": found_by_rlprobe}
OUTCOMES = ("named", "seen", "missed", "cannot read", "accused")
SLIME: Row = {
    "advantage_estimator": "grpo", "n_samples_per_prompt": GROUP, "rollout_batch_size": 8, "global_batch_size": 32,
    "rewards_normalization": True, "grpo_std_normalization": True, "normalize_advantages": False, "eps_clip": 0.2,
    "eps_clip_high": 0.2, "calculate_per_token_loss": False, "entropy_coef": 0.0, "kl_coef": 0.0, "use_kl_loss": False,
    "kl_loss_coef": 0.0, "kl_loss_type": "low_var_kl", "gamma": 1.0, "lambd": 1.0, "context_parallel_size": 1,
    "rollout_temperature": 1.0, "rollout_max_response_len": LIMIT, "clip_grad": 1.0,
}  # fmt: skip
TRL: Row = {
    "num_generations": GROUP, "num_iterations": 1, "gradient_accumulation_steps": 1, "loss_type": "dapo", "beta": 0.0,
    "scale_rewards": "group", "epsilon": 0.2, "bf16": False, "fp16": False, "max_completion_length": LIMIT, "temperature": 1.0,
    "use_bias_correction_kl": False,
}  # fmt: skip
VERL: Row = {
    "actor_rollout_ref": {
        "actor": {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "entropy_coeff": 0.0,
                   "loss_agg_mode": "token-mean", "use_kl_loss": False, "policy_loss": {"loss_mode": "vanilla"},
                   "ppo_micro_batch_size_per_gpu": 8},
        "rollout": {"n": GROUP, "temperature": 1.0},
    },
    "algorithm": {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": True, "use_kl_in_reward": False},
    "data": {"max_response_length": LIMIT, "train_batch_size": 8},
}  # fmt: skip
Build = Callable[[Path, Path, Path, bool], None]


@dataclass(frozen=True)
class Pair:
    """A bug: where it was explained, what is asked, and what names it."""

    name: str
    source: str
    questions: tuple[str, ...]
    named: str
    build: Build


PAIRS: dict[str, Pair] = {}


def pair(source: str, *questions: str, named: str) -> Callable[[Build], Build]:
    """Register a builder: (folder of the side, of both, of the first weights, with the bug?)."""

    def register(build: Build) -> Build:
        PAIRS[build.__name__] = Pair(build.__name__, source, questions, named, build)
        return build

    return register


STATS = {
    "slime": ("train/loss", "train/grad_norm", "rollout/raw_reward", "rollout/response_lengths"),
    "trl": ("loss", "grad_norm", "reward", "completions/mean_length"),
    "verl": ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean"),
    "nemo-rl": ("train/loss", "train/grad_norm", "train/reward", "train/mean_gen_tokens_per_sample"),
    "areal": ("ppo_actor/update/loss", "ppo_actor/update/grad_norm", "ppo_actor/task_reward/avg", "length"),
}
TO_TRL = {name: of_trl for names in STATS.values() for name, of_trl in zip(names, STATS["trl"], strict=True)}
TO_TRL |= {"train/kl_penalty": "kl", "train/kl_loss": "kl", "train/lr": "learning_rate"}


def stats_of(rows: list[Row], found: Row, trainer: str = "slime") -> Row:
    """Name statistics as a trainer does."""
    reward, length = mean(row["reward"] for row in rows), mean(len(row["completion_tokens"]) for row in rows)
    return dict(zip(STATS[trainer], (found["loss"], found["norm"], reward, length), strict=True))


CROSSCHECK = "crosscheck {side}/record"


def recorded(
    side: Path, model: Path, rows: list[Row], found: Row, trainer: str = "slime", config: Row = SLIME
) -> None:
    """Write the record of a step, without the column `whole` of its rows."""
    kept = [{name: value for name, value in row.items() if name != "whole"} for row in rows]
    write(side, trainer, config, model, [(0, kept, stats_of(rows, found, trainer))])


# -------------------- one step
@pair("slime#2235", CROSSCHECK, named=r"each (context|cp)|context.parallel|over (the )?tokens of each")
def whitened_by_context_rank(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run = Run(model, prompts=7)
    rows = run.prepare(run.rollout(0))

    def rank(row: Row, at: int) -> int:  # sequences are held as chunks 0 and 3, and 1 and 2
        size = len(row["prompt_tokens"]) + len(row["completion_tokens"])
        return int((len(row["prompt_tokens"]) + at) // -(-size // 4) in (1, 2)) if bug else 0

    held: dict[int, list[float]] = {}
    for row in rows:
        for at, value in enumerate(row["advantages"]):
            held.setdefault(rank(row, at), []).append(value)
    own = {key: torch.tensor(values) for key, values in held.items()}
    for row in rows:
        row["advantages"] = [
            float((value - own[r].mean()) * (own[r].var() + 1e-8).rsqrt())
            for at, value in enumerate(row["advantages"])
            for r in [rank(row, at)]
        ]
    found = run.update(rows, by_row=True)
    config = SLIME | {"normalize_advantages": True, "context_parallel_size": 2, "rollout_batch_size": 7}
    recorded(side / "record", model, rows, found, "slime", config)


@pair("ms-swift#10117", CROSSCHECK, named=r"accumulat|micro.?batch|divided (again|twice|by)")
def divided_again(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run = Run(model)
    rows = run.prepare(run.rollout(0), eps=1e-4)
    found = run.update(rows, lambda *a, **k: policy_loss(*a, **k) / (2 if bug else 1))
    config = TRL | {"gradient_accumulation_steps": 2, "steps_per_generation": 2}
    recorded(side / "record", model, rows, found, "trl", config)


@pair("Automodel#3359, Megatron-LM#6660", CROSSCHECK, named=r"each (micro.?batch|rank)|micro.?batch")
def mean_of_local_means(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run = Run(model)
    rows = run.prepare(run.rollout(0))
    found = run.update(rows, batches=4 if bug else 1)
    recorded(side / "record", model, rows, found, "verl", VERL)


@pair("TRL#6140", CROSSCHECK, named=r"accumulat|micro.?batch|weight of the KL")
def terms_scaled_differently(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run = Run(model, beta=0.2)
    run.reference.load_state_dict(noisy(run.reference, 0.05))
    rows = run.prepare(run.rollout(0), eps=1e-4)
    run.beta = 0.2 / 4 if bug else 0.2
    found = run.update(rows)
    config = TRL | {"beta": 0.2, "gradient_accumulation_steps": 4}
    recorded(side / "record", model, rows, found, "trl", config)


@pair(
    "Automodel#3359, ms-swift#10117",
    "crosscheck {side}/one --layout {side}/two",
    named=r"micro-batches|accumulat",
)
def loss_depends_on_layout(side: Path, shared: Path, model: Path, bug: bool) -> None:
    for name, parts in (("one", 1), ("two", 4)):
        run = Run(model)
        rows = run.prepare(run.rollout(0), eps=1e-4)
        scale = parts if bug else 1
        found = run.update(rows, lambda *a, scale=scale, **k: policy_loss(*a, **k) / scale)
        config = TRL | {"gradient_accumulation_steps": parts, "steps_per_generation": parts}
        recorded(side / name, model, rows, found, "trl", config)


def noisy(model: Any, size: float) -> Any:
    """Return weights moved at random."""
    chance = torch.Generator().manual_seed(5)
    return {
        name: value + size * value.std() * torch.randn(value.shape, generator=chance)
        for name, value in model.state_dict().items()
    }


@pair("slime#2114", CROSSCHECK, named=r"KL[^.]{0,80}(direction|sign|log-probs|exchanged)")
def kl_the_wrong_way(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run = Run(model, beta=0.2)
    run.reference.load_state_dict(noisy(run.reference, 0.5))
    rows = run.prepare(run.rollout(0))
    found = run.update(rows, by_row=True, kl=(lambda d: kl3(-d)) if bug else kl3)
    config = SLIME | {"use_kl_loss": True, "kl_loss_coef": 0.2}
    recorded(side / "record", model, rows, found, "slime", config)


def with_tools(rows: list[Row], model: Any) -> list[Row]:
    """Put a line of the environment into each answer; `whole` is the mask without its gap."""
    for number, row in enumerate(rows):
        tool = ids(f"={number % 7}{number % 3}:")
        at = len(row["completion_tokens"]) // 2
        for name, fill in (("completion_tokens", tool), ("logprobs", [0.0] * 4), ("loss_mask", [0] * 4)):
            row[name] = row[name][:at] + fill + row[name][at:]
        row["whole"] = [1] * len(row["loss_mask"])
        row["completion"] = text(row["completion_tokens"])
    return rows


@pair("TRL#4975, unsloth#5673", CROSSCHECK, named=r"mask|tool|everything after the prompt")
def mask_without_tools(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run = Run(model)
    rows = run.prepare(with_tools(run.rollout(0), run.actor))
    found = run.update(rows, mask="whole" if bug else "loss_mask")
    recorded(side / "record", model, rows, found, "verl", VERL)


@pair("prime-rl#2458", CROSSCHECK, named=r"mask of[^.]{0,30} KL|KL[^.]{0,60}(mask|tokens|tool)")
def kl_outside_the_mask(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run = Run(model, beta=0.2)
    run.reference.load_state_dict(noisy(run.reference, 0.1))
    rows = run.prepare(with_tools(run.rollout(0), run.actor), eps=1e-4)
    found = run.update(rows, kl_mask="whole" if bug else "loss_mask")
    recorded(side / "record", model, rows, found, "trl", TRL | {"beta": 0.2})


def distilled(wrong: float, side: Path, shared: Path, model: Path, bug: bool) -> None:
    """Write a step of on-policy distillation whose teacher term has a factor, by the bug a wrong one."""
    run, factor = Run(model), wrong if bug else 1.0
    teacher = load(model)
    teacher.load_state_dict(noisy(teacher, 0.1))
    rows = run.prepare(run.rollout(0))
    run.reference = teacher
    of_teacher = run.prepare([dict(row) for row in rows])
    for row, other in zip(rows, of_teacher, strict=True):
        row["teacher_logprobs"] = other["ref_logprobs"]
        pairs = zip(row["advantages"], row["old_logprobs"], row["teacher_logprobs"], strict=True)
        row["advantages"] = [a - factor * 0.5 * (old - theirs) for a, old, theirs in pairs]
    found = run.update(rows, by_row=True)
    config = SLIME | {"use_opd": True, "opd_type": "sglang", "opd_kl_coef": 0.5}
    recorded(side / "record", model, rows, found, "slime", config)


TEACHERS = {"teacher_left_out": ("atropos#456", 0.0), "teacher_with_other_sign": ("slime#2085", -1.0)}
for name, (source, factor) in TEACHERS.items():
    PAIRS[name] = Pair(name, source, (CROSSCHECK,), "teacher|distill", partial(distilled, factor))


@pair(
    "slime#2234",
    CROSSCHECK,
    "doctor {side}/record",
    named=r"(logged|reported|statistic)[^.]{0,80}(rows|samples)|rewards",
)
def statistic_of_another_slice(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run, steps = Run(model), []
    for step in range(12):
        rows = run.prepare(run.rollout(step))
        stats = stats_of(rows, run.update(rows, by_row=True))
        stats["rollout/raw_reward"] = mean(row["reward"] for row in (rows[: len(rows) // 2] if bug else rows))
        steps.append((step, rows, stats))
        run.sync()
    write(side / "record", "slime", SLIME, model, steps)


# -------------------- rows and rewards
REWARD = '''"""1 where the answer is as long as asked for."""


def reward(prompt, completions, prompt_ids, completion_ids, answer, **data):
    return float(len(completions) >= answer)
'''
RESCORE = "reward rescore {side}/record {shared}/rewards.py:reward --data {shared}/rows.jsonl"


def rewarded(side: Path, shared: Path, model: Path, change: Callable[[list[Row]], list[float]]) -> None:
    """Write a step whose rewards are changed, with the function that makes the right ones."""
    (shared / "rewards.py").write_text(REWARD)
    asked = [f"{ANSWER[n % 10]}{n}:" for n in range(10)]
    lines(shared / "rows.jsonl", [{"prompt": one, "answer": 3 + n % 3} for n, one in enumerate(asked)])
    run = Run(model)
    rows = run.rollout(0, asked, lambda row: float(len(row["completion"]) >= 3 + int(row["prompt"][1]) % 3))
    for row, value in zip(rows, change(rows), strict=True):
        row["reward"] = value
    found = run.update(run.prepare(rows))
    recorded(side / "record", model, rows, found, "nemo-rl", {})


def lines(file: Path, rows: list[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pair("NeMo-RL#3635", RESCORE, named=r"shift|moved|another (row|sample)|row before|neighbo")
def rewards_move_by_one(side: Path, shared: Path, model: Path, bug: bool) -> None:
    def change(rows: list[Row]) -> list[float]:
        scores: list[float] = []
        for row in rows:
            scores += [row["reward"]] + [0.0] * (bug and not set(row["completion"]) & set(ANSWER))
        return scores[: len(rows)]

    rewarded(side, shared, model, change)


@pair("slime#2237", RESCORE, named=r"order|permut|another (row|sample)|other rows|interleav|every")
def rewards_in_another_order(side: Path, shared: Path, model: Path, bug: bool) -> None:
    order = [n * GROUP + s for s in range(GROUP) for n in range(10)] if bug else range(10 * GROUP)
    rewarded(side, shared, model, lambda rows: [rows[at]["reward"] for at in order])


def gathered(side: Path, shared: Path, model: Path, groups: list[list[int]]) -> None:
    """Write a record whose steps trained on these prompts of a data set."""
    asked = [f"{ANSWER[n % 10]}{n // 10 % 10}:" for n in range(200)]
    lines(shared / "rows.jsonl", [{"prompt": one} for one in asked])
    run, steps = Run(model, lr=5e-4), []
    for step, chosen in enumerate(groups):
        rows = run.rollout(step, [asked[n] for n in chosen])
        for at, row in enumerate(rows):
            is_repeated = len(set(chosen)) < len(chosen)
            row["group"] = (step, chosen[at // GROUP]) if is_repeated else chosen[at // GROUP]
        steps.append((step, run.prepare(rows), stats_of(rows, run.update(rows))))
        run.sync()
    write(side / "record", "slime", SLIME, model, steps)


COVERAGE = "record coverage {side}/record {shared}/rows.jsonl"


@pair(
    "slime#2238",
    COVERAGE,
    "doctor {side}/record",
    named=r"(prompts?|groups?|rows)[^.]{0,60}(dropped|never|lost|missing)",
)
def finished_groups_discarded(side: Path, shared: Path, model: Path, bug: bool) -> None:
    read = [n for n in range(140) if not bug or n % 5 not in (1, 3)]
    gathered(side, shared, model, [read[at : at + 6] for at in range(0, 72, 6)])


@pair("TRL#5911, marin#1829", COVERAGE, named=r"(twice|again|doubled|more than once|repeated)")
def data_read_again_after_resume(side: Path, shared: Path, model: Path, bug: bool) -> None:
    read = [*range(36), *(range(36) if bug else range(36, 72))]
    gathered(side, shared, model, [read[at : at + 6] for at in range(0, 72, 6)])


@pair(
    "rllm#694",
    "doctor {side}/record",
    "consistency {side}/record --step 0 --model {model}",
    named=r"(reason|stop|end)[^.]{0,80}(last token|without|no end|contradict)",
)
def timeout_ends_as_done(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run, steps = Run(model), []
    for step in range(6):
        rows = run.rollout(step)
        for number, row in enumerate(rows):
            if number % 3 == 1 and len(row["completion_tokens"]) > 3 and row["finish_reason"] == "stop":
                cut = len(row["completion_tokens"]) - 2
                for name in ("completion_tokens", "logprobs", "loss_mask"):
                    row[name] = row[name][:cut]
                row |= {"reward": 0.0, "completion": text(row["completion_tokens"])}
                row |= {"finish_reason": "stop" if bug else "length", "loss_mask": [int(bug)] * cut}
        found = run.update([row for row in run.prepare(rows) if any(row["loss_mask"])])
        steps.append((step, rows, stats_of(rows, found, "verl")))
    write(side / "record", "verl", VERL, model, steps)


@pair(
    "marin#8936",
    "doctor {side}/record",
    named=r"(cut|truncated|unfinished|length)[^.]{0,80}(reward|paid)|(reward|paid)[^.]{0,60}(cut|truncated|unfinished)",
)
def unfinished_is_rewarded(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run, steps = Run(model, lr=1.5e-3), []
    for step in range(24):
        rows = run.rollout(step)
        for number, row in enumerate(rows):
            if number == (5 * step) % 32 and len(row["completion_tokens"]) > 3:
                for name in ("completion_tokens", "logprobs", "loss_mask"):
                    row[name] = row[name][:3]
                row |= {"reward": float(bug), "finish_reason": "length"}
                row["completion"] = text(row["completion_tokens"])
            else:
                row["reward"] = float(row["completion"][:1] in ANSWER[:4])
        steps.append((step, run.prepare(rows), stats_of(rows, run.update(rows))))
        run.sync()
    write(side / "record", "slime", SLIME, model, steps)


@pair(
    "verl#6857",
    "consistency {side}/record --step 0 --model {model}",
    "doctor {side}/record",
    named=r"copies|same (text|tokens|seed)|seed|identical",
)
def seeds_collide(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run, steps = Run(model), []
    for step in range(6):
        rows = run.rollout(step, seeds=lambda s, row: 1000 * s + (row // 2 if bug else row))
        steps.append((step, run.prepare(rows), stats_of(rows, run.update(rows), "verl")))
        run.sync()
    write(side / "record", "verl", VERL, model, steps)


@pair(
    "NeMo-RL#3792",
    "doctor {side}/record",
    named=r"(always|exactly|only) 0|is 0 |zero in every|no effect|dead term|acts? on nothing",
)
def term_is_always_zero(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run, steps = Run(model, beta=0.0 if bug else 0.05), []
    for step in range(12):
        rows = run.prepare(run.rollout(step))
        found = run.update(rows)
        stats = stats_of(rows, found) | {"train/kl_loss": 0.0 if bug else found["kl"] + 1e-4}
        steps.append((step, rows, stats))
        run.sync()
    config = SLIME | {"use_kl_loss": True, "kl_loss_coef": 0.05}
    write(side / "record", "slime", config, model, steps, computed=False)


# -------------------- weights of the engine
def trained(model: Path, shared: Path, updates: int = 10) -> Run:
    """Train, and leave the last weights in `shared/last` and those before in `shared/previous`."""
    run = Run(model, prompts=12)
    for step in range(updates):
        if step == updates - 1:
            save(run.actor, shared / "previous")
        run.update(run.prepare(run.rollout(step)))
        run.sync()
    save(run.actor, shared / "last")
    return run


def sampled(
    side: Path,
    run: Run,
    model: Path,
    step: int,
    rows: list[Row] | None = None,
    trainer: str = "slime",
    config: Row = SLIME,
) -> None:
    rows = run.prepare(run.rollout(step) if rows is None else rows)
    stats = stats_of(rows, run.update(rows), trainer)
    write(side / "record", trainer, config, model, [(step, rows, stats)], computed=False)


WEIGHTS = (
    "consistency {side}/record --step 10 --model {shared}/last --base {model} --previous {shared}/previous"
)


@pair(
    "slime#2380, #2224",
    "consistency {side}/record --step 10 --model {shared}/last --base {model}",
    named=r"^(?!.*adapter not loaded).*(base|reference|first|initial) (model|weights|policy)",
)
def engine_has_the_reference(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run = trained(model, shared)
    if bug:
        run.engine.load_state_dict(run.reference.state_dict())
    sampled(side, run, model, 10)


@pair("TRL#5932, #5937", WEIGHTS, named=r"partial|tensors?|only (some|part)")
def anchor_without_some_tensors(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run = trained(model, shared)
    if bug:
        old = load(model).state_dict()
        run.engine.load_state_dict(
            run.actor.state_dict() | {n: v for n, v in old.items() if "layers.1.mlp" in n}
        )
    sampled(side, run, model, 10)


@pair("SkyRL#1902", WEIGHTS, named=r"delta|update[^.]{0,40}(first|base)|chain")
def delta_on_first_weights(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run = trained(model, shared)
    if bug:
        first, before, now = (load(f).state_dict() for f in (model, shared / "previous", shared / "last"))
        run.engine.load_state_dict({name: first[name] + now[name] - before[name] for name in now})
    sampled(side, run, model, 10)


@pair("prime-rl#3543", WEIGHTS, named=r"(some|of the|of \d+) (rows|requests|sequences)|stale|previous")
def some_requests_use_old_weights(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run = trained(model, shared)
    fresh = run.rollout(10)
    run.engine.load_state_dict(load(shared / "previous").state_dict())
    run.chance.seed(2)
    stale = run.rollout(11, [row["prompt"] for row in fresh[::GROUP]])
    rows = [
        old if bug and at % 3 == 0 else new for at, (old, new) in enumerate(zip(stale, fresh, strict=True))
    ]
    for at, row in enumerate(rows):
        row |= {"group": at // GROUP, "versions": 10}
    sampled(side, run, model, 10, rows)


@pair("AReaL#1569", WEIGHTS, named=r"version|stale|previous")
def label_of_another_version(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run = trained(model, shared)
    if bug:
        run.engine.load_state_dict(load(shared / "previous").state_dict())
    sampled(side, run, model, 10)


KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "top_k": lambda logp: logp >= logp.topk(6).values[:, -1:],
    "min_p": lambda logp: logp >= logp.max(-1, keepdim=True).values + torch.tensor(0.3).log(),
}


def filtered(option: str, side: Path, shared: Path, model: Path, bug: bool) -> None:
    run, config = Run(model, prompts=12), {option: 6 if option == "top_k" else 0.3}
    rows = run.rollout(0, keep=KEPT[option] if bug else None)
    sampled(side, run, model, 0, rows, "trl", TRL | (config if bug else {}))


def over_time(side: Path, model: Path, update: Callable[[Run, int], None]) -> None:
    """Write a run whose engine gets its weights by `update`, with log-probs of both sides."""
    run, steps = Run(model, lr=1e-3), []
    for step in range(24):
        rows = run.prepare(run.rollout(step))
        steps.append((step, rows, stats_of(rows, run.update(rows))))
        update(run, step)
    write(side / "record", "slime", SLIME, model, steps)


@pair("vime#64, SkyRL#1903", "consistency {side}/record --over-time", named=r"frozen")
def engine_is_frozen(side: Path, shared: Path, model: Path, bug: bool) -> None:
    over_time(side, model, lambda run, step: None if bug else run.sync())


@pair("TRL#5932, verl#7060", "consistency {side}/record --over-time", named=r"drift|delta")
def deltas_drift(side: Path, shared: Path, model: Path, bug: bool) -> None:
    def update(run: Run, step: int) -> None:
        if not bug or step % 6 == 5:
            run.sync()
            return
        with torch.no_grad():  # elements that move little are not sent
            for mine, theirs in zip(run.actor.parameters(), run.engine.parameters(), strict=True):
                moved = (mine - theirs).abs()
                theirs.copy_(torch.where(moved > moved.quantile(0.9), mine, theirs))

    over_time(side, model, update)


FIRST = "consistency {side}/record --step 0 --model {model}"
for source, option in (("TRL#6880, #4772", "top_k"), ("TRL#5814", "min_p")):
    name, named = f"survivors_of_{option}", rf"R03|R04|{option.replace('_', '.?')}"
    PAIRS[name] = Pair(name, source, (FIRST,), named, partial(filtered, option))


# -------------------- the seam of a resume
def resumed(side: Path, model: Path, change: Callable[[Run, int, Row], Row | None], steps: int = 40) -> None:
    """Write two records and a log of a run that resumes in its middle; `change` may act on it.

    `change(run, step, stats)` is called before each step with {} and after it with its statistics.
    """
    run, found = Run(model, beta=0.05), []
    for step in range(steps):
        asked = (change(run, step, {}) or {}).get("seed", step)
        rows = run.prepare(run.rollout(asked))
        for row in rows:
            row["versions"] = step
        rate = run.optimizer.param_groups[0]["lr"]
        stats = stats_of(rows, out := run.update(rows), "nemo-rl") | {
            "train/kl_penalty": out["kl"],
            "train/lr": rate,
        }
        found.append((step, rows, change(run, step, stats) or stats))
        run.sync()
    config = {"loss_fn": {"reference_policy_kl_penalty": 0.05}, "policy": {"train_global_batch_size": 32}}
    lines(side / "logs" / "metrics.jsonl", [{"step": step} | stats for step, _, stats in found])
    for name, part in (("a", found[: steps // 2]), ("b", found[steps // 2 :])):
        write(side / name, "nemo-rl", config, model, part)


SEAM = "record seam {side}/a {side}/b"


@pair(
    "NeMo-RL#3722",
    SEAM,
    "doctor {side}/logs",
    named=r"reference[^.]{0,80}(changed|reset|resumed|moved|equals)",
)
def reference_is_the_resumed_policy(side: Path, shared: Path, model: Path, bug: bool) -> None:
    def change(run: Run, step: int, stats: Row) -> None:
        if bug and step == 20 and not stats:
            run.reference.load_state_dict(run.actor.state_dict())

    resumed(side, model, change)


@pair(
    "prime-rl#3332, TRL#3247",
    SEAM,
    named=r"(learning.rate|warm.?up|scheduler|\"lr\")[^.]{0,120}changed|changed[^.]{0,120}(learning.rate|warm.?up|scheduler)",
)
def warm_up_begins_again(side: Path, shared: Path, model: Path, bug: bool) -> None:
    def change(run: Run, step: int, stats: Row) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (1 + (step - 20 if bug and step >= 20 else step)) / 10)

    resumed(side, model, change)


@pair(
    "The-School-of-AI#559, xtuner#1386",
    "record seam {side}/one {side}/two",
    named=r"(optimizer|moment|Adam)[^.]{0,80}(changed|0)|changed[^.]{0,80}(optimizer|moment|Adam)",
)
def moments_are_lost(side: Path, shared: Path, model: Path, bug: bool) -> None:
    def change(run: Run, step: int, stats: Row) -> None:
        if bug and step == 20 and not stats:
            run.optimizer = torch.optim.AdamW(run.actor.parameters(), lr=2e-3, weight_decay=0.0)
        if stats and step in (19, 20):
            folder = side / ("one" if step == 19 else "two") / f"checkpoint-{step + 1}"
            folder.mkdir(parents=True)
            torch.save(run.optimizer.state_dict(), folder / "optimizer.pt")

    resumed(side, model, change)
    for name, folder in (("a", "one"), ("b", "two")):
        shutil.move(side / name, side / folder / "record")


@pair(
    "slime#2236, open-instruct#1627",
    SEAM,
    named=r"(same|equal|repeat|again)[^.]{0,80}(prompts?|texts?|tokens)|random|seed|RNG",
)
def generators_begin_again(side: Path, shared: Path, model: Path, bug: bool) -> None:
    def change(run: Run, step: int, stats: Row) -> Row | None:
        if stats:
            return None
        if bug and step == 20:
            run.chance.seed(1)
        return {"seed": step - 20 if bug and step >= 20 else step}

    resumed(side, model, change)


@pair("cosmos-rl#503", SEAM, named=r"version[^.]{0,80}(changed|0|reset)|changed[^.]{0,60}version")
def version_is_zero_again(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run, steps = Run(model), []
    for step in range(12):
        rows = run.prepare(run.rollout(step))
        for row in rows:
            row["versions"] = step - 6 if bug and step >= 6 else step
        steps.append((step, rows, stats_of(rows, run.update(rows), "nemo-rl")))
        run.sync()
    for name, part in (("a", steps[:6]), ("b", steps[6:])):
        write(side / name, "nemo-rl", {}, model, part)


@pair("AReaL#1345, #1471", "doctor {side}/record", named=r"stale|version")
def staleness_after_recovery(side: Path, shared: Path, model: Path, bug: bool) -> None:
    run, queue, started, steps = Run(model, lr=5e-4), [], 0, []
    for step in range(24):
        if step == 10:
            queue, started = [], 0 if bug else step * 5
        while started < (3 + step) * 5 and len(queue) < 100:
            asked = [f"{run.chance.choice(ANSWER)}{run.chance.choice('0123456789')}:"]
            queue.append(run.rollout(started, asked))
            for row in queue[-1]:
                row["versions"] = step
            started += 1
        rows, queue = run.prepare([row for group in queue[:5] for row in group]), queue[5:]
        stats = stats_of(rows, run.update(rows), "areal")
        age = mean(step - row["versions"] for row in rows)
        stats["ppo_actor/update/version_stats/head_offpolicyness/avg"] = age
        steps.append((step, rows, stats))
        run.sync()
    config = {"rollout": {"max_head_offpolicyness": 2}}
    write(side / "record", "areal", config, model, steps, computed=False)


# -------------------- asking and judging
def ask(question: str, folder: Path, name: str, side: str) -> tuple[int, str]:
    """Return (exit code, answer) of one question."""
    words = question.format(side=folder / name / side, shared=folder / name, model=folder / "model").split()
    command = [str(Path(sys.executable).with_name("areal-debug")), *words, "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)
    return done.returncode, leading(done.stdout) if done.returncode == 1 else done.stderr[
        -600:
    ] or done.stdout[-300:]


def leading(answer: str) -> str:
    """Return what an answer blames, without what it also considered."""
    try:
        found = json.loads(answer)
    except ValueError:
        return answer
    if not isinstance(found, dict):
        return answer
    if "first_stage" in found:
        return f"{found['first_stage']}: {found['option']}"
    for name in ("causes", "alarms"):
        if name in found:
            keys = ("id", "name", "title", "evidence", "found", "fix")
            return " ".join(str(one.get(key, "")) for one in found[name][:3] for key in keys)
    return answer[:3000]


def judge(one: Pair, folder: Path, is_shown: bool) -> tuple[str, bool]:
    """Return (named, seen or missed; whether the fixed side is accused)."""
    answers = {
        side: [ask(question, folder, one.name, side) for question in one.questions] for side in ("bug", "fix")
    }
    said = [answer for code, answer in answers["bug"] if code == 1]
    is_named = any(re.search(one.named, " ".join(answer.split()), re.I) for answer in said)
    for side, of_side in answers.items() if is_shown else ():
        for code, answer in of_side:
            print(f"    {side} {code}: {' '.join(answer.split())[:500]}")
    return "named" if is_named else "seen" if said else "missed", any(code == 1 for code, _ in answers["fix"])


def judge_peer(one: Pair, folder: Path, peer: str) -> tuple[str, bool]:
    """Return what `judge` does, of another doctor: its findings on the metrics of each step."""
    findings = []
    for side in ("bug", "fix"):
        rows: dict[int, Row] = {}
        for record in (open_record(file.parent) for file in (folder / one.name / side).rglob("record.json")):
            stats = {step: record.step(step).outcome(0).stats for step in record.steps}
            rows |= {step: {TO_TRL[n]: v for n, v in of.items() if n in TO_TRL} for step, of in stats.items()}
        if len(rows) < 2:
            return "cannot read", False
        findings.append(PEERS[peer]([{"step": step} | rows[step] for step in sorted(rows)]))
    said = " ".join(findings[0]).replace("_", " ")
    is_named = re.search(one.named, said, re.I)
    return "named" if is_named else "seen" if said else "missed", bool(findings[1])


def make(one: Pair, folder: Path) -> None:
    shutil.rmtree(folder / one.name, ignore_errors=True)
    for side in ("bug", "fix"):
        (folder / one.name / side).mkdir(parents=True)
        one.build(folder / one.name / side, folder / one.name, folder / "model", side == "bug")


def main() -> None:
    options = read_options(__doc__, only=SomeOf(PAIRS), keep="", made=False, answers=False, json="")
    folder = Path(options.keep or tempfile.mkdtemp()).absolute()
    torch.set_num_threads(1)
    first_weights(folder / "model")
    found: dict[str, dict[str, tuple[str, bool]]] = {}
    for name, one in ((name, PAIRS[name]) for name in options.only):
        if not options.made:
            make(one, folder)
        ours = {"areal-debug": judge(one, folder, options.answers)}
        found[name] = ours | {peer: judge_peer(one, folder, peer) for peer in PEERS}
        cells = (f"{outcome}{' FIX ACCUSED' * accused}" for outcome, accused in found[name].values())
        print(f"{'  '.join(f'{cell:<11}' for cell in cells)}  {name:<34}{one.source}", flush=True)
    counts = {}
    for tool in ("areal-debug", *PEERS):
        counts[tool] = Counter(w for of in found.values() for w in (of[tool][0], "accused" * of[tool][1]))
        print(f"{tool:<12}{', '.join(f'{name} {counts[tool][name]}' for name in OUTCOMES)} of {len(found)}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))
    if not options.keep:
        shutil.rmtree(folder)
    right, wrong = (counts["areal-debug"][name] for name in ("named", "accused"))
    raise SystemExit(right < ENOUGH * len(found) or wrong > 0)


if __name__ == "__main__":
    main()
