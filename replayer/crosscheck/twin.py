"""A second computation of a step in float64, written from the formulas, with rounding bounds.

    rewards [N] ──> mask [N, T] ──> KL in the reward ──> advantages [N, T] ──> loss of an update

Each function returns `Bounded`: the exact value, and how far a computation in float32 may be from
it, from the standard model of rounding (Higham, Accuracy and Stability of Numerical Algorithms,
2002, sec. 2.2 and 4.2): an operation has relative error `UNIT`, a sum of n terms at most
`sum_error(n)`. Nothing of `areal_core` is imported: the twin is an independent witness.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replayer.crosscheck.options import CISPO, COUNTED, EXCHANGED, OF_RANKS, OF_TRAJECTORIES, Options
from replayer.crosscheck.step_rows import Bools, Floats, StepRows, Update

UNIT = 2.0**-24  # relative rounding error of float32
SMALLEST = 2.0**-149
V = TypeVar("V", Floats, Tensor)
TRUNCATED = 1  # finish reason
ZERO = ("zero", "zero, and left out of the normalisation")  # rewards of truncated rows
MOST_REWARDS = 4  # kinds of rewards, so that one with a penalty is none of them by chance
NORMALISATION = ("mean", "std", "leave_one_out", "unbiased", "eps", "inside_root")  # also of tokens


@dataclass(frozen=True)
class Bounded:
    """A value in float64, and the largest error of a float32 computation of it."""

    value: Floats
    error: Floats

    def at(self, index: object) -> "Bounded":
        """Return some elements."""
        return Bounded(self.value[index], self.error[index])  # type: ignore[call-overload]


def exactly(values: object) -> Bounded:
    """Return values without an error."""
    exact = np.asarray(values, np.float64)
    return Bounded(exact, np.zeros(exact.shape))


def sum_error(count: "npt.ArrayLike") -> Floats:
    """Relative error of a float32 sum of `count` terms, to the sum of their absolute values.

    Sequential up to 64 terms; longer sums are added in blocks or trees by every library.
    """
    count = np.maximum(np.asarray(count, np.float64), 1)
    return UNIT * np.minimum(count, 64 + 2 * np.ceil(np.log2(count)))


def mask_of(rows: StepRows, options: Options) -> Bools:
    """Return the tokens that count, [N, T]."""
    mask, variant = rows.mask, options.mask
    positions, none = np.arange(mask.shape[1]), np.zeros_like(mask[:, :1])
    if variant.startswith("shifted"):
        parts = (none, mask[:, :-1]) if variant.endswith("+1") else (mask[:, 1:], none)
        return np.concatenate(parts, axis=1)
    if variant == "without truncated rows":
        return mask & (rows.finish_reason != TRUNCATED)[:, None]
    if variant.endswith("the last token"):
        return mask & (positions != (mask.shape[1] - 1 - mask[:, ::-1].argmax(1))[:, None])
    if variant.endswith("the first token"):
        return mask & (positions != mask.argmax(1)[:, None])
    if variant in ("all tokens", "everything after the prompt"):
        begun = np.maximum.accumulate(mask, axis=1) | (variant == "all tokens")
        return np.asarray(begun & (positions < (rows.lengths - 1)[:, None]))
    return mask


def named_mask(rows: StepRows, options: Options, name: str) -> Bools:
    return mask_of(rows, options if name == COUNTED else replace(options, mask=name))


def rewards_of(rows: StepRows, options: Options) -> Bounded:
    """Return shaped rewards, [N]."""
    rewards = np.nan_to_num(rows.rewards)
    if options.overlong is not None:
        longest, zone, factor = options.overlong
        over = rows.mask.sum(1) - (longest - zone)
        rewards = rewards - np.clip(over, 0, None) / zone * factor
    rewards = (rewards + options.reward_bias) * options.reward_scaling
    rewards = np.clip(rewards, -options.reward_clip, options.reward_clip)
    if options.truncated == "zero before they are normalised":
        rewards = np.where(rows.finish_reason == TRUNCATED, 0.0, rewards)
    return Bounded(rewards, 4 * UNIT * (np.abs(rewards) + abs(options.reward_bias * options.reward_scaling)))


def estimate(log_ratio: V, estimator: str) -> V:
    """Estimate a KL per token from log pi - log pi_ref (J. Schulman, 2020)."""
    if estimator.endswith(EXCHANGED):
        return estimate(-log_ratio, estimator.removesuffix(EXCHANGED))
    library: Any = torch if isinstance(log_ratio, Tensor) else np
    formulas: dict[str, Callable[[Any], Any]] = {
        "k1": lambda d: d,
        "abs": abs,
        "k2": lambda d: d**2 / 2,
        "k3": lambda d: library.expm1(-d) + d,
    }
    found: V = formulas[estimator](log_ratio)
    return found


def old_logprobs(rows: StepRows, options: Options) -> Floats | None:
    """Return the log-probs of the policy before the step, [N, T]; None if the record has none."""
    return rows.tensors.get({"rollout": "logprobs", "trainer": "prox_logp"}.get(options.old_logprobs, ""))


def kl_rewards(rows: StepRows, options: Options) -> Bounded:
    """Return the KL's share of the reward of each token, [N, T]."""
    reference = rows.tensors.get("ref_logp")
    if options.kl_reward_coef == 0.0 or reference is None:
        return exactly(np.zeros(rows.mask.shape))
    old = None if options.correction is not None else old_logprobs(rows, options)
    before = rows.tensors["logprobs"] if old is None else old
    mask = named_mask(rows, options, options.kl_reward_mask)
    apart = np.where(mask, np.nan_to_num(before - reference), 0.0)
    kl = np.where(mask, np.clip(estimate(apart, options.kl_reward_estimator), -10.0, 10.0), 0.0)
    ulp = UNIT * (1 + np.abs(apart))
    return Bounded(-options.kl_reward_coef * kl, options.kl_reward_coef * (6 * ulp + 4 * UNIT * np.abs(kl)))


