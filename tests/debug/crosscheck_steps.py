"""Steps of other trainers, computed by plain loops in float32, and 47 planted differences.

Nothing here is shared with the code that recognises the differences: a plant is a function, a
number or a formula of these loops, and the configuration that is recorded beside it says otherwise.
"""

import random
import tomllib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from areal_debug import Recorder

F = torch.float32
CONFIGS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
TRL, VERL = CONFIGS["trl"], CONFIGS["verl"]


@dataclass
class Row:
    """A sample: lists over its completion; `counts` is the loss mask."""

    group: int
    prompt: list[int]
    tokens: list[int]
    counts: list[int]
    truncated: bool
    reward: float
    rollout: list[float]
    old: list[float]
    new: list[float]
    ref: list[float]


def make_rows(seed: int, sizes: tuple[int, ...] = (4,) * 6, tools: bool = True) -> list[Row]:
    """Make samples with every kind of ratio, reward and length."""
    rng = random.Random(seed)
    rows = []
    for group, size in enumerate(sizes):
        prompt = [rng.randrange(3, 50) for _ in range(rng.randrange(2, 6))]
        for _ in range(size):
            length = rng.randrange(3, 13)
            counts = [1] * length
            if tools and length > 6 and rng.random() < 0.4:
                counts[3:5] = [0, 0]
            rollout = [-rng.expovariate(1.0) for _ in range(length)]
            old = [x + rng.gauss(0, 0.05) for x in rollout]
            rows.append(
                Row(
                    group=group,
                    prompt=prompt,
                    tokens=[rng.randrange(3, 50) for _ in range(length)],
                    counts=counts,
                    truncated=rng.random() < 0.25,
                    reward=rng.choice([0.0, 0.25, 1.0, 1.5, 2.0]) + 0.1 * rng.random(),
                    rollout=rollout,
                    old=old,
                    new=[x + rng.gauss(0, 0.35) + (1.6 if rng.random() < 0.03 else 0) for x in old],
                    ref=[x + rng.gauss(0, 0.3) for x in old],
                )
            )
    return rows


@dataclass
class How:
    """What the trainer really does; the defaults are what its configuration says."""

    reward: Callable[[Row], float] = lambda row: row.reward
    reported_reward: Callable[[Row], float] = lambda row: row.reward
    group: Callable[[int, Row], Any] = lambda number, row: row.group
    baseline: Callable[[torch.Tensor, int, torch.Tensor], Any] = lambda own, at, every: own.mean()
    spread: Callable[[torch.Tensor, torch.Tensor], Any] = lambda own, every: own.std() + 1e-4
    after: Callable[[float, Row], float] = lambda advantage, row: advantage
    whiten: Callable[[torch.Tensor], torch.Tensor] | None = None
    advantage_counts: Callable[[Row], list[int]] = lambda row: row.counts
    kl_reward: Callable[[Row], torch.Tensor] | None = None
    counts: Callable[[Row], list[int]] = lambda row: row.counts
    old: Callable[[Row], list[float]] = lambda row: row.old
    ratio: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda log, counts: log.exp()
    low: float = 0.2
    high: float = 0.2
    take: Callable[..., torch.Tensor] = lambda one, clipped, new: torch.maximum(one, clipped)
    dual: float | None = None
    kl: Callable[[torch.Tensor], torch.Tensor] | None = lambda d: (-d).exp() + d - 1
    beta: float = 0.04
    extra: Callable[[Row], torch.Tensor] | None = None
    aggregate: Callable[[list[torch.Tensor], list[torch.Tensor]], torch.Tensor] = lambda losses, counts: (
        token_mean(losses, counts)
    )


