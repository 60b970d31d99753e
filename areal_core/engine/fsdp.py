"""The train engine: a sharded model that scores batches and learns from them.

It knows nothing of reinforcement learning: a loss is a function of logprobs, entropies and one packed micro-batch (of a reward model: of
scores and the micro-batch). The objective is
the sum of that loss over all tokens of all ranks, divided by the sum of their weights, so it does not depend on how rows were divided.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from areal_core.batch import Batch, pack, scatter_tokens, select_rows, sequence_lengths, split_rows
from areal_core.engine.checksums import parameter_checksums
from areal_core.engine.lora import Adapter, AdapterTensors, MergedTensors
from areal_core.engine.offload import leave_device, return_to_device, take_step
from areal_core.engine.optimizer import clip_gradients
from areal_core.engine.ranks import Ranks
from areal_core.engine.scores import is_score_model
from areal_core.engine.sequence_parallel import slice_tokens
from areal_core.engine.sharding import whole

# (logprobs [tokens], entropies [tokens], packed micro-batch) -> sum of the loss over its tokens;
# of a reward model: (scores [tokens], packed micro-batch)
LossFunction = Callable[..., Tensor]


def tell_nobody(event: str, **facts: object) -> None:
    """The observer of an engine that nobody watches."""


@dataclass(frozen=True)
class FullTensors:
    """The weights of a sharded model, whole, in a dtype. It may be iterated again, as a push does that lost a server."""

    model: PreTrainedModel
    dtype: torch.dtype
    device: torch.device

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, whole(parameter.detach().to(self.device)).to(self.dtype)


@dataclass(frozen=True)
class MicroBatchResult:
    """One micro-batch of this rank: its rows in the batch given, its loss summed over tokens, and its weight."""

    rows: list[int]
    num_tokens: int
    loss: float
    weight: float


@dataclass(frozen=True)
class TrainResult:
    """One optimizer step. `loss` and `total_weight` are over all ranks; the micro-batches are this rank's."""

    loss: float
    total_weight: float
    grad_norm: float
    lr: float
    update_successful: bool
    micro_batches: list[MicroBatchResult]


