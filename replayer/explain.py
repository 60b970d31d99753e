"""Per-sample contribution to a step: each sample's share of the loss and of the gradient.

The gradient of a minibatch is the sum of its samples' gradients, G = g1 + g2 + ... So `<gi, G> /
|G|^2` are shares that sum to 1: a sample with 0.6 contributes more than half of the step, one with
-0.1 opposes it. `|gi| / |G|` is the size of its own gradient, independent of the others. It costs
one forward and backward pass per sample, at the same weights as in the step; the step itself is not
changed. There are no shares of a gradient that is 0, as where all rewards of a group are equal, or
not finite; the samples whose own gradient is not finite then come first.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from areal_core.batch import Batch
from areal_core.engine.determinism import rng_state, set_rng_state
from areal_core.telemetry import Stats
from areal_core.trainer.rl import Observer, PPOTrainer
from recorder import Record, open_record
from replayer.preconditions import nearest_anchor, step_range
from replayer.request import Request
from replayer.run import replay_and_compare


@dataclass(frozen=True)
class SampleShare:
    """One sample's contribution to an optimizer step.

    Attributes:
        rank, row: position in the record. loss: share of the minibatch's loss (the sum over all
            samples).
        loss_share: |loss| over the sum of |loss| of the minibatch. gradient_share: `<gi, G> /
            |G|^2`; NaN if |G| is 0 or not finite.
        gradient_norm: |gi| before clipping, in units of |G|; absolute if |G| is 0 or not finite.
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


@dataclass
class StepExplanation:
    """All samples of a step, largest gradient first.

    `faithful`: every step before it had the recorded bits. `grad_norms` are those of the
    minibatches, before clipping.
    """

    record: str
    step: int
    grad_norms: list[float] = field(default_factory=list)
    samples: list[SampleShare] = field(default_factory=list)
    faithful: bool = True

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return asdict(self)


def explain(folder: str, step: int, model: str | None = None, config: str | None = None) -> StepExplanation:
    """Replay up to a step and compute the contribution of each of its samples; a collective."""
    record = open_record(folder)
    step_range(record, step, step)
    anchor = nearest_anchor(record, step)
    found = StepExplanation(folder, step)

    def make_explainer(record: Record, trainer: PPOTrainer, request: Request) -> Observer:
        return Explainer(trainer, found)

    request = Request(folder, anchor or 0, step, model, config=config)
    report = replay_and_compare(request, [make_explainer])
    found.faithful = report.identical
    found.samples.sort(key=largest_first)
    return found


def largest_first(sample: SampleShare) -> tuple[bool, float]:
    """Order samples by their gradient, those that are not finite first."""
    return math.isfinite(sample.gradient_norm), -sample.gradient_norm


class Explainer:
    """An observer that computes the shares of a minibatch when its gradients are summed."""

    def __init__(self, trainer: PPOTrainer, found: StepExplanation) -> None:
        self.trainer, self.found = trainer, found
        # Separate statistics: a sample that is run again must not count twice in those of the step.
        self.objective = replace(trainer.objective, stats=Stats())

    def __call__(self, event: str, **facts: Any) -> None:
        """Handle an event (ARCHITECTURE.md)."""
        if event == "gradients" and facts["step"] == self.found.step:
            random_numbers = rng_state()
            self.explain_minibatch(facts)
            set_rng_state(random_numbers)

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
        shares: list[SampleShare] = []
        for owner, count in enumerate(ranks.gather_leaders(len(facts["rows"]))):
            for position in range(count):
                for parameter in parameters:
                    parameter.grad = None
                loss = self.run_sample(facts, position if owner == ranks.data_parallel_rank else None)
                own = [p.grad for p in parameters]
                along, length = (float(ranks.sum_parts(dot(own, other))) for other in (full, own))
                if owner == ranks.data_parallel_rank:
                    of_gradient = along / norm**2 if has_shares else math.nan
                    own_norm = length**0.5 / (norm if has_shares else 1.0)
                    shares.append(self.share(facts, position, loss, of_gradient, own_norm))
        for parameter, gradient in zip(parameters, full, strict=True):
            parameter.grad = gradient
        everyone = [share for of_rank in ranks.gather_leaders(shares) for share in of_rank]
        total = sum(abs(share.loss) for share in everyone) or 1.0
        self.found.grad_norms.append(norm)
        self.found.samples += [replace(share, loss_share=abs(share.loss) / total) for share in everyone]

    def run_sample(self, facts: Mapping[str, Any], position: int | None) -> float:
        """Run forward and backward of one row, or of none; return its share of the loss."""
        chosen = [] if position is None else [position]
        engine = self.trainer.actor
        loss, weigh = self.objective.loss, self.objective.denominator
        result = engine.backward(facts["batch"], chosen, loss, weigh, facts["total_weight"])
        return float(result.loss) / float(facts["total_weight"])

    def share(
        self,
        facts: Mapping[str, Any],
        position: int,
        loss: float,
        gradient_share: float,
        gradient_norm: float,
    ) -> SampleShare:
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
            loss=loss,
            loss_share=0.0,
            gradient_share=gradient_share,
            gradient_norm=gradient_norm,
        )


def dot(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> Tensor:
    """Compute the inner product of this rank's shards of two gradients, float64 []."""
    pairs = [
        (local(a), local(b)) for a, b in zip(left, right, strict=True) if a is not None and b is not None
    ]
    return torch.stack([(a.double() * b.double()).sum().cpu() for a, b in pairs]).sum()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard; empty if it is a replica of another rank's."""
    if not isinstance(tensor, DTensor):
        return tensor
    places = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    is_copy = any(coordinate > 0 and placed.is_replicate() for coordinate, placed in places)
    return tensor.to_local()[:0] if is_copy else tensor.to_local()