def groups_of(rows: StepRows, options: Options) -> npt.NDArray[np.int64]:
    """Number the sets of rows whose rewards are compared, [N]."""
    groups = rows.groups
    size = int(np.bincount(groups).max())
    if options.grouping.startswith("consecutive rows"):
        if "sample" not in options.grouping:
            return np.arange(len(groups)) // size
        of = [int(word) for word in options.grouping.split() if word.isdigit()] or [len(groups)]
        return np.lexsort((groups, rows.place[:, 3], groups // of[0])).argsort() // size
    if options.grouping == "every n-th row":
        return np.arange(len(groups)) % -(-len(groups) // size)
    return groups


def normalized(
    given: Bounded, sets: dict[str | None, npt.NDArray[np.int64]], options: Options, mean_share: float = 1.0
) -> Bounded:
    """Subtract a mean, or a share of it, and divide by a standard deviation, [N].

    `sets`: number of each value's set by level. A set without spread has the advantage 0.
    """
    value, error, eps = given.value, given.error, options.eps
    mean_level, std_level = options.mean, options.std
    if mean_level is not None:
        mean, count = moments(value, sets[mean_level])
        size = np.maximum(largest(np.abs(value), sets[mean_level]), SMALLEST)
        error = error + largest(error, sets[mean_level]) + (sum_error(count) + 2 * UNIT) * size
        divisor = count if options.group_size == Options.group_size else np.full_like(count, count.max())
        if options.leave_one_out:
            divisor = np.maximum(divisor - 1, 1)
            mean, error = (mean * count - value) / divisor, error * np.maximum(count / divisor, 1)
        else:
            mean = mean * (count / divisor) * mean_share
        value, alone = value - mean, count <= 1
        value = np.where(alone, 0.0 if options.lone == "zero" else given.value, value)
    else:
        alone = np.zeros(len(value), bool)
    if std_level is None:
        return Bounded(value, error)
    mean, count = moments(given.value, sets[std_level])
    variance, _ = moments((given.value - mean * mean_share) ** 2, sets[std_level])
    left_out = options.std_of == "the other rows"
    if left_out:
        count = np.maximum(count - 1, 1)
        variance = np.maximum(variance - (given.value - mean) ** 2 / count, 0.0) * (count + 1) / count
    flat = variance <= (4 * UNIT * largest(np.abs(given.value), sets[std_level])) ** 2
    if options.unbiased:
        variance = variance * count / np.maximum(count - 1, 1)
    spread = np.sqrt(variance + eps) if options.inside_root else np.sqrt(variance) + eps
    # of the standard deviation: its sum, and the error of the mean, which enters squared
    size = largest(np.abs(given.value), sets[std_level])
    of_mean = largest(given.error, sets[std_level]) + sum_error(count) * size
    safe = np.where(flat, 1.0, np.sqrt(variance))
    relative = (
        3 * UNIT + sum_error(count) / 2 + (of_mean / safe) ** 2 + largest(given.error, sets[std_level]) / safe
    )
    if left_out:  # a difference of the mean square and the squared mean
        relative = relative + 2 * sum_error(count + 1) * (size / safe) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        result = np.where(flat, value * left_out, value / spread)
        divisor = np.where(flat, 1.0 if left_out else max(eps, SMALLEST), spread)
        bound = error / divisor + np.abs(result) * relative
    if options.lone == "reward":
        result, bound = np.where(alone, value / (1.0 + eps), result), np.where(alone, error, bound)
    # without spread, float32 divides rounding errors of the mean by eps; our trainer returns 0
    return Bounded(result, bound)


def moments(values: Floats, sets: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return (mean, number of values) of each value's set, [N]."""
    counts: Floats = np.bincount(sets).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.bincount(sets, values) / counts
    return means[sets], counts[sets]


def largest(values: Floats, sets: npt.NDArray[np.int64]) -> Floats:
    """Return the largest value of each row's set, [N]."""
    found = np.full(int(sets.max(initial=0)) + 1, -np.inf)
    np.maximum.at(found, sets, values)
    return found[sets]


def row_rewards(rows: StepRows, options: Options) -> Bounded:
    """Return the shaped rewards, normalised over rows, [N]."""
    groups, zero = groups_of(rows, options), (rows.finish_reason == TRUNCATED) & (options.truncated in ZERO)
    left_out = rows.fills | (zero & (options.truncated != ZERO[0]))
    left_out |= options.normalised.startswith("rows") & ~rows.mask.any(1)
    left_out |= (not options.normalised.endswith("as 0")) & np.isnan(rows.rewards)
    apart = left_out.astype(np.int64)
    sets: dict[str | None, Any] = {"group": groups + apart * (groups.max() + 1), "batch": apart}
    of_turns = rows.trajectories if options.baseline == OF_TRAJECTORIES else np.arange(len(groups))
    ends, place = np.unique(of_turns, return_inverse=True)
    sets = {level: of[ends] for level, of in sets.items()}
    found = normalized(rewards_of(rows, options).at(ends), sets, options)
    if options.again is not None:
        found = normalized(found, sets, replace(options, mean=options.again, std=options.again))
    found = found.at(place.reshape(-1))
    return replace(found, value=np.where(zero, 0.0, found.value))


def advantages_of(rows: StepRows, options: Options) -> Bounded:
    """Return the advantages, [N, T], 0 outside of the tokens that count."""
    mask, kl = mask_of(rows, options), kl_rewards(rows, options)
    if "kl_rewards" in rows.tensors and options.kl_place == "advantages":
        kl = exactly(rows.tensors["kl_rewards"])
    reward, penalty = row_rewards(rows, options), kl
    if options.kl_place != "advantages":  # in the row's reward
        reward = row_rewards(replace(rows, rewards=rows.rewards + kl.value.sum(1)), options)
        grown = (np.abs(reward.value) + 1) / max(options.eps, 1e-3) if options.std else 2.0
        more = kl.error.sum(1) + sum_error(kl.value.shape[1]) * np.abs(kl.value).sum(1)
        reward = Bounded(reward.value, reward.error + more.max(initial=0.0) * grown)
        penalty = exactly(np.zeros(kl.value.shape))
    values = rows.tensors.get("values")
    if values is not None and options.values_at != Options.values_at:
        values = np.roll(values, 1 if options.values_at.endswith("before") else -1, axis=1)
    is_one = options.discount == options.gae_lambda == 1.0 and not options.gae_tokens.startswith("each")
    if values is None and is_one and not penalty.value.any():
        found = reward.at((slice(None), None))
    else:
        steps = named_mask(rows, options, options.gae_tokens)
        found = gae(reward, penalty, values, steps, rows.finish_reason == TRUNCATED, options)
    advantages = Bounded(*(np.where(mask, of, 0.0) for of in (found.value, found.error)))
    if options.length == "divided":
        count = np.maximum(mask.sum(1), 1)[:, None]
        advantages = Bounded(advantages.value / count, advantages.error / count)
    teacher, old = rows.tensors.get("teacher_logp"), old_logprobs(rows, options)
    if options.teacher_coef and teacher is not None and old is not None:
        term = options.teacher_coef * np.where(mask, old - teacher, 0.0)
        error = advantages.error + 4 * UNIT * (np.abs(advantages.value) + np.abs(term))
        advantages = Bounded(advantages.value - term, error)
    if options.token_mean is None and options.token_std is None:
        return advantages
    sets = np.broadcast_to(groups_of(rows, options)[:, None], mask.shape)[mask]
    of_tokens = {name: getattr(options, f"token_{name}") for name in NORMALISATION}
    found = normalized(
        advantages.at(mask),
        {"group": sets, "batch": token_sets(rows, options)[mask]},
        replace(options, **of_tokens, lone="zero", std_of="all rows", group_size=Options.group_size),
        mean_share(rows, mask, options),
    )
    value, error = np.zeros(mask.shape), np.zeros(mask.shape)
    value[mask], error[mask] = found.value, found.error
    return Bounded(value, error)


def mean_share(rows: StepRows, mask: Bools, options: Options) -> float:
    """Return the share of tokens among the positions that the mean over tokens divides by."""
    if options.token_mean_of == Options.token_mean_of:
        return 1.0
    of_completions = options.token_mean_of.endswith("completion")
    width = (rows.lengths - 1 - mask.argmax(1)).max() if of_completions else rows.lengths.max()
    return float(mask.sum() / (len(mask) * width))


def token_sets(rows: StepRows, options: Options) -> npt.NDArray[np.int64]:
    """Number the sets of tokens that are normalised together, [N, T].

    Context-parallel ranks hold each row in as many blocks, or in zigzag: of twice as many chunks,
    the first rank has the first and the last one. Some divide tokens, others the inputs of each.
    """
    how, size = options.token_sets, options.context_parallel
    shape = rows.mask.shape
    if how == "the tokens of each rank":
        return np.broadcast_to(rows.place[:, :1], shape).astype(np.int64)
    if how == "all tokens" or size == 1:
        return np.zeros(shape, np.int64)
    num_chunks = size * (2 if how.endswith(OF_RANKS[0]) else 1)
    chunk = -(-rows.lengths // num_chunks)[:, None]
    number = (np.arange(shape[1])[None] + ("inputs" not in how)) // np.maximum(chunk, 1)
    return np.minimum(number, num_chunks - 1 - number) if num_chunks > size else np.minimum(number, size - 1)


def gae(
    reward: Bounded, penalty: Bounded, values: Floats | None, mask: Bools, truncated: Bools, options: Options
) -> Bounded:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) over the tokens of a mask.

    The row's reward is on its last token, or a step later, where the value is 0. Prompt and tool
    tokens are not steps of the policy.
    """
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
    late = ~truncated & (options.reward_place != Options.reward_place)
    at_last = mask & (np.arange(mask.shape[1]) == last[:, None]) & ~late[:, None]
    rewards = penalty.value + np.where(at_last, reward.value[:, None], 0.0)
    errors = penalty.error + np.where(at_last, reward.error[:, None], 0.0)
    beyond = np.zeros(len(mask)) if values is None else np.nan_to_num(values[np.arange(len(last)), last + 1])
    values = np.zeros(mask.shape) if values is None else np.where(mask, values, 0.0)
    value, error = np.zeros(mask.shape), np.zeros(mask.shape)
    following, wrong = (np.where(late, of, 0.0) for of in (reward.value, reward.error))
    restarts = options.gae_tokens.startswith("each")
    goes_on = (truncated | options.bootstrap.startswith("all")) & (options.bootstrap != Options.bootstrap)
    is_beyond = options.bootstrap.endswith("after the last token")
    ahead = np.where(goes_on, beyond if is_beyond else values[np.arange(len(last)), last], 0.0)
    for t in range(mask.shape[1] - 1, -1, -1):
        here = mask[:, t]
        delta = rewards[:, t] + options.discount * ahead - values[:, t]
        found = delta + options.discount * options.gae_lambda * following
        size = np.abs(rewards[:, t]) + np.abs(ahead) + np.abs(values[:, t]) + np.abs(following)
        following = np.where(here, found, 0.0 if restarts else following + rewards[:, t])
        wrong = np.where(here, errors[:, t] + wrong + 4 * UNIT * size, wrong)
        ahead = np.where(here, values[:, t], ahead)
        value[:, t], error[:, t] = np.where(here, following, 0.0), np.where(here, wrong, 0.0)
    return Bounded(value, error)


PER_TOKEN = 12 * UNIT  # operations of a token's loss: subtract, exp, clamp, two products, weight, KL


@dataclass(frozen=True)
class LossInputs:
    """What the loss of an update needs, of its n rows: matrices [n, T] in float64.

    Attributes:
        current: log-probs of the weights that the update starts from; `noise`: how far those of
            the recorded run may be from them.
        ranks: number of each row's rank, [n].
        policy_mask: the tokens whose policy loss is added up, kl_mask those whose KL is.
        size: tokens of all completions, those of rows that do not count included.
        pairs: the rows of each chosen and rejected answer, [pairs, 2].
    """

    mask: Tensor
    advantages: Tensor
    error: Tensor
    current: Tensor
    noise: float
    old: Tensor | None
    rollout: Tensor
    proximal: Tensor | None
    reference: Tensor | None
    ranks: Tensor
    policy_mask: Tensor
    kl_mask: Tensor
    entropy: Tensor | None
    size: int
    pairs: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """The loss, its rounding bound, and its gradient by `current` [n, T]."""

    value: float
    error: float
    gradient: Tensor


def loss_inputs(
    rows: StepRows, options: Options, update: Update, advantages: Bounded, current: Floats
) -> LossInputs:
    """Select the rows of an update. Values outside of the tokens that count become 0."""
    mask, policy_mask, kl_mask = (
        named_mask(rows, options, name)[update.rows]
        for name in (COUNTED, options.policy_mask, options.kl_mask)
    )
    counted, sizes = mask | policy_mask | kl_mask, rows.mask.sum(1)
    sizes = np.where((sizes == 0) & (rows.prompts >= 0), rows.lengths - np.maximum(rows.prompts, 1), sizes)

    def given(matrix: Floats | None) -> Any:
        if matrix is not None:
            return torch.from_numpy(np.where(counted, np.nan_to_num(matrix[update.rows]), 0.0))
        return None

    return LossInputs(
        mask=torch.from_numpy(mask),
        advantages=given(advantages.value),
        error=given(advantages.error),
        current=given(current),
        noise=rows.noise,
        old=given(old_logprobs(rows, options)),
        rollout=given(rows.tensors["logprobs"]),
        # Where the model computed `current`, it is of the weights before the step.
        proximal=given(rows.tensors.get("prox_logp", current if rows.noise else None)),
        reference=given(rows.tensors.get("ref_logp")),
        ranks=torch.from_numpy(rows.place[update.rows, 0]),
        policy_mask=torch.from_numpy(policy_mask),
        kl_mask=torch.from_numpy(kl_mask),
        entropy=given(rows.tensors.get("entropy")),
        size=int(sizes[update.rows].sum()),
        pairs=None
        if options.objective != "preference"
        else torch.from_numpy(pairs_of(rows.place[update.rows])),
    )


def pairs_of(place: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the rows of each group of two, by number of the sample."""
    order = np.lexsort((place[:, 3], place[:, 2]))
    groups = place[order, 2]
    if len(order) % 2 or (groups[::2] != groups[1::2]).any() or (groups[2::2] == groups[1:-1:2]).any():
        raise ValueError("the rows are no pairs of a chosen and a rejected answer")
    return order.reshape(-1, 2)


def preference_loss(given: LossInputs, options: Options) -> Loss:
    """Compute the loss of DPO (arXiv 2305.18290, eq. 7), IPO, a hinge, SimPO or ORPO, a mean over pairs."""
    assert given.pairs is not None
    mask, current = given.policy_mask, given.current.clone().requires_grad_(True)
    reference = torch.zeros_like(given.current) if given.reference is None else given.reference
    sizes = {
        "the mean over tokens": mask.sum(1).clamp(min=1),
        "the sum divided by the longest answer": mask.sum(1).max(),
        "the sum divided by the tokens of all answers": mask.sum(),
        "the sum divided by the longest row": torch.tensor(mask.shape[1] + 1),
    }
    divisor = sizes.get(options.pair_scores, torch.tensor(1.0))
    own, other = ((torch.where(mask, of, 0.0).sum(1) / divisor)[given.pairs] for of in (current, reference))
    compared = {"nothing": 0 * other, "the reference on the other answer": other.flip(1)}
    scores = own - compared.get(options.pair_reference, other)
    margin = (scores[:, 0] - scores[:, 1]) * (1 if options.pair_order == Options.pair_order else -1)
    edge, smooth = options.beta * margin - options.pair_target, options.label_smoothing
    softplus = torch.nn.functional.softplus
    if options.pair_loss == "ipo":
        losses = (margin - (0.5 / options.beta if options.beta else inf)) ** 2
    elif options.pair_loss == "hinge":
        losses = torch.relu(1 - edge)
    elif options.pair_loss == "orpo":  # arXiv 2403.07691, eq. 6 and 7
        odds = scores - torch.log1p(-scores.exp().clamp(max=1 - UNIT))
        losses = options.beta * softplus(odds[:, 1] - odds[:, 0])
    else:
        losses = softplus(-edge) * (1 - smooth) + softplus(edge) * smooth
    if options.pair_nll:
        means = torch.where(mask, current, 0.0).sum(1) / mask.sum(1).clamp(min=1)
        losses = losses - options.pair_nll * means[given.pairs[:, 0]]
    total = losses.mean() * options.loss_scale
    (gradient,) = torch.autograd.grad(total, current)
    size = (torch.where(mask, given.current.abs() + reference.abs(), 0.0) * gradient.abs()).sum()
    error = size * (4 * UNIT + float(sum_error(mask.shape[1]))) + given.noise * gradient.abs().sum()
    value = float(total.detach())
    return Loss(value, float(error) + PER_TOKEN * abs(value), gradient)


def loss_of(given: LossInputs, options: Options) -> Loss:
    """Compute the clipped policy loss, its correction and its KL, aggregated."""
    if options.objective == "preference":
        return preference_loss(given, options)
    current = given.current.clone().requires_grad_(True)
    losses, weight, ratio = token_losses(replace(given, current=current), options)
    scale = scales(given, options) * options.loss_scale  # [n, T]
    if options.divisor is not None:
        scale = scale * ((divisor_of(given, options) or 1) / options.divisor)
    total = (losses * scale).sum()
    (gradient,) = torch.autograd.grad(total, current)
    losses, weight = losses.detach(), weight.detach()
    size = (losses.abs() * scale).sum()
    count = int(given.mask.sum())
    slope = ratio * weight * given.advantages.abs()  # of the loss with a log-prob, at most
    slope = slope * (1 + given.current.abs()) if options.clipped == CISPO else slope
    if options.kl_coef != 0.0 and given.reference is not None:
        apart = (given.current - given.reference).abs()
        slope = slope + abs(options.kl_coef) * 2 * (1 + apart + apart.exp())
    shaken = slope * (given.noise + 2 * UNIT * ratio.log().abs())
    error = (shaken + ratio * weight * given.error) * scale
    return Loss(
        value=float(total.detach()),
        error=float(error.sum() + size * (PER_TOKEN + 2 * float(sum_error(count)))),
        gradient=gradient,
    )


def token_losses(given: LossInputs, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Return (loss, weight for the sampling policy, ratio), each [n, T]."""
    mask, advantages = given.policy_mask, given.advantages
    if options.objective == "likelihood":
        ones = torch.ones_like(advantages)
        return torch.where(mask, -given.current, 0.0), ones, ones
    old = given.current.detach() if given.old is None else given.old
    log_ratio = torch.where(mask, given.current - old, 0.0)
    if options.ratio_level != "token":
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
        sizes = mask.sum(1, keepdim=True).clamp(min=1)
        if options.ratio_level != "sequence sum":
            log_ratio = log_ratio / (sizes if options.ratio_level == "sequence" else sizes.max())
    ratio = log_ratio.exp()
    high = options.clip_low if options.clip_high is None else options.clip_high
    both = torch.stack([-advantages * ratio, -advantages * ratio.clamp(1 - options.clip_low, 1 + high)])
    losses = {"the larger loss": both.amax(0), "the smaller loss": both.amin(0)}.get(options.clipped, both[1])
    if options.clipped == CISPO:  # arXiv 2506.13585, eq. 4
        losses = both[1].detach() * given.current
    elif options.dual_clip is not None:
        bounded = (advantages < 0) | (options.dual_clip_of != Options.dual_clip_of)
        losses = torch.where(bounded, torch.minimum(losses, -advantages * options.dual_clip), losses)
    weight = correction(given, options)
    weight = weight.detach() if options.correction_gradient.startswith("not") else weight
    losses = torch.where(given.policy_mask, losses * weight, 0.0)
    if options.kl_coef != 0.0 and given.reference is not None:
        of = {"trainer": given.proximal, "rollout": given.rollout}.get(options.kl_logprobs)
        kl = estimate((given.current if of is None else of) - given.reference, options.kl_estimator)
        kl = kl.detach() if options.kl_gradient.startswith("not") else kl
        kl = options.kl_coef * (kl * ratio if options.kl_weight == "ratio" else kl)
        if options.kl_aggregation != Options.kl_aggregation:
            of_kl = scales(given, replace(options, aggregation=options.kl_aggregation))
            kl = kl * of_kl / scales(given, options)
        losses = losses + torch.where(given.kl_mask, kl, 0.0)
    if options.entropy_coef != 0.0 and given.entropy is not None:
        losses = losses - options.entropy_coef * torch.where(mask, given.entropy, 0.0)
    return losses, weight, ratio.detach()


def correction(given: LossInputs, options: Options) -> Tensor:
    """Return the weight of each token for the policy that sampled it, [n, T]."""
    before = given.current if options.correction_of == "current" else given.proximal
    if options.correction is None or before is None:
        return torch.ones_like(given.advantages)
    log_weight = torch.where(given.mask, before - given.rollout, 0.0)
    if "sequences" in options.correction:
        sizes = given.mask.sum(1, keepdim=True).clamp(min=1) if "mean" in options.correction else 1
        log_weight = (log_weight.sum(1, keepdim=True) / sizes).expand_as(log_weight)
    weight, cap = log_weight.exp(), options.correction_cap
    if cap is None:
        return weight
    if options.correction.startswith("truncated"):
        return weight.clamp(max=cap)
    return torch.where(weight > cap, 0.0, weight)


def scales(given: LossInputs, options: Options) -> Tensor:
    """Return the factor of each token's loss in the aggregated loss, [n, T]."""
    mask, how = given.mask, options.aggregation
    ones = torch.ones(mask.shape, dtype=torch.float64)
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    num_rows = len(mask) if options.empty_rows == "counted" else max(int(mask.any(1).sum()), 1)
    if how.endswith("longest completion"):
        return scales(given, replace(options, aggregation=how.split(",")[0])) * lengths / lengths.max()
    if how.startswith(("token-mean of each", "sum of")):
        parts = given.ranks
        if "generation" in how:
            parts = micro_batch_of(parts, options.generation_batches)
        elif not how.endswith("rank"):
            parts = parts * options.micro_batches + micro_batch_of(parts, options.micro_batches)
        of_part = torch.stack([mask[parts == part].sum() for part in parts]).clamp(min=1)
        return ones / of_part[:, None] / (1 if how.startswith("sum of") else len(parts.unique()))
    if how.startswith("token-mean"):
        counted = mask & (correction(given, options) > 0) if how.endswith("keeps") else mask
        counts = counted.sum(1).clamp(min=int(how.startswith("token-mean with")))
        return ones / max(given.size if "over all" in how else int(counts.sum()), 1)
    of_rows = ones / num_rows
    sums = {"token-sum": ones, "seq-mean-token-mean": of_rows / lengths, "seq-mean-token-sum": of_rows}
    return sums.get(how, of_rows / options.max_length)


def value_loss_of(rows: StepRows, options: Options) -> Bounded:
    """Return half the mean squared error of the critic, [], of all rows; at the first step no value is clipped."""
    apart = np.nan_to_num(rows.tensors["values"] - rows.tensors["returns"])
    nothing = np.zeros(apart.shape)
    options = replace(options, policy_mask=options.value_mask, aggregation=options.value_aggregation)
    given = loss_inputs(rows, options, Update(np.arange(len(apart)), None, None), exactly(nothing), nothing)
    terms = (scales(given, options) * given.policy_mask).numpy() * apart**2 / 2 * options.value_scale
    error = terms.sum() * (PER_TOKEN + 2 * float(sum_error(apart.size))) * np.ones(())
    return Bounded(terms.sum() * np.ones(()), error)


def paid_rewards(rows: StepRows, options: Options) -> Floats | None:
    """Return the rewards of overlong rows with a penalty in them, [N], nan of others; None if they do not show one.

    The rewards that other rows have must be few, and those of overlong rows among them.
    """
    if options.overlong_paid is None:
        return None
    longest, zone, factor = options.overlong_paid
    penalty = np.clip(rows.lengths - rows.prompts - (longest - zone), 0, None) / zone * factor
    kinds, over = np.unique(rows.rewards[penalty == 0]), penalty > 0
    is_known = (rows.prompts > 0).all() and 0 < len(kinds) <= MOST_REWARDS
    is_shown = is_known and len(np.unique(penalty[over])) > 1 and np.isin(rows.rewards[over], kinds).all()
    return np.where(over, rows.rewards - penalty, np.nan) if is_shown else None


def divisor_of(given: LossInputs, options: Options) -> int | None:
    """Return the number that the sum of losses, or of means of rows, is divided by; None if there are several."""
    scale = scales(given, options)
    if options.aggregation == "seq-mean-token-sum-norm":
        return options.max_length
    if options.aggregation == "seq-mean-token-mean":
        scale = scale * given.mask.sum(1, keepdim=True).clamp(min=1)
    most, least = float(scale.max()), float(scale.min())
    return round(1 / most) if most - least <= UNIT * most else None


def micro_batch_of(ranks: Tensor, num_parts: int) -> Tensor:
    """Number each row's part of its rank's rows, such as the micro-batch, [n], of parts of equal size."""
    sizes = ranks.unique(return_counts=True)[1].tolist()
    return torch.cat([torch.arange(size) * num_parts // size for size in sizes])