@dataclass
class FSDPEngine:
    """A sharded causal language model, or reward model, with, for training, its optimizer and schedule.

    Args:
        dtype: of compute and of the weights that `named_full_tensors` gives.
        temperature: logits are divided by it; it must be the one that sampled the tokens.
        max_tokens_per_mb: the most tokens of one micro-batch, None for no limit.
        min_micro_batches: the fewest micro-batches that a batch is divided into.
        packing: how rows are divided into micro-batches, one of `batch.PACKING`; their number is a multiple of `micro_batches_divisor`.
        granularity: so many neighbouring rows stay in one micro-batch; 2 for pairs. It divides the rows of every batch.
        adapter: what is trained in place of the model, which then stays as it is.
        step_groups: of `offload.take_step`; None where optimizer states stay on the device.
        sleeps: while the engine is idle, its memory on the device is given back.
    """

    model: PreTrainedModel
    ranks: Ranks
    dtype: torch.dtype
    temperature: float = 1.0
    max_tokens_per_mb: int | None = None
    min_micro_batches: int = 1
    packing: str = "ffd"
    micro_batches_divisor: int = 1
    granularity: int = 1
    optimizer: Optimizer | None = None
    schedule: LRScheduler | None = None
    gradient_clipping: float = 1.0
    adapter: Adapter | None = None
    step_groups: list[list[Parameter]] | None = None
    sleeps: bool = False
    is_asleep: bool = False

    def sleep(self) -> None:
        """Tell the engine that it is idle now; the next call that needs its weights wakes it."""
        if self.sleeps and not self.is_asleep:
            leave_device(self.model, self.optimizer)
            self.is_asleep = True

    def wake(self) -> None:
        """Bring back what has left the device."""
        if self.is_asleep:
            states_stay = self.step_groups is None
            return_to_device(self.model, self.optimizer, self.ranks.device, with_states=states_stay)
            self.is_asleep = False

    def divide(self, batch: Batch) -> list[list[int]]:
        """Rows of each micro-batch, as many micro-batches on every rank; a collective."""
        size = self.granularity
        lengths = sequence_lengths(batch).view(-1, size).sum(1).tolist()
        groups = split_rows(
            lengths,
            self.max_tokens_per_mb,
            self.min_micro_batches,
            self.ranks.maximum,
            packing=self.packing,
            divisor=self.micro_batches_divisor,
        )
        return [[unit * size + row for unit in group for row in range(size)] for group in groups]

    def compute_logprobs(self, batch: Batch) -> Tensor:
        """The logprobs of `score`; a collective."""
        return self.score(batch)[0]

    def score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logprob and entropy of the next token where the next-token aligned `loss_mask` is set, float32 [B, T], else 0; a collective."""
        logprobs, entropy = self._columns(batch, 2)
        return logprobs, entropy

    def compute_values(self, batch: Batch) -> Tensor:
        """What a score model gives each position, knowing the tokens up to it, float32 [B, T], 0 on padding; a collective."""
        return self._columns(batch, 1)[0]

    @torch.no_grad()
    def _columns(self, batch: Batch, num_columns: int) -> Tensor:
        """The columns of `_forward` for every row of a batch, float32 [columns, B, T]; a collective."""
        self.model.eval()
        columns = torch.zeros(num_columns, *batch["attention_mask"].shape, dtype=torch.float32)
        for rows in self.divide(batch):
            part = select_rows(batch, rows)
            found = self._forward(part).cpu()
            if rows:
                width = part["attention_mask"].shape[1]
                for column, flat in zip(columns, found.unbind(1), strict=True):
                    column[rows, :width] = scatter_tokens(flat, part["attention_mask"])
        if self.optimizer is None:
            self.sleep()  # scoring is all that it does
        return columns

    @torch.no_grad()
    def eval_batch(self, batch: Batch, loss_fn: LossFunction) -> None:
        """Give `loss_fn` what `train_batch` would, and learn nothing; a collective."""
        self.model.eval()
        for rows in self.divide(batch):
            part = select_rows(batch, rows)
            columns = self._forward(part)  # also without rows: other ranks may have some
            if rows:
                loss_fn(*columns.unbind(1), self._packed(part))

    def train_batch(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        weight_fn: Callable[[Batch], Tensor],
        observe: Callable[..., None] = tell_nobody,
    ) -> TrainResult:
        """One optimizer step on a batch of next-token aligned rows; a collective.

        Args:
            batch: padded; every per-token key is given to `loss_fn` packed.
            loss_fn: the loss, summed over the tokens of a packed micro-batch.
            weight_fn: the weight of a batch, by which the sum of the loss is divided; usually its trained tokens.
            observe: told `loss` before each backward, `gradients` before they are clipped, `optimizer` after its step; on
                every rank equally often.

        Raises:
            ValueError: the batch weighs nothing on all ranks, so there is nothing to learn from.
        """
        if self.optimizer is None or self.schedule is None:
            raise ValueError(
                "this engine has no optimizer: it can score, not train (actor.optimizer is not set)"
            )
        total_weight = float(self.ranks.sum(weight_fn(batch).double()))
        if total_weight == 0:
            raise ValueError("no token of the batch is trained on any rank: every loss_mask is 0")
        self.model.train()
        self.optimizer.zero_grad()
        results = [
            self.backward(batch, rows, loss_fn, weight_fn, total_weight, observe)
            for rows in self.divide(batch)
        ]
        observe("gradients", batch=batch, total_weight=total_weight)
        loss_sum = self.ranks.sum(torch.tensor(sum(r.loss for r in results), dtype=torch.float64))
        lr = self.schedule.get_last_lr()[0]
        grad_norm = clip_gradients(list(self.model.parameters()), self.gradient_clipping)
        finite = grad_norm < float("inf")  # False for nan, too
        if finite:
            take_step(self.optimizer, self.step_groups)
        observe("optimizer", grad_norm=grad_norm, lr=lr, updated=finite)
        self.optimizer.zero_grad()
        return TrainResult(float(loss_sum) / total_weight, total_weight, grad_norm, lr, finite, results)

    def backward(
        self,
        batch: Batch,
        rows: Sequence[int],
        loss_fn: LossFunction,
        weight_fn: Callable[[Batch], Tensor],
        total_weight: float,
        observe: Callable[..., None] = tell_nobody,
    ) -> MicroBatchResult:
        """Forward and backward of some rows, adding to the gradients; arguments as of `train_batch`; a collective."""
        part = select_rows(batch, rows)
        pairs = self._forward(part)
        if not rows:
            # Every rank reaches every collective of FSDP: an empty micro-batch runs a backward that weighs nothing.
            observe("loss", micro_batch_rows=[], flat={}, logprobs=pairs[:, 0], loss=pairs.sum() * 0.0)
            (pairs.sum() * 0.0).backward()
            return MicroBatchResult([], 0, 0.0, 0.0)
        flat = self._packed(part)
        loss = loss_fn(*pairs.unbind(1), flat)
        observe("loss", micro_batch_rows=list(rows), flat=flat, logprobs=pairs[:, 0], loss=loss)
        # FSDP averages gradients over ranks; times their number, that is a sum.
        (loss * (self.ranks.shard_mesh.size() / total_weight)).backward()
        num_tokens = int(part["attention_mask"].sum())
        return MicroBatchResult(list(rows), num_tokens, float(loss.detach()), float(weight_fn(part)))

    def _packed(self, part: Batch) -> Batch:
        return {key: tensor.to(self.ranks.device) for key, tensor in pack(part).items()}

    def _forward(self, part: Batch) -> Tensor:
        """(logprob, entropy) of the next token at each packed position, float32 [tokens, 2]; 0 where nothing is trained.

        Of a reward model the score of each position, float32 [tokens, 1].
        """
        self.wake()
        if part["attention_mask"].shape[0] == 0:
            part = {
                name: torch.ones(1, 1, dtype=torch.int32)
                for name in ("input_ids", "attention_mask", "loss_mask")
            }
            part["attention_mask"] = part["attention_mask"].bool()
        lengths = sequence_lengths(part).tolist()
        tokens = slice_tokens(sum(lengths), self.ranks)
        device = self.ranks.device
        flat = pack(part)
        input_ids = flat["input_ids"].to(device, torch.int64)
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        inputs = {
            "input_ids": tokens.of(input_ids)[None],
            "position_ids": tokens.of(positions)[None],
            "use_cache": False,
            "sequence_lengths": tokens.lengths(lengths),
            "sequence_parallel": tokens.group,
        }
        if is_score_model(self.model):
            return tokens.gather(self.model(**inputs)[0])
        scored = tokens.of(flat["loss_mask"]).nonzero()[:, 0].to(device)  # most prompt tokens cost no logits
        at = scored if len(scored) else scored.new_zeros(1)
        head = self.model.get_output_embeddings()
        # The label of a sequence's last position is another sequence's first token; no mask trains on it.
        head.labels, head.temperature = tokens.of(input_ids.roll(-1))[at], self.temperature
        output = self.model(**inputs, logits_to_keep=at)
        head.labels = None
        pairs = output.logits[0] if len(scored) else output.logits[0] * 0.0  # [scored, 2]
        return tokens.gather(pairs.new_zeros(tokens.size, 2).index_copy(0, at, pairs))

    def step_schedule(self) -> None:
        """Move the learning rate on; once a training step, however many minibatches that had."""
        assert self.schedule is not None
        self.schedule.step()

    def named_full_tensors(self) -> FullTensors | MergedTensors:
        """Every weight, whole, in the compute dtype, with its adapter; a collective each time it is iterated, by every rank to the end."""
        self.wake()
        if self.adapter is None:
            return FullTensors(self.model, self.dtype, self.ranks.device)
        masters = FullTensors(self.model, torch.float32, self.ranks.device)
        return MergedTensors(masters, self.adapter.scaling, self.dtype)

    def named_adapter_tensors(self) -> AdapterTensors:
        """What is trained, whole, in float32, under the names of peft's files; a collective like `named_full_tensors`."""
        self.wake()
        self.model.reshard()  # a forward without a backward leaves a head of scores whole and in the compute dtype
        return AdapterTensors(self.model, self.ranks.device)

    def checksums(self) -> dict[str, str]:
        """crc32c of every master weight, of an adapted model those of the adapter; a collective."""
        return parameter_checksums(self.model, self.ranks)
