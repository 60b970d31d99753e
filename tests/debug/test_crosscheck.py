"""`areal-debug crosscheck` on steps that plain loops computed, and on a step of our own trainer."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import softplus

from areal_core.testing import make_tiny_model
from areal_debug import Recorder
from areal_debug.verbs.crosscheck import report_of
from recorder import open_record
from replayer.crosscheck.layouts import compare_layouts
from replayer.crosscheck.opinions import crosscheck
from replayer.crosscheck.step_rows import read_rows
from replayer.crosscheck.their_configs import configured
from tests.command_line import installed

from . import crosscheck_steps as steps

ROOT = Path(__file__).parents[2]
SAMPLE = [*steps.PLANTS[:42:6], *steps.PLANTS[-5:]]


@pytest.fixture(autouse=True)
def short_search(monkeypatch):
    """Try few pairs of options: none of these differences is one."""
    monkeypatch.setattr("replayer.crosscheck.options.SEARCH_S", 0.2)


def check(folder, *, model=None):
    return crosscheck(read_rows(open_record(folder), None), ["float64"], model)


@pytest.mark.parametrize("plant", SAMPLE, ids=lambda plant: plant.name.replace(" ", "-"))
def test_a_planted_difference_is_named(plant, tmp_path):
    report = check(plant.write(tmp_path / "record", seed=7))
    document = report.to_dict()
    assert (document["verdict"], document["first_stage"]) == ("differs", plant.stage)
    found = report.first[1].changes
    assert [change.option for change in found[:1]] == ([] if plant.option is None else [plant.option])
    assert document["option"].startswith("unknown") == (plant.option is None)


@pytest.mark.parametrize("num_seeds", [2, pytest.param(8, marks=pytest.mark.long)])
def test_equal_steps_are_not_accused(tmp_path, num_seeds):
    for seed in range(num_seeds):
        report = check(steps.equal_step(seed, tmp_path / str(seed)))
        stages = {stage.stage: stage.verdict for stage in report.opinions[0].stages}
        assert (seed, report.verdict, report.to_dict()["option"]) == (seed, "equal", None)
        assert [stages[name] for name in ("rewards", "mask", "advantages", "loss")] == ["equal"] * 4


def test_the_rows_that_differ_come_first(tmp_path):
    rows = steps.make_rows(3, (4,) * 3)
    wrong = [row for row in rows if row.truncated]
    how = steps.How(after=lambda advantage, row: advantage + 0.01 * (row in wrong))
    folder = steps.write_step(tmp_path / "record", rows, how, "trl", steps.TRL)
    document = check(folder).to_dict()
    assert (document["first_stage"], document["num_rows"]) == ("advantages", len(wrong))
    assert [row["row"] for row in document["rows"]] == [rows.index(row) for row in wrong]
    first = document["rows"][0]
    assert first["token"] == len(wrong[0].prompt)
    assert first["recorded"] - first["recomputed"] == pytest.approx(0.01, abs=1e-5)


NO_REFERENCE = "the record has no log-probs of the reference"
OTHER_ENTROPY = "the configuration has use_adaptive_entropy=True, which is not recomputed here"
OTHER_LOSS = ({"loss_type": ["apo_zero"]}, "the configuration has loss_type=['apo_zero'], which is not")


@pytest.mark.parametrize(
    ("changed", "reason"), [({}, NO_REFERENCE), OTHER_LOSS, ({"use_adaptive_entropy": True}, OTHER_ENTROPY)]
)
def test_what_is_unknown_is_not_checked(tmp_path, changed, reason):
    with Recorder(tmp_path / "record", config=steps.TRL | changed, trainer="trl") as recorder:
        sample = {"prompt_tokens": [1], "completion_tokens": [2, 3], "group": 0, "advantages": 0.5}
        recorder.step(0, [sample | {"reward": 1.0}, sample], stats={"loss": 1.0, "reward": 1.0})
    report = check(tmp_path / "record")
    assert report_of(report).sentence == (
        "mask of step 0, within the rounding of float32; not checked: rewards, kl, advantages, loss, gradient."
    )
    stages = {stage.stage: stage for stage in report.opinions[0].stages}
    assert stages["advantages"].reason == "1 of 2 rewards are unknown"
    assert stages["rewards"].reason == stages["advantages"].reason
    assert stages["loss"].reason.startswith(reason)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(
        tmp_path_factory.mktemp("crosscheck") / "model", hidden_size=16, num_layers=1, num_heads=2
    )


def write_trained(
    folder, model, reported, since=0, temperature=1.0, kl=0.0, clips=False, detached=False, shards=1
):
    """Record a step with the gradient norm, of rows from one on, of Transformers in float32; ratios are 1.

    With `kl`, that is a weight in the gradient of a loss that is logged without it, or `detached`.
    """
    from transformers import AutoModelForCausalLM

    rows = steps.make_rows(5, (3, 3), tools=False)
    given = steps.advantages(rows, steps.How())
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total, count = torch.zeros(()), sum(len(row.tokens) for row in rows)
    for number, (row, advantage) in enumerate(zip(rows, given, strict=True)):
        tokens = torch.tensor([row.prompt + row.tokens])
        logits = network(tokens).logits[0, :-1] / temperature
        own = logits.log_softmax(1).gather(1, tokens[0, 1:, None])[-len(row.tokens) :, 0]
        d = own - torch.tensor(row.ref)
        penalty = (0 if detached else kl) * ((-d).exp() + d - 1).sum() / count
        ratio = (own - own.detach()).exp() if number >= since else 1.0
        own = -(advantage * ratio).sum() / count
        total = total + own.detach()
        (own + penalty).backward()
        if clips and number in (1, 3):  # after the first two of three micro-batches
            torch.nn.utils.clip_grad_norm_(network.parameters(), 0.25)
    own = [p.grad[: -(-len(p) // shards)] for p in network.parameters()]
    norm = torch.stack([x.square().sum() for x in own]).sum().sqrt()
    config = steps.TRL | {"steps_per_generation": 3, "beta": kl, "max_grad_norm": 0.25}
    config |= {"temperature": temperature, "use_bias_correction_kl": False}
    samples = [
        {
            "prompt_tokens": row.prompt, "completion_tokens": row.tokens, "reward": row.reward,
            "group": row.group, "finish_reason": "stop", "advantages": advantage.tolist(), "ref_logprobs": row.ref,
        }
        for row, advantage in zip(rows, given, strict=True)
    ]  # fmt: skip
    name = "actor/pg_loss" if kl else "loss"
    with Recorder(folder, config=config, trainer="trl", model=model) as recorder:
        recorder.step(0, samples, stats={name: float(total.detach()), "grad_norm": reported(float(norm))})
    return folder


@pytest.mark.parametrize(
    ("reported", "how", "verdict", "option"),
    [
        (float, {}, "equal", []),
        (float, {"temperature": 0.5, "kl": 0.04}, "equal", []),
        (float, {"shards": 8}, "differs", ["shards"]),
        (lambda norm: min(norm, 0.25), {}, "differs", ["norm"]),
        (float, {"since": 4}, "differs", ["gradient_of"]),  # of the last of three micro-batches
        pytest.param(
            float, {"kl": 0.04, "detached": True}, "differs", ["kl_gradient"], marks=pytest.mark.long
        ),
        pytest.param(float, {"clips": True}, "differs", ["gradient_of"], marks=pytest.mark.long),
        pytest.param(lambda norm: 2 * norm, {}, "differs", ["gradient_scale"], marks=pytest.mark.long),
    ],
)
def test_a_gradient_norm_is_recomputed_from_the_model(model, tmp_path, reported, how, verdict, option):
    report = check(write_trained(tmp_path / "record", model, reported, **how))
    stages = {stage.stage: stage for stage in report.opinions[0].stages}
    assert (stages["loss"].verdict, stages["gradient"].verdict) == ("equal", verdict)
    assert [change.option for change in stages["gradient"].changes] == option


def test_a_straight_through_estimator_and_an_adaptive_weight_are_not_checked():
    actor, algorithm = {"actor": {"kl_loss_type": "k3+"}}, {"kl_ctrl": {"type": "adaptive"}}
    unchecked = configured("verl", {"actor_rollout_ref": actor, "algorithm": algorithm}).unchecked
    assert "kl_loss_type=k3+, which is not recomputed here" in unchecked["gradient"]
    assert "kl_ctrl.type=adaptive" in unchecked["advantages"]


SLIME, NEMO = steps.CONFIGS["slime"], steps.CONFIGS["nemo"]
OF_TOOLS = sum(sum(row.counts) for row in steps.make_rows(5)) / sum(len(r.counts) for r in steps.make_rows(5))


def write_silent(
    folder,
    trainer="slime",
    *,
    whiten=None,
    teacher=0.5,
    scale=1.0,
    kl=1,
    kl_mask="counts",
    kl_by_row=False,
    mask="counts",
    parts=1,
    least=None,
    by_sample=1,
    kl_reward=None,
    clip=torch.maximum,
    dual=None,
    over_all=False,
    peers=False,
    change=lambda samples: samples,
):
    """Write a step as slime or NeMo-RL compute it, but for what is given.

    With `least`, some rows do not count, and add that to the divisor; `over_all`, their tokens. With
    `dual`, losses of all advantages are bounded by it. With `by_sample`, groups are
    rows in succession, the first samples of so many prompts before their second ones. With `kl_reward`, REINFORCE++
    sums the KL of these tokens into the returns.
    """
    rows = steps.make_rows(5)
    for row in rows[::5] if least is not None else ():
        row.counts = [0] * len(row.tokens)
    k = by_sample
    group = {"group": lambda at, row: (row.group // k * 4 * k + at % 4 * k + row.group % k) // 4}
    how = steps.How(spread=lambda own, every: own.std() + 1e-6, **group)
    given = steps.advantages(rows, how)
    is_slime, config = trainer == "slime", dict(SLIME if trainer == "slime" else NEMO)
    if dual:
        config["loss_fn"] = config["loss_fn"] | {"ratio_clip_c": dual}
    if peers:  # the mean and deviation of the other rows, which do not divide where they are equal
        config["grpo"] = config["grpo"] | {"use_leave_one_out_baseline": True}
        others = [torch.tensor([o.reward for o in rows if o.group == r.group and o is not r]) for r in rows]
        gains = [(r.reward - own.mean()) / (own.std() + 1e-6) for r, own in zip(rows, others, strict=True)]
        given = [gain * torch.tensor(r.counts) for gain, r in zip(gains, rows, strict=True)]
    teachers = [[x - 0.1 * (at % 3) for at, x in enumerate(row.old)] for row in rows]
    if is_slime:
        pairs = zip(given, rows, teachers, strict=True)
        given = [
            a[:1].expand(len(r.tokens)) - teacher * (torch.tensor(r.old) - torch.tensor(t))
            for a, r, t in pairs
        ]
    if kl_reward:
        config |= {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.1, "use_opd": False}
        given = [returns_of(row, kl_reward) for row in rows]
    if whiten is not None:
        config["normalize_advantages"] = True
        held = [
            torch.tensor(
                [whiten(len(r.prompt) + at, len(r.prompt) + len(r.tokens)) for at in range(len(r.tokens))]
            )
            for r in rows
        ]
        counts = [torch.tensor(r.counts).bool() for r in rows]
        given = [a.clone().float() for a in given]
        for rank in torch.cat(held).unique():
            own = torch.cat([a[(h == rank) & c] for a, h, c in zip(given, held, counts, strict=True)])
            for a, h in zip(given, held, strict=True):
                a[h == rank] = (a[h == rank] - own.mean()) * (own.var() + 1e-8).rsqrt()
    losses = []
    for row, advantage in zip(rows, given, strict=True):
        every = {"counts": torch.tensor(row.counts).float(), "whole": torch.ones(len(row.tokens))}
        one = advantage[:1].expand(len(row.tokens)) if mask == "whole" else advantage
        ratio = (torch.tensor(row.new) - torch.tensor(row.old)).exp()
        loss = clip(-one * ratio, -one * ratio.clamp(0.8, 1.2))
        loss = (loss if dual is None else torch.minimum(loss, -one * dual)) * every[mask]
        size = every["whole" if over_all and not any(row.counts) else "counts"].sum()
        d = kl * (torch.tensor(row.new) - torch.tensor(row.ref))
        share = sum(sum(r.counts) for r in rows) / 24 / sum(row.counts) if kl_by_row else 1.0
        losses.append((loss + 0.04 * share * ((-d).exp() + d - 1) * every[kl_mask], size))
    if is_slime:
        total = torch.stack([loss.sum() / count.clamp(min=1) for loss, count in losses]).mean()
    else:
        size = len(losses) // parts
        each = [losses[at : at + size] for at in range(0, 24, size)]
        means = [sum(x.sum() for x, _ in of) / sum(n.clamp(min=least or 0) for _, n in of) for of in each]
        total = torch.stack(means).mean()
    samples = [
        {
            "prompt_tokens": row.prompt, "completion_tokens": row.tokens, "loss_mask": row.counts, "reward": row.reward,
            "group": row.group, "finish_reason": "stop", "logprobs": row.rollout, "old_logprobs": row.old,
            "ref_logprobs": row.ref, "teacher_logprobs": t, "advantages": a.tolist(), "learning": {"current_logp": row.new},
        }
        for row, a, t in zip(rows, given, teachers, strict=True)
    ]  # fmt: skip
    with Recorder(folder, config=config, trainer=trainer) as recorder:
        recorder.step(0, change(samples), stats={"train/loss": float(total) * scale})
    return folder


def filled(samples):
    return [*samples, *(s | {"loss_mask": [0] * len(s["loss_mask"])} for s in samples[:5])]


def exchanged(name):
    def change(samples):
        order = sorted(samples, key=lambda s: len(s["completion_tokens"]))
        found = []
        for own, other in zip(order, [*order[1:], order[0]], strict=True):
            size, of = len(own["loss_mask"]), other["learning"]["current_logp"]
            largest = max(other["advantages"], key=abs)
            values = {"old_logprobs": (of * 4)[:size], "advantages": [largest] * size}
            found.append(own | {name: [x * m for x, m in zip(values[name], own["loss_mask"], strict=True)]})
        return found

    return change


def returns_of(row, of):
    """Sum what follows each token: the KL of counted or all ("whole") tokens, and the reward at the end."""
    counts = torch.tensor(row.counts).float()
    d = torch.tensor(row.old) - torch.tensor(row.ref)
    rewards = -0.1 * ((-d).exp() + d - 1) * (counts if of == "counts" else 1)
    rewards[counts.nonzero()[-1]] += row.reward
    return rewards.flip(0).cumsum(0).flip(0) * counts


@pytest.mark.parametrize(
    ("trainer", "options", "stage", "option", "says"),
    [
        ("slime", {}, None, None, ""),
        ("nemo-rl", {}, None, None, ""),
        ("slime", {"whiten": lambda at, size: 0}, None, None, ""),
        ("slime", {"whiten": lambda at, size: min(at // -(-size // 4), 3 - at // -(-size // 4))}, "advantages", "token_sets",
         "each context-parallel rank, in zigzag"),
        ("slime", {"teacher": 0.0}, "advantages", "teacher_coef", "the teacher's term, for distillation is 0"),
        ("slime", {"teacher": -0.5}, "advantages", "teacher_coef", "is -0.5, slime's arguments say 0.5"),
        ("slime", {"scale": 0.25}, "loss", "loss_scale", "divided by 4 (n_samples_per_prompt or the number of micro-batches)"),
        ("slime", {"scale": 24 / 38}, "loss", "divisor", "divides the loss is 38, slime's arguments say 24"),
        ("nemo-rl", {"change": filled}, None, None, ""),
        ("nemo-rl", {"change": exchanged("old_logprobs")}, "loss", None, "those of other rows"),
        ("nemo-rl", {"change": exchanged("advantages")}, "advantages", None, "rows have the values of other rows"),
        ("nemo-rl", {"change": lambda samples: [s | {"logprobs": s["learning"]["current_logp"]} for s in samples]},
         "loss", None, "those of other weights than the update starts from"),
        ("nemo-rl", {"parts": 4}, "loss", "aggregation", "token-mean of each micro-batch"),
        ("slime", {"kl_reward": "counts"}, None, None, ""),
        ("slime", {"kl_reward": "whole"}, "kl", "kl_reward_mask", "everything after the prompt"),
        ("nemo-rl", {"by_sample": 6}, "advantages", "grouping", "of all first samples, then all second ones"),
        ("nemo-rl", {"by_sample": 2}, "advantages", "grouping", "of the first samples of 2 prompts, then"),
        ("nemo-rl", {"least": 0}, None, None, ""),
        ("nemo-rl", {"peers": True}, None, None, ""),
        ("nemo-rl", {"clip": torch.minimum}, "loss", "clipped", "is the smaller loss"),
        ("nemo-rl", {"dual": 3.0}, "loss", "dual_clip_of", "all advantages"),
        ("nemo-rl", {"least": 0, "over_all": True}, "loss", "aggregation", "truncated ones in the divisor"),
        ("nemo-rl", {"least": 1}, "loss", "aggregation", "one for each row without a token"),
        ("slime", {"kl": -1}, "loss", "kl_estimator", "k3 of the exchanged arguments"),
        ("slime", {"kl_mask": "whole"}, "loss", "kl_mask", "everything after the prompt"),
        ("nemo-rl", {"mask": "whole"}, "loss", "policy_mask", "everything after the prompt"),
        ("nemo-rl", {"kl_by_row": True}, "loss", "kl_aggregation", "is seq-mean-token-mean, NeMo-RL's config says"),
        ("nemo-rl", {"scale": OF_TOOLS}, "loss", "divisor", "the number of tokens after the prompts"),
    ],
)  # fmt: skip
def test_steps_of_slime_and_nemo_rl_are_explained(tmp_path, trainer, options, stage, option, says):
    document = (report := check(write_silent(tmp_path / "record", trainer, **options))).to_dict()
    assert (document["verdict"], document["first_stage"]) == ("differs" if stage else "equal", stage)
    if option:
        assert report.first[1].changes[0].option == option
    assert says in (document["option"] or "")


@pytest.mark.parametrize(
    ("config", "stats", "changed"),
    [
        ({"entropy_coef": 0.05, "use_kl_loss": False}, {"train/entropy_loss": 2.0, "train/loss": -0.2}, None),
        ({"entropy_coef": 0.05, "use_kl_loss": False}, {"train/entropy_loss": 2.0, "train/loss": 0.0}, ("entropy_coef", -0.05)),
        ({"kl_loss_coef": 0.2}, {"train/kl_loss": 0.5, "train/loss": -0.2}, ("kl_coef", -0.2)),
        ({"kl_loss_coef": 0.2}, {"train/kl_loss": 0.5, "train/loss": 7.0}, None),  # of no weight: not theirs
    ],
)  # fmt: skip
def test_the_logged_parts_of_a_loss_have_its_weights(tmp_path, config, stats, changed):
    with Recorder(
        tmp_path / "record", config=SLIME | {"use_opd": False} | config, trainer="slime"
    ) as recorder:
        sample = {"prompt_tokens": [1], "completion_tokens": [2, 3], "group": 0, "reward": 1.0}
        recorder.step(0, [sample, sample], stats={"train/pg_loss": -0.1} | stats)
    stages = {stage.stage: stage for stage in check(tmp_path / "record").opinions[0].stages}
    found = [(change.option, pytest.approx(change.recorded)) for change in stages["loss"].changes]
    assert found == ([changed] if changed else [])


def gae(rewards, values, mask, steps, how, ended=True):
    """Compute advantages of one row by a plain loop over the tokens of `steps`, with lambda 0.9."""
    found, at = [0.0] * len(values), [t for t, is_step in enumerate(steps) if is_step]
    late, goes_on = how == "late" and ended, how == "all" or (how == "bootstrap" and not ended)
    following, ahead = rewards if late else 0.0, values[at[-1]] if goes_on else 0.0
    ahead = values[at[-1] + 1] if how == "beyond" else ahead
    for t in reversed(at):
        reward = rewards if t == at[-1] and not late else 0.0
        following = 0.0 if how == "turns" and t + 1 not in at else following
        following = reward + ahead - values[t] + 0.9 * following
        found[t], ahead = following * mask[t], values[t]
    return found


@pytest.mark.parametrize(
    ("trainer", "how", "option"),
    [
        ("verl", "", None), ("verl", "tools", "gae_tokens"), ("verl", "turns", "gae_tokens"), ("verl", "late", "reward_place"),
        ("verl", "bootstrap", "bootstrap"), ("verl", "all", "bootstrap"), ("verl", "beyond", "bootstrap"),
        ("verl", "after", "values_at"), ("verl", "summed", "value_scale"), ("miles", "tools", "gae_tokens"), ("slime", "tools", None),
    ],
)  # fmt: skip
def test_advantages_by_gae_are_explained(tmp_path, trainer, how, option):
    rng, samples = np.random.default_rng(3), []
    for number in range(8):
        mask, values = [1, 1, 0, 0, 1, int(how != "beyond")], rng.normal(size=6).round(3).tolist()
        reason = "length" if number % 3 == 2 else "stop"
        steps = [1] * 6 if how == "tools" else mask
        taken = [*values[1:], 0.0] if how == "after" else values
        own = gae(number % 4 / 2, taken, mask, steps, how, reason == "stop")
        sample = {"prompt_tokens": [1, 2], "completion_tokens": [5, 6, 7, 8, 9, 4], "group": number // 4}
        sample |= {"reward": number % 4 / 2, "loss_mask": mask, "finish_reason": reason}
        returns = [a + v for a, v in zip(own, values, strict=True)]
        samples.append(sample | {"values": values, "returns": returns, "advantages": own})
    apart = [a for s in samples for a, m in zip(s["advantages"], s["loss_mask"], strict=True) if m]
    value_loss = sum(a * a for a in apart) / len(apart) / 2 * (3 if how == "summed" else 1)
    every = torch.tensor(apart)
    for sample in samples:
        pairs = zip(sample["advantages"], sample["loss_mask"], strict=True)
        sample["advantages"] = [
            float((a - every.mean()) * (every.var() + 1e-8).rsqrt()) * m for a, m in pairs
        ]
    config = {"actor_rollout_ref": {"actor": {}}, "algorithm": {"adv_estimator": "gae", "lam": 0.9}}
    config |= {"advantage_estimator": "ppo", "lambd": 0.9, "normalize_advantages": True}
    with Recorder(tmp_path / "record", config=config, trainer=trainer) as recorder:
        recorder.step(0, samples, stats={"critic/vf_loss": value_loss})
    (opinion,) = check(tmp_path / "record").opinions
    wrong = [one for one in opinion.stages if one.verdict == "differs"]
    assert [change.option for one in wrong for change in one.changes] == ([option] if option else [])
    assert {"advantages", "values"} <= {one.stage for one in opinion.stages}


def write_rewarded(
    folder, trainer, config, rewards, advantages=None, stats=None, prompts=([1, 2],) * 6, cut=(), empty=()
):
    """Record six samples of two groups, of 2 to 7 tokens, by their rewards, some `cut` or `empty`, and check the step."""
    with Recorder(folder, config=config, trainer=trainer) as recorder:
        samples = [
            {"prompt_tokens": prompts[at], "completion_tokens": [10 + at, *[7] * (at + 1)], "reward": reward, "group": at // 3,
             "finish_reason": "length" if at in cut else "stop"}
            for at, reward in enumerate(rewards)
        ]  # fmt: skip
        for at in empty:
            samples[at]["loss_mask"] = [0] * (at + 2)
        for sample, advantage in zip(samples, advantages or [], strict=advantages is not None):
            sample["advantages"] = advantage
        recorder.step(0, samples, stats=stats)
    return check(folder)


REWARDS = [1.0, 2.0, 4.0, 0.0, 0.5, 3.0]


def advantage_of(kind, own, at):
    """Compute the advantage of one sample of a group."""
    if kind == "others":
        return own[at] - (own.sum() - own[at]) / (len(own) - 1)
    return (own[at] - own.mean()) / (own.std(correction=1) if kind == "deviation" else 1.0)


@pytest.mark.parametrize(
    ("kind", "trainer"), [(k, t) for k in ("mean", "deviation", "others") for t in steps.CONFIGS[k]]
)
def test_configurations_of_other_trainers_are_read(tmp_path, kind, trainer):
    own = torch.tensor(REWARDS).reshape(2, 3)
    right = [float(advantage_of(kind, own[at // 3], at % 3)) for at in range(6)]
    eps = {"trl": 1e-4, "ms-swift": 1e-4, "openrlhf": 1e-9, "oat": 1e-8}.get(trainer, 1e-6)
    if kind == "deviation":
        right = [a / (1 + eps / float(own[at // 3].std())) for at, a in enumerate(right)]
    wrong = [a * float(own[at // 3].std()) for at, a in enumerate(right)] if kind == "deviation" else REWARDS
    for name, given in (("right", right), ("wrong", wrong)):
        report = write_rewarded(tmp_path / name, trainer, steps.CONFIGS[kind][trainer], REWARDS, given)
        stage = next(one for one in report.opinions[0].stages if one.stage == "advantages")
        assert (name, stage.verdict) == (name, "equal" if given is right else "differs")


@pytest.mark.parametrize(
    ("kept", "value", "option"),
    [([0, 1, 2], 4.0, None), ([1, 2], None, "zero, and left out"), ([0, 1, 2], 0.0, "zero before")],
)
def test_truncated_rewards_are_zero_after_their_normalisation(tmp_path, kept, value, option):
    rewards = [4.0, 2.0, 1.0] * 2
    among = torch.tensor([value if at == 0 else rewards[at] for at in kept])
    given = [float(rewards[at] - among.mean()) for at in range(3)]
    given = [0.0 if option != "zero before" else float(-among.mean()), *given[1:]] * 2
    config = steps.CONFIGS["mean"]["areal"]
    config = config | {"actor": config["actor"] | {"mask_no_eos_with_zero": True}}
    first = write_rewarded(tmp_path / "record", "areal", config, rewards, given, cut=(0, 3)).first
    assert (first is None) == (option is None)
    assert first is None or f"truncated completions is {option}" in first[1].option


@pytest.mark.parametrize(
    ("option", "among", "empty"), [(None, 2, ()), ("normalised", 3, ()), (None, 2, (2, 5)), (None, 3, (2, 5))]
)
def test_rows_without_a_reward_or_a_token_are_left_out_of_the_mean(tmp_path, option, among, empty):
    given = [1.0 - 3.0 / among, 2.0 - 3.0 / among, 0.0] * 2
    rewards, config = [1.0, 2.0, 0.0 if empty else None] * 2, steps.CONFIGS["mean"]["skyrl"]
    first = write_rewarded(tmp_path / "record", "skyrl", config, rewards, given, empty=empty).first
    assert (first and first[1].changes[0].option) == option


@pytest.mark.parametrize(
    ("trainer", "option", "value", "config"), [row.values() for row in steps.CONFIGS["read"]]
)
def test_what_depends_on_other_options_is_read(trainer, option, value, config):
    assert getattr(configured(trainer, config).options, option) == value


OTHER = {"cliprange_value": 0.2}, "TRL's PPOConfig"
OF_STAGE = {"stage": "rm"}, "LLaMA-Factory's configuration of another stage"


@pytest.mark.parametrize(("trainer", "config", "kind"), [("trl", *OTHER), ("llamafactory", *OF_STAGE)])
def test_other_configurations_of_trainers_are_refused(tmp_path, trainer, config, kind):
    with pytest.raises(ValueError, match=f"is {kind}, which is not read here"):
        write_rewarded(tmp_path / "record", trainer, config, REWARDS)


def test_advantages_that_are_normalised_twice_are_named(tmp_path):
    own = torch.tensor(REWARDS).reshape(2, 3)
    once = ((own - own.mean(1, keepdim=True)) / own.std(1, keepdim=True)).flatten()
    given = ((once - once.mean()) / once.std()).tolist()
    first = write_rewarded(
        tmp_path / "record", "oat", steps.CONFIGS["deviation"]["oat"], REWARDS, given
    ).first
    assert [(change.option, change.recorded) for change in first[1].changes] == [("again", "batch")]


OVERLONG = {"enable": True, "len": 4, "penalty_factor": 1.0}


@pytest.mark.parametrize(
    ("trainer", "changed", "rewards", "stats", "option"),
    [
        ("verl", {"reward_model": {"overlong_buffer": OVERLONG}}, [1, 0, 1, 0, 0.5, -0.75], {}, None),
        ("verl", {"reward_model": {"overlong_buffer": OVERLONG}}, [1, 0, 1, 0, 1, 0], {}, "overlong_paid"),
        ("trl", {}, REWARDS, {"reward": 1.75, "rewards/a/mean": 1.5, "rewards/b/mean": 2.0}, None),
        ("trl", {}, REWARDS, {"reward": 3.5, "rewards/a/mean": 1.5, "rewards/b/mean": 2.0}, "reward_terms"),
    ],
)
def test_logged_and_overlong_rewards_are_explained(tmp_path, trainer, changed, rewards, stats, option):
    config = steps.CONFIGS["deviation"]["rllm"] | {"data": {"max_response_length": 8}} | changed
    first = write_rewarded(tmp_path / "record", trainer, config, rewards, stats=stats).first
    assert (first and first[1].changes[0].option) == option


@pytest.mark.parametrize(("is_stepwise", "each"), [(True, False), (True, True), (False, False)])
def test_the_baseline_of_turns_is_over_trajectories(tmp_path, is_stepwise, each):
    """The second row of each group is a later turn of the first one; the third is alone."""
    config = steps.CONFIGS["mean"]["skyrl"]
    config = config | {"generator": {"step_wise_trajectories": is_stepwise}}
    prompts = [[1, 2], [1, 2, 10, 7, 3], [1, 2], [1, 3], [1, 3, 13, 7, 7, 7, 7, 3], [1, 3]]
    means = [4 / 3, 5 / 3] if each else [1.5, 2.0]
    rewards = [1.0, 1.0, 2.0, 1.0, 1.0, 3.0]
    given = [reward - means[at // 3] for at, reward in enumerate(rewards)]
    first = write_rewarded(tmp_path / "record", "skyrl", config, rewards, given, prompts=prompts).first
    assert (first and first[1].changes[0].option) == ("baseline" if each else None)


def write_supervised(folder, config, loss, pairs):
    """Write a step of rows of data: `loss` computes it from sums of log-probs, in pairs, or from lists."""
    rng, samples = np.random.default_rng(5), []
    for number in range(8):
        new = (-rng.exponential(1.0, 2 + number % 5)).round(3).tolist()
        sample = {"prompt_tokens": [1], "completion_tokens": [2] * len(new)}
        sample["learning"] = {"current_logp": new}
        ref = {"ref_logprobs": [x - 0.1 * number for x in new]} if pairs else {}
        samples.append(sample | ref | {"group": number // 2})
    own = [torch.tensor(sample["learning"]["current_logp"]) for sample in samples]
    if pairs:
        own = [new - torch.tensor(s["ref_logprobs"]) for new, s in zip(own, samples, strict=True)]
    with Recorder(folder, config=config, trainer=config.get("trainer", "trl")) as recorder:
        recorder.step(0, samples, stats={"loss": float(loss(own))})
    return folder


def dpo(reduce, sign=1.0, of=lambda edge: softplus(-edge)):
    def loss(rows):
        scores = torch.stack([reduce(row) for row in rows])
        return of(0.1 * sign * (scores[::2] - scores[1::2])).mean()

    return loss


def orpo(rows):
    means = torch.stack([row.mean() for row in rows])
    odds = means - torch.log1p(-means.exp())
    return (softplus(odds[1::2] - odds[::2]) * 0.1 - means[::2]).mean()


DPO, SFT = {"loss_type": ["sigmoid"], "beta": 0.1}, {"loss_type": "nll", "gradient_accumulation_steps": 4}
LF = {"trainer": "llama-factory", "stage": "dpo"}
TUNE = {
    "trainer": "torchtune",
    "loss": {"_component_": "torch.nn.CrossEntropyLoss"},
    "gradient_accumulation_steps": 4,
}


@pytest.mark.parametrize(
    ("config", "loss", "option"),
    [
        (DPO, dpo(torch.sum), None),
        (DPO, dpo(torch.mean), "pair_scores"),
        (DPO, dpo(lambda row: row[1:].sum()), "policy_mask"),
        (DPO, dpo(torch.sum, -1.0), "beta"),
        (DPO, dpo(torch.sum, of=lambda edge: 0.9 * softplus(-edge) + 0.1 * softplus(edge)), "label_smoothing"),
        (DPO | {"loss_type": ["hinge"]}, dpo(torch.sum, of=lambda edge: torch.relu(1 - edge)), None),
        (DPO | {"loss_type": ["ipo"]}, dpo(torch.mean, of=lambda edge: (10 * edge - 5) ** 2), None),
        (DPO, dpo(lambda row: row.sum() / 29), "pair_scores"),  # by the tokens of all answers
        (LF, dpo(torch.sum, of=lambda edge: 4 * softplus(-edge)), "loss_scale"),
        (LF | {"pref_loss": "simpo", "simpo_gamma": 0.3}, dpo(torch.mean, of=lambda edge: softplus(0.3 - edge)), None),
        (LF | {"pref_loss": "simpo"}, dpo(torch.mean), "pair_target"),
        (LF | {"pref_loss": "orpo"}, orpo, None),
        (TUNE, lambda rows: -torch.stack([torch.cat(rows[n : n + 2]).mean() for n in (0, 2, 4, 6)]).mean(), "aggregation"),
        (SFT, lambda rows: -sum(row.sum() * len(row) for row in rows) / 6 / 29, "aggregation"),  # by length, of 6
        (SFT, lambda rows: -torch.cat(rows).mean(), None),
        (SFT, lambda rows: -sum(torch.cat(rows[n : n + 2]).mean() for n in (0, 2, 4, 6)), "aggregation"),
        (SFT, lambda rows: -torch.stack([torch.cat(rows[n : n + 2]).mean() for n in (0, 2, 4, 6)]).mean(), "aggregation"),
    ],
)  # fmt: skip
def test_losses_of_pairs_and_of_data_are_recomputed(tmp_path, config, loss, option):
    pairs = "beta" in config or (config.get("stage") == "dpo" and "pref_loss" not in config)
    report = check(write_supervised(tmp_path / "record", config, loss, pairs))
    stage = next(stage for stage in report.opinions[0].stages if stage.stage == "loss")
    expected = "differs" if option else "equal", [option] * bool(option)
    assert (stage.verdict, [c.option for c in stage.changes]) == expected


def test_a_factor_between_two_layouts_is_named(tmp_path):
    folders = [write_silent(tmp_path / str(scale), "nemo-rl", scale=scale) for scale in (0.25, 1.0)]
    rows = [read_rows(open_record(folder), None) for folder in folders]
    whole = NEMO | {"policy": {"train_global_batch_size": 24, "train_micro_batch_size": 24}}
    rows[1] = replace(rows[1], origin=replace(rows[1].origin, config=whole))
    found = compare_layouts(*rows)
    assert (found.verdict, found.differences[0].what) == ("differs", "the loss of a step")
    assert found.differences[0].named == "divided by the micro-batches"
    same = compare_layouts(rows[1], rows[1])
    assert (same.verdict, same.sentence[:33]) == ("not checked", "both records have the same layout")
    apart = replace(rows[1], origin=replace(rows[1].origin, config=whole | {"max_tokens_per_mb": 64}))
    equal = compare_layouts(rows[1], apart)
    assert (equal.verdict, equal.sentence[:23]) == ("equal", "equal in both layouts: ")
    with pytest.raises(ValueError, match="have other rows"):
        compare_layouts(rows[0], read_rows(open_record(steps.equal_step(1, tmp_path / "other")), None))


def test_a_step_of_our_own_trainer_is_equal(recorded, areal_debug):
    done = areal_debug("crosscheck", recorded, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert (document["verdict"], document["first_stage"], document["option"]) == ("equal", None, None)
    stages = {stage["stage"]: stage["verdict"] for stage in document["opinions"][0]["stages"]}
    assert [stages[name] for name in ("mask", "advantages", "loss", "gradient")] == ["equal"] * 4


@pytest.mark.long
def test_the_code_of_trl_and_verl_agrees_with_the_twin():
    script = ROOT / "tests/trainers/install_trainers.sh"
    command = [installed(script, "verl"), "-m", "benchmarks.crosscheck", "--frameworks"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["plants"]["stage"] >= 0.95 * found["plants"]["of"]
    assert (found["equal"]["accused"], found["equal"]["of"]) == (0, 100)
    assert all(of["largest"] < 1e-9 and of["compared"] >= 40 for of in found["code"].values())
