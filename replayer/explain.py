"""Per-sample contribution to a step: each sample's share of the loss and of the gradient.

The gradient of a minibatch is the sum of its samples' gradients, G = g1 + g2 + ... So `<gi, G> /
|G|^2` are shares that sum to 1: a sample with 0.6 contributes more than half of the step, one with
-0.1 opposes it. `|gi| / |G|` is the size of its own gradient, independent of the others. It costs
one forward and backward pass per sample, at the same weights as in the step; the step itself is not
changed. There are no shares of a gradient that is 0 or not finite.

A sample without a gradient has a reason. So has one with a value that is not finite, for which no
update is taken even where that value does not reach the gradient: the first such value in the order
in which a step computes them. These samples come first.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from areal_core.data.batch import Batch
from areal_core.engine.determinism import rng_state, set_rng_state
from areal_core.engine.ranks import Ranks
from areal_core.telemetry.stats import Stats
from areal_core.trainer.nonfinite import COLUMNS, broken_tensors
from areal_core.trainer.objective import PolicyObjective
from areal_core.trainer.observed import Observer
from areal_core.trainer.rl import PPOTrainer
from recorder import Record, open_record
from replayer.anatomy import Part, Remark, dissect, dot, remarks_of
from replayer.gradients import (
    OTHER,
    RowSignal,
    normalises_groups,
    rewards_of_groups,
    row_signals,
    why_no_signal,
)
from replayer.preconditions import nearest_anchor, step_range
from replayer.request import Request, Summation
from replayer.run import replay_and_compare

# Statistic of a sample's tokens, 1 if all are concerned -> why they have no gradient.
TOKEN_REASONS = {
    "rs_filtered_fraction": "every token is rejected (actor.rejection_sampling)",
    "m2_filtered_fraction": "every token is outside of the trust region (actor.m2_threshold)",
    "clip_ratio/avg": "every token is clipped (actor.eps_clip)",
    "dual_clip_ratio/avg": "every token is clipped (actor.c_clip)",
}
CURRENT = "current_logp"  # log-probs by the weights of the step
IN_ORDER = (*COLUMNS, CURRENT)


@dataclass(frozen=True)
class SampleShare:
    """One sample's contribution to an optimizer step.

    Attributes:
        rank, row: position in the record. loss: share of the minibatch's loss (the sum over all
            samples).
        loss_share: |loss| over the sum of |loss| of the minibatch. gradient_share: `<gi, G> /
            |G|^2`; NaN if |G| is 0 or not finite.
        gradient_norm: |gi| before clipping, in units of |G|; absolute if |G| is 0 or not finite.
        why: the reason of a gradient that is 0, or the first value that is not finite, else "".
        stage: how early in a step that value is computed, from 0; None if all are finite.
    """

    rank: int
    row: int
    minibatch: int
    prompt_id: int
    sample_id: int
    num_trained_tokens: int
    reward: float
    advantage: float
    loss: float
    loss_share: float
    gradient_share: float
    gradient_norm: float
    why: str = ""
    stage: int | None = None


@dataclass
class StepExplanation:
    """All samples of a step, largest gradient first.

    `faithful`: every step before it had the recorded bits. `grad_norms` and `learning_rates` are of
    each minibatch, norms before clipping; the update of `broken_by` broke the weights. With an
    anatomy, `parts` are the terms, classes of token and turns of each minibatch, `remarks` what is
    wrong with them, and `absent` the terms that cannot act.
    """

    record: str
    step: int
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    broken_by: int | None = None
    samples: list[SampleShare] = field(default_factory=list)
    faithful: bool = True
    parts: list[Part] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self)


def explain(
    folder: str,
    step: int,
    model: str | None = None,
    config: str | None = None,
    anatomy: bool = False,
    virtual: Summation = "",
) -> StepExplanation:
    """Replay up to a step and compute the contribution of each of its samples; a collective.

    With `anatomy`, also that of each loss term, class of token and turn. `virtual` as in Request.
    """
    record = open_record(folder)
    step_range(record, step, step)
    of_ranks: list[StepExplanation] = []  # of each virtual rank of this process: all have the same

    def make_explainer(record: Record, trainer: PPOTrainer, request: Request) -> Observer:
        of_ranks.append(StepExplanation(folder, step))
        return Explainer(trainer, of_ranks[-1], anatomy)

    request = Request(folder, nearest_anchor(record, step) or 0, step, model, config=config, virtual=virtual)
    is_faithful = replay_and_compare(request, [make_explainer]).identical
    found = of_ranks[0]
    found.faithful = is_faithful
    found.samples.sort(key=largest_first)
    found.broken_by = broken_update(found.samples)
    reasons = {sample.why for sample in found.samples}
    found.remarks = remarks_of(found.parts, reasons.pop() if len(reasons) == 1 else "")
    return found


def largest_first(sample: SampleShare) -> tuple[bool, float]:
    """Order samples by gradient, after those with a value that is not finite, by its stage."""
    return sample.stage is None, -sample.gradient_norm if sample.stage is None else sample.stage


def broken_update(samples: Sequence[SampleShare]) -> int | None:
    """Return the minibatch after which no sample is finite, though inputs and all before it are."""
    first = min((sample.minibatch for sample in samples if sample.stage is not None), default=0)
    later = [sample.stage for sample in samples if sample.minibatch >= first]
    # one sample alone may have broken its own minibatch
    is_broken = len(later) > 1 and all(stage is not None and stage >= len(COLUMNS) for stage in later)
    return first - 1 if first and is_broken else None


class Explainer:
    """An observer that computes the shares of a minibatch when its gradients are summed."""

    def __init__(self, trainer: PPOTrainer, found: StepExplanation, anatomy: bool = False) -> None:
        self.trainer, self.found, self.anatomy = trainer, found, anatomy
        self.objective = objective_on(trainer.ranks, trainer)
        self.by_group = False  # the mean of a group is subtracted
        self.signals: list[RowSignal] = []  # of this rank's rows

    def __call__(self, event: str, **facts: Any) -> None:
        """Handle an event (ARCHITECTURE.md)."""
        if event == "start":
            self.by_group = normalises_groups(facts["config"]["actor"])
        elif event == "advantages" and facts["step"] == self.found.step:
            self.signals = row_signals(facts["inputs"])
        elif event == "gradients" and facts["step"] == self.found.step:
            random_numbers = rng_state()
            self.explain_minibatch(facts)
            set_rng_state(random_numbers)
        elif event == "optimizer" and facts["step"] == self.found.step:
            self.found.learning_rates.append(facts["lr"])

    def explain_minibatch(self, facts: Mapping[str, Any]) -> None:
        """Compute the shares of each sample of all ranks; a collective.

        One sample at a time: its rank runs it while the others run an empty micro-batch, because
        gradients are summed over ranks.
        """
        ranks = self.trainer.ranks
        parameters = [p for p in self.trainer.actor.model.parameters() if p.grad is not None]
        full = [p.grad for p in parameters]
        norm = float(ranks.sum_parts(dot(full, full)).sqrt())
        has_shares = 0 < norm < math.inf
        if self.anatomy:
            self.found.parts += dissect(self.trainer, self.objective, facts, full, norm)
            config = self.trainer.actor.model.config.get_text_config()
            coefficient = getattr(config, "router_aux_loss_coef", 0)
            of_router = f"MoE aux: the model's config has router_aux_loss_coef={coefficient}"
            terms = {  # losses that are set, and cannot act on this gradient
                f"{of_router}, and the objective has no such term": bool(coefficient),
                "value: it trains the critic, a separate model, and has no part in this gradient": (
                    self.trainer.critic is not None
                ),
            }
            self.found.absent = [term for term, is_set in terms.items() if is_set]
            self.objective.stats.export()  # a collective; the samples count from 0
        shares: list[SampleShare] = []
        groups = rewards_of_groups(row for rows in ranks.gather_leaders(self.signals) for row in rows)
        for owner, count in enumerate(ranks.gather_leaders(len(facts["rows"]))):
            for position in range(count):
                is_mine = owner == ranks.data_parallel_rank
                loss, logprobs = self.run_sample(facts, position if is_mine else None)
                own = [p.grad for p in parameters]
                along, length = (float(ranks.sum_parts(dot(own, other))) for other in (full, own))
                # collectives, whoever owns the sample
                stats = self.objective.stats.export()
                broken = None if math.isfinite(length) else broken_tensors(self.trainer.actor, gradients=True)
                if is_mine:
                    of_gradient = along / norm**2 if has_shares else math.nan
                    own_norm = length**0.5 / (norm if has_shares else 1.0)
                    measured = {"loss": loss, "gradient_share": of_gradient, "gradient_norm": own_norm}
                    share = self.share(facts, position, measured)
                    stage, why = why_nonfinite(facts["batch"], position, logprobs, loss, broken)
                    if stage is not None:
                        share = replace(share, why=why, stage=stage)
                    elif length == 0:
                        signal = self.signals[share.row]
                        no_signal = why_no_signal(signal, groups[signal.prompt_id], self.by_group)
                        of_tokens = [why for name, why in TOKEN_REASONS.items() if stats.get(name) == 1.0]
                        share = replace(share, why=no_signal or next(iter(of_tokens), OTHER))
                    shares.append(share)
        for parameter, gradient in zip(parameters, full, strict=True):
            parameter.grad = gradient
        everyone = [share for of_rank in ranks.gather_leaders(shares) for share in of_rank]
        total = sum(abs(share.loss) for share in everyone) or 1.0
        self.found.grad_norms.append(norm)
        self.found.samples += [replace(share, loss_share=abs(share.loss) / total) for share in everyone]

    def run_sample(self, facts: Mapping[str, Any], position: int | None) -> tuple[float, Tensor]:
        """Run forward and backward of one row, or of none.

        Returns its share of the loss, and its log-probs by the current weights, [tokens].
        """
        chosen = [] if position is None else [position]
        engine = self.trainer.actor
        loss, weigh = self.objective.loss, self.objective.denominator
        seen: dict[str, Any] = {}
        (result,) = engine.gradients(
            [(facts["batch"], chosen)],
            loss,
            weigh,
            facts["total_weight"],
            lambda event, **of_loss: seen.update(of_loss),
        )
        return float(result.loss) / float(facts["total_weight"]), seen["logprobs"].detach().cpu()

    def share(self, facts: Mapping[str, Any], position: int, measured: dict[str, Any]) -> SampleShare:
        """Build the share of a sample of this rank; `loss_share` is filled in later."""
        batch: Batch = facts["batch"]
        trained = batch["loss_mask"][position].bool()
        advantages = batch["advantages"][position][trained]
        return SampleShare(
            rank=self.trainer.ranks.data_parallel_rank,
            row=facts["rows"][position],
            minibatch=facts["minibatch"],
            prompt_id=int(batch["prompt_id"][position]),
            sample_id=int(batch["sample_id"][position]),
            num_trained_tokens=int(trained.sum()),
            reward=float(batch["rewards"][position]),
            advantage=float(advantages.mean()) if len(advantages) else 0.0,
            loss_share=0.0,
            **measured,
        )


def objective_on(ranks: Ranks, trainer: PPOTrainer) -> PolicyObjective:
    """Return the objective with the sums of some ranks.

    It has statistics of its own: what is computed again must not count twice in those of the step.
    """
    stats = Stats(ranks.is_group_leader, ranks.gather_objects)
    return replace(trainer.objective, stats=stats, sum_over_ranks=ranks.sum)


def why_nonfinite(
    batch: Batch, position: int, logprobs: Tensor, loss: float, broken: str | None
) -> tuple[int | None, str]:
    """Return how early the first value of a sample is that is not finite, and which it is.

    None if all are finite.

    Args:
        batch: next-token aligned minibatch.
        logprobs: of the sample by the current weights, [tokens].
        broken: parameters whose gradient is not finite, if there are any.
    """
    mask = batch["loss_mask"][position].bool()
    columns = {name: batch[name][position] for name in COLUMNS if name in batch}
    columns[CURRENT] = torch.zeros(mask.shape).masked_scatter(batch["attention_mask"][position], logprobs)
    for name, column in columns.items():
        values = column[mask] if column.dim() else column[None]
        bad = (~values.isfinite()).nonzero()[:, 0].tolist()
        if bad:
            what = COLUMNS.get(name, "log-prob of the current weights")
            # position t is about token t + 1
            token = f" of token {int(mask.nonzero()[bad[0], 0]) + 1}" if column.dim() else ""
            count = f" ({len(bad)} of {len(values)})" if len(bad) > 1 else ""
            return IN_ORDER.index(name), f"{what}{token} is {float(values[bad[0]])}{count}"
    if not math.isfinite(loss):
        return len(IN_ORDER), f"the loss is {loss}, of finite log-probs and advantages"
    if broken is not None:
        return len(IN_ORDER) + 1, f"the gradient of {broken} is not finite, though the loss is"
    return None, ""