def advantages(rows: list[Row], how: How) -> list[torch.Tensor]:
    """Compute the advantages of each row's tokens, in float32."""
    rewards = [torch.tensor(how.reward(row), dtype=F) for row in rows]
    if how.kl_reward is not None:
        rewards = [reward - how.kl_reward(row) for reward, row in zip(rewards, rows, strict=True)]
    members: dict[Any, list[int]] = {}
    for number, row in enumerate(rows):
        members.setdefault(how.group(number, row), []).append(number)
    every = torch.stack(rewards)
    found: list[torch.Tensor] = [torch.zeros(())] * len(rows)
    for group in members.values():
        own = torch.stack([rewards[number] for number in group])
        for at, number in enumerate(group):
            value = (own[at] - how.baseline(own, at, every)) / torch.as_tensor(
                how.spread(own, every), dtype=F
            )
            value = torch.as_tensor(how.after(value, rows[number]), dtype=F)
            found[number] = value * torch.tensor(how.advantage_counts(rows[number]), dtype=F)
    if how.whiten is not None:
        masks = [torch.tensor(row.counts, dtype=torch.bool) for row in rows]
        flat = how.whiten(torch.cat([a[m] for a, m in zip(found, masks, strict=True)]))
        parts = flat.split([int(m.sum()) for m in masks])
        for number, (part, mask) in enumerate(zip(parts, masks, strict=True)):
            found[number] = torch.zeros(len(mask)).masked_scatter(mask, part)
    return found


def loss(rows: list[Row], given: list[torch.Tensor], how: How) -> torch.Tensor:
    """Compute the loss of the rows, in float32."""
    losses, counts = [], []
    for row, advantage in zip(rows, given, strict=True):
        mask = torch.tensor(how.counts(row), dtype=F)
        new, old = (torch.tensor(x, dtype=F) for x in (row.new, how.old(row)))
        ratio = how.ratio((new - old) * mask, mask)
        value = how.take(-advantage * ratio, -advantage * ratio.clamp(1 - how.low, 1 + how.high), new)
        if how.dual is not None:
            value = torch.where(advantage < 0, torch.minimum(value, -advantage * how.dual), value)
        if how.kl is not None:
            value = value + how.beta * how.kl(new - torch.tensor(row.ref, dtype=F))
        if how.extra is not None:
            value = value + how.extra(row)
        losses.append(value * mask)
        counts.append(mask)
    return how.aggregate(losses, counts)


def write_step(folder: Path, rows: list[Row], how: How, trainer: str, config: dict[str, Any]) -> Path:
    """Record a step as a user of the recording API would."""
    found = advantages(rows, how)
    value = float(loss(rows, found, how))
    rewards = torch.tensor([how.reported_reward(row) for row in rows], dtype=F)
    stats = {"reward": float(rewards.mean()), "loss": value}
    if trainer == "verl":
        stats = {"critic/score/mean": stats["reward"], "actor/pg_loss": value}
    samples = []
    for row, advantage in zip(rows, found, strict=True):
        before = [0.0] * len(row.prompt)
        samples.append(
            {
                "prompt_tokens": row.prompt,
                "completion_tokens": row.tokens,
                "loss_mask": [0] * len(row.prompt) + row.counts,
                "logprobs": before + row.rollout,
                "reward": row.reward,
                "group": row.group,
                "finish_reason": "length" if row.truncated else "stop",
                "advantages": before + advantage.tolist(),
                "old_logprobs": before + row.old,
                "ref_logprobs": before + row.ref,
                "learning": {"current_logp": before + row.new},
            }
        )
    with Recorder(folder, config=config, trainer=trainer) as recorder:
        recorder.step(0, samples, stats=stats)
    return folder


def after_shift(by: int) -> Callable[[Row], list[int]]:
    """Return a mask that is off by one token, inside the completion."""
    return lambda row: [0, *row.counts, 0][1 - by : 1 - by + len(row.counts)]


def whitened(flat: torch.Tensor) -> torch.Tensor:
    return (flat - flat.mean()) / (flat.std() + 1e-8)


def token_mean(losses: list[torch.Tensor], counts: list[torch.Tensor]) -> torch.Tensor:
    return sum(x.sum() for x in losses) / sum(c.sum() for c in counts)


def seq_mean(losses: list[torch.Tensor], counts: list[torch.Tensor]) -> torch.Tensor:
    return sum(x.sum() / c.sum() for x, c in zip(losses, counts, strict=True)) / len(losses)


def seq_sum_over(length: float) -> Callable[..., torch.Tensor]:
    return lambda losses, counts: sum(x.sum() for x in losses) / len(losses) / length


def kl_sum(row: Row, weight: float, term: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the KL penalty of a row, summed over the tokens that count."""
    difference = torch.tensor(row.old, dtype=F) - torch.tensor(row.ref, dtype=F)
    return weight * (term(difference) * torch.tensor(row.counts, dtype=F)).sum()


@dataclass
class Plant:
    """A difference, and what should be found; `option` None is unknown."""

    name: str
    stage: str
    option: str | None
    trainer: str = "trl"
    how: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = (4,) * 6
    tools: bool = True

    def write(self, folder: Path, seed: int = 0) -> Path:
        rows = make_rows(seed, self.sizes, self.tools)
        config = deepcopy(TRL if self.trainer == "trl" else VERL)
        if self.trainer == "trl":
            config |= self.config
        else:
            for section, values in self.config.items():
                config[section] |= values
        return write_step(folder, rows, How(**(base_of(self.trainer) | self.how)), self.trainer, config)


def base_of(trainer: str) -> dict[str, Any]:
    """Return what a trainer does as its configuration here says."""
    if trainer == "trl":
        return {}
    return {
        "spread": lambda own, every: own.std() + 1e-6,
        "kl_reward": lambda row: kl_sum(row, 0.05, lambda d: d),
        "kl": None,
        "dual": 3.0,
    }


def loo(own: torch.Tensor, at: int, every: torch.Tensor) -> torch.Tensor:
    return (own.sum() - own[at]) / (len(own) - 1)


def padded(flat: torch.Tensor) -> torch.Tensor:
    """Whiten with the mean over all positions of 24 rows of 12 tokens, where padding is 0."""
    mean = flat.sum() / (24 * 12)
    return (flat - mean) * (((flat - mean) ** 2).sum() / (len(flat) - 1) + 1e-8).rsqrt()


NO_KL = {"kl_reward": None}
RPP = {"spread": lambda own, every: 1.0, "kl_reward": None}
OF_RPP = {"algorithm": {"use_kl_in_reward": False, "adv_estimator": "reinforce_plus_plus_baseline"}}
WITHOUT_KL = {"algorithm": {"use_kl_in_reward": False}}
CLIP_3 = {"low": 0.3, "high": 0.3}
# fmt: off
PLANTS = [
    Plant("rewards doubled", "rewards", "reward_scaling",
          how={"reward": lambda r: 2 * r.reward, "spread": lambda o, e: 1.0}, config={"scale_rewards": "none"}),
    Plant("rewards clipped at 1", "rewards", "reward_clip", how={"reward": lambda r: min(r.reward, 1.0)}),
    Plant("truncated rows get no reward", "rewards", "truncated",
          how={"reward": lambda r: 0.0 if r.truncated else r.reward}),
    Plant("reported rewards leave out truncated rows", "rewards", None,
          how={"reported_reward": lambda r: 0.0 if r.truncated else r.reward}),
    Plant("rewards squared", "advantages", None, how={"reward": lambda r: r.reward**2}),
    Plant("advantages one token late", "mask", "mask", how={"advantage_counts": after_shift(1)}, tools=False),
    Plant("advantages one token early", "mask", "mask", how={"advantage_counts": after_shift(-1)}, tools=False),
    Plant("no advantage on the last token", "mask", "mask",
          how={"advantage_counts": lambda r: [*r.counts[:-1], 0]}, tools=False),
    Plant("first token of truncated rows masked", "mask", None,
          how={"advantage_counts": lambda r: [0, *r.counts[1:]] if r.truncated else r.counts}),
    Plant("KL in the reward twice as heavy", "kl", "kl_reward_coef", "verl",
          how={"kl_reward": lambda r: kl_sum(r, 0.1, lambda d: d)}),
    Plant("KL in the reward by k3", "kl", "kl_reward_estimator", "verl",
          how={"kl_reward": lambda r: kl_sum(r, 0.05, lambda d: (-d).exp() - 1 + d)}),
    Plant("KL in the reward by k2", "kl", "kl_reward_estimator", "verl",
          how={"kl_reward": lambda r: kl_sum(r, 0.05, lambda d: d * d / 2)}),
    Plant("not divided by the deviation", "advantages", "std", how={"spread": lambda o, e: 1.0}),
    Plant("deviation of the batch", "advantages", "std", how={"spread": lambda o, e: e.std() + 1e-4}),
    Plant("1e-6 instead of 1e-4", "advantages", "eps", how={"spread": lambda o, e: o.std() + 1e-6}),
    Plant("1e-5 instead of 1e-6", "advantages", "eps", "verl",
          how={"spread": lambda o, e: o.std() + 1e-5, **NO_KL}, config=WITHOUT_KL),
    Plant("eps inside the root", "advantages", "inside_root", how={"spread": lambda o, e: (o.var() + 1e-4).sqrt()}),
    Plant("deviation divided by n", "advantages", "unbiased",
          how={"spread": lambda o, e: o.std(unbiased=False) + 1e-4}),
    Plant("leave one out", "advantages", "leave_one_out", how={"baseline": loo}),
    Plant("mean of the batch", "advantages", "mean", how={"baseline": lambda own, at, every: every.mean()}),
    Plant("groups by position", "advantages", "grouping", "verl", sizes=(3, 4, 2, 4, 4, 3),
          how={"group": lambda n, r: n // 4, **NO_KL}, config=WITHOUT_KL),
    Plant("divided by the length", "advantages", "length", how={"after": lambda a, r: a / sum(r.counts)}),
    Plant("whitened over tokens", "advantages", "token_mean", how={"whiten": whitened}),
    Plant("median instead of mean", "advantages", None, how={"baseline": lambda own, at, every: own.median()}),
    Plant("range instead of deviation", "advantages", None, how={"spread": lambda o, e: o.max() - o.min() + 1e-4}),
    Plant("clip 0.3", "loss", "clip_low", how=CLIP_3),
    Plant("clip-higher 0.28", "loss", "clip_high", how={"high": 0.28}),
    Plant("dual clip", "loss", "dual_clip", how={"dual": 1.5}),
    Plant("no dual clip", "loss", "dual_clip", "verl", how={"dual": None}),
    Plant("mean of each sequence", "loss", "aggregation", how={"aggregate": seq_mean}),
    Plant("sum divided by another length", "loss", "divisor",
          how={"aggregate": seq_sum_over(40.0)}, config={"loss_type": "dr_grpo"}),
    Plant("sum divided by the length", "loss", "aggregation", how={"aggregate": seq_sum_over(32.0)}),
    Plant("ratio of sequences", "loss", "ratio_level",
          how={"ratio": lambda log, c: (log.sum() / c.sum()).exp().expand_as(log)}),
    Plant("ratio to the sampling log-probs", "loss", "old_logprobs", how={"old": lambda r: r.rollout}),
    Plant("ratio is 1", "loss", "old_logprobs", how={"old": lambda r: r.new}),
    Plant("KL in the loss heavier", "loss", "kl_coef", how={"beta": 0.1}),
    Plant("no KL in the loss", "loss", "kl_coef", how={"kl": None}),
    Plant("KL in the loss by k2", "loss", "kl_estimator", how={"kl": lambda d: d * d / 2}),
    Plant("KL in the loss by k1", "loss", "kl_estimator", how={"kl": lambda d: d}),
    Plant("an entropy-like term", "loss", None, how={"extra": lambda r: 0.01 * torch.tensor(r.new, dtype=F)}),
    # one number cannot separate a pair of options from chance: the pair is named as possible only
    Plant("clip 0.3 and mean of each sequence", "loss", None, how={**CLIP_3, "aggregate": seq_mean}),
    Plant("tool tokens in the loss", "loss", "mask", how={"counts": lambda r: [1] * len(r.counts)}),
    Plant("means of groups divided by the largest", "advantages", "group_size", "verl", sizes=(3, 4, 2, 4, 4, 3),
          how={"baseline": lambda own, at, every: own.sum() / 4, **NO_KL}, config=WITHOUT_KL),
    Plant("mean over padding", "advantages", "token_mean_of", "verl", how={"whiten": padded, **RPP}, config=OF_RPP),
    Plant("ratio of sequences by the longest", "loss", "ratio_level", config={"importance_sampling_level": "sequence"},
          how={"ratio": lambda log, c: (log.sum() / 11).exp().expand_as(log)}, tools=False),
    Plant("CISPO in the place of the clipped loss", "loss", "clipped", how={"take": lambda a, b, new: b * new}),
    Plant("the clipped loss in the place of CISPO", "loss", "clipped", how={"low": 1e9},
          config={"loss_type": "cispo", "epsilon_high": 1.2}),
]
# fmt: on


def equal_step(seed: int, folder: Path) -> Path:
    """Record a step whose trainer does what its configuration says, one of many."""
    rng = random.Random(1000 + seed)
    trainer = rng.choice(["trl", "verl"])
    how = base_of(trainer)
    config = deepcopy(TRL if trainer == "trl" else VERL)
    sizes = (4,) * rng.randrange(2, 9) if trainer == "trl" else tuple(rng.randrange(2, 7) for _ in range(5))
    rows = make_rows(seed, sizes, tools=rng.random() < 0.5)
    if rng.random() < 0.3:  # right or wrong, so that groups without spread occur
        for row in rows:
            row.reward = float(row.reward > 1)
    how["low"], how["high"] = rng.choice([0.1, 0.2, 3e-4]), rng.choice([0.2, 0.28, 4e-4])
    sequence = rng.random() < 0.3
    if sequence:
        how["ratio"] = lambda log, c: (log.sum() / c.sum()).exp().expand_as(log)
    if trainer == "trl":
        equal_trl(rng, how, config)
        config |= {"importance_sampling_level": "sequence" if sequence else "token"}
    else:
        equal_verl(rng, how, config)
        actor = config["actor_rollout_ref"]["actor"]
        actor |= {"clip_ratio_low": how["low"], "clip_ratio_high": how["high"]}
        if sequence:
            actor["policy_loss"] = {"loss_mode": "gspo"}
            how["dual"], how["aggregate"] = None, seq_mean  # whatever loss_agg_mode says
    return write_step(folder, rows, How(**how), trainer, config)


def equal_trl(rng: random.Random, how: dict[str, Any], config: dict[str, Any]) -> None:
    """Draw options of TRL and what they mean."""
    config |= {"epsilon": how["low"], "epsilon_high": how["high"]}
    scale = rng.choice(["group", "batch", "none", True, False])
    how["spread"] = {
        "group": lambda o, e: o.std() + 1e-4,
        "batch": lambda o, e: e.std() + 1e-4,
        "none": lambda o, e: 1.0,
    }[{True: "group", False: "none"}.get(scale, scale)]
    how["beta"] = rng.choice([0.0, 0.01, 0.04])
    kinds = [(token_mean, "dapo"), (seq_mean, "grpo"), (seq_sum_over(32.0), "dr_grpo")]
    how["aggregate"], kind = rng.choice(kinds)
    config |= {"scale_rewards": scale, "beta": how["beta"], "loss_type": kind}
    if rng.random() < 0.3:
        config |= {"gradient_accumulation_steps": 1, "steps_per_generation": 1}
        how["old"] = lambda row: row.new
    if rng.random() < 0.3:
        config["delta"] = how["dual"] = 2.0


def equal_verl(rng: random.Random, how: dict[str, Any], config: dict[str, Any]) -> None:
    """Draw options of verl and what they mean."""
    kind = rng.choice(["grpo", "grpo", "no std", "rloo", "reinforce_plus_plus_baseline"])
    config["algorithm"] |= {"adv_estimator": "grpo" if kind == "no std" else kind}
    if kind != "grpo":
        how["spread"] = lambda o, e: 1.0
        config["algorithm"]["norm_adv_by_std_in_grpo"] = False
    if kind == "rloo":
        how["baseline"] = loo
    if kind == "reinforce_plus_plus_baseline":
        how["whiten"] = lambda flat: (flat - flat.mean()) * torch.rsqrt(flat.var() + 1e-8)
    name, term = rng.choice(
        [("kl", lambda d: d), ("mse", lambda d: d * d / 2), ("low_var_kl", lambda d: (-d).exp() - 1 + d)]
    )
    weight = rng.choice([0.0, 0.01, 0.05])
    how["kl_reward"] = lambda row: kl_sum(row, weight, term)
    config["algorithm"] |= {"kl_penalty": name, "kl_ctrl": {"kl_coef": weight}}
    how["aggregate"], mode = rng.choice(
        [
            *((token_mean, "token-mean"), (seq_mean, "seq-mean-token-mean")),
            *((seq_sum_over(1.0), "seq-mean-token-sum"), (seq_sum_over(32.0), "seq-mean-token-sum-norm")),
        ]
    )
    config["actor_rollout_ref"]["actor"]["loss_agg_mode"] = mode
