"""The train engine: a sharded model that scores batches and is trained on them.

It is independent of reinforcement learning: a loss is a function of logprobs, entropies and one
packed micro-batch (for a reward model: of scores and the micro-batch). The objective is the sum of
that loss over all tokens of all ranks, divided by the sum of their weights, so it does not depend
on how rows are divided into micro-batches.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from areal_core.data.batch import (
    RAGGED,
    Batch,
    pack,
    scatter_tokens,
    select_rows,
    sequence_lengths,
    split_rows,
)
from areal_core.data.processor import VisionProcessor
from areal_core.data.routed_experts import ROUTED_EXPERTS
from areal_core.engine.bit_sums import Sums
from areal_core.engine.checksums import Checksums, parameter_checksums
from areal_core.engine.full_weights import FullTensors, RenamedTensors
from areal_core.engine.logprobs import note_use_of_entropy
from areal_core.engine.lora import Adapter, AdapterTensors, MergedTensors
from areal_core.engine.offload import Offloaded, leave_device, return_to_device, take_step
from areal_core.engine.optimizer import gradient_norm
from areal_core.engine.ranks import Ranks
from areal_core.engine.recompute import Fault, Verification
from areal_core.engine.routers import Routers
from areal_core.engine.scores import is_score_model
from areal_core.engine.sequence_parallel import slice_tokens
from areal_core.engine.sharding import fsdp_module
from areal_core.engine.trees.token_tree import count_distinct, rows_of, units_of_groups
from areal_core.engine.trees.tree_forward import forward_tree
from areal_core.engine.vision_models import VisionInputs, text_only, vision_family

FORWARD_KEYS = {"input_ids", "attention_mask", "loss_mask", ROUTED_EXPERTS}
# (logprobs [tokens], entropies [tokens], packed micro-batch) -> sum of the loss over its tokens;
# of a reward model: (scores [tokens], packed micro-batch)
LossFunction = Callable[..., Tensor]


def ignore_event(event: str, **facts: object) -> None:
    """Do nothing: the default observer of a step."""


@dataclass(frozen=True)
class MicroBatchResult:
    """One micro-batch of this rank; `rows` are of the batch, `loss` is summed over tokens.

    `num_computed` is the number of its tokens that the model computed: the distinct ones of a tree.
    """

    rows: list[int]
    num_tokens: int
    num_computed: int
    loss: float
    weight: float


@dataclass(frozen=True)
class DeviceResult:
    """A micro-batch whose numbers, each [], are still on the device.

    `nonfinite` is the number of its tokens with a log-prob, or an input of the loss, that is not
    finite.
    """

    rows: list[int]
    num_tokens: int
    num_computed: int
    loss: Tensor
    weight: Tensor
    nonfinite: Tensor


@dataclass(frozen=True)
class TrainResult:
    """One optimizer step; all but `micro_batches` and `sums`, this rank's, is over all ranks.

    `update_successful` is false, and no weight has changed, if the loss, the gradient norm, a
    log-prob or an input of the loss was not finite on any rank, or if `fault` is a corruption.
    `sums`, of each micro-batch and last of the step, and `fault` are of `verification`.
    """

    loss: float
    total_weight: float
    grad_norm: float
    lr: float
    update_successful: bool
    micro_batches: list[MicroBatchResult]
    sums: list[list[Sums]] | None = None
    fault: Fault | None = None


@dataclass
class FSDPEngine:
    """A sharded causal language model, or reward model, with its optimizer and schedule.

    Args:
        dtype: of compute and of the weights from `named_full_tensors`.
        temperature: divides the logits; it must be the sampling temperature of the tokens.
        max_tokens_per_mb: the maximum number of tokens in a micro-batch, None for no limit.
        min_micro_batches: the minimum number of micro-batches that a batch is divided into.
        packing: how rows are divided into micro-batches, one of `batch.PACKING`; their number is a
            multiple of `micro_batches_divisor`.
        granularity: number of consecutive rows that stay in one micro-batch, 2 for pairs; the
            number of rows of every batch is a multiple of it.
        syncs_every_micro_batch: sum gradients over ranks after each micro-batch; else once, after
            the last one, and each rank accumulates the gradient of the full model meanwhile.
        adapter: is trained in place of the model, which is frozen.
        step_groups: the `groups` of `offload.take_step`; None where optimizer states stay on the
            device.
        sleeps: release the engine's memory on the device while it is idle.
        offloaded: what `sleep` has released; empty while the engine is awake.
        packs_rows: compute the rows of a micro-batch in one forward; otherwise each `granularity`
            rows are a micro-batch, and each row a forward. See `parity.py`.
        shares_prefixes: compute tokens that rows begin with in common once; the limit of tokens
            counts them once, too. See `trees/`.
        numbers_rows: pass to layers with a state where rows begin, by the options `seq_idx` and
            `cu_seq_lens_q` of Transformers, which their GPU kernels read.
        processor: of a vision model, computes the pixels of pictures.
        names: of the parameters in a checkpoint; empty where they are the model's own.
        routers: replay the batch's `routed_experts`; None where the model chooses its experts.
        verification: of the current step; None to compute once and keep no sums.
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
    schedule: LambdaLR | None = None
    gradient_clipping: float = 1.0
    syncs_every_micro_batch: bool = True
    adapter: Adapter | None = None
    step_groups: list[list[Parameter]] | None = None
    sleeps: bool = False
    offloaded: list[Offloaded] = field(default_factory=list)
    packs_rows: bool = True
    shares_prefixes: bool = False
    numbers_rows: bool = False
    processor: VisionProcessor | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    routers: Routers | None = None
    verification: Verification | None = None

    def __post_init__(self) -> None:
        family = vision_family(self.model)
        # Makes the inputs of a vision model; None for a text model.
        self.vision = None if family is None else VisionInputs(self.model, family, self.processor)

    def sleep(self) -> None:
        """Release device memory; the next call that needs the weights wakes the engine."""
        if self.sleeps and not self.offloaded:
            self.offloaded = leave_device(self.model, self.optimizer, self.ranks.device)

    def wake(self) -> None:
        """Move back to the device what `sleep` moved to host memory."""
        return_to_device(self.offloaded)
        self.offloaded = []

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of device memory that `sleep` has released."""
        return sum(item.copy.nbytes() for item in self.offloaded)

    def agree(self, batch: Batch) -> Batch:
        """Return the batch with the same keys of pictures on every rank; a collective."""
        return batch if self.vision is None else self.vision.agree(batch, self.ranks)

    def divide(self, batch: Batch) -> list[list[int]]:
        """Divide rows into micro-batches, the same number on every rank; a collective."""
        units = self.units(batch)
        if not self.packs_rows:
            return self._one_unit_each(units)
        groups = split_rows(
            self._num_computed(batch, units),
            self.max_tokens_per_mb,
            self.min_micro_batches,
            self.ranks.maximum,
            packing=self.packing,
            divisor=self.micro_batches_divisor,
        )
        return [[row for unit in group for row in units[unit]] for group in groups]

    def units(self, batch: Batch) -> list[list[int]]:
        """Return the rows that stay in one micro-batch: `granularity` rows, or a prompt's tree."""
        rows = list(range(len(batch["attention_mask"])))
        units = [rows[start : start + self.granularity] for start in rows[:: self.granularity]]
        return units_of_groups(batch, units, self.max_tokens_per_mb) if self.shares_prefixes else units

    def _num_computed(self, batch: Batch, units: list[list[int]]) -> list[int]:
        if self.shares_prefixes:
            rows = rows_of(batch)
            return [count_distinct([rows[row] for row in unit]) for unit in units]
        lengths = sequence_lengths(batch).tolist()
        return [sum(lengths[row] for row in unit) for unit in units]

    def _one_unit_each(self, units: list[list[int]]) -> list[list[int]]:
        divisor = self.micro_batches_divisor
        count = -(-self.ranks.maximum(max(len(units), self.min_micro_batches)) // divisor) * divisor
        return units + [[] for _ in range(count - len(units))]

    def compute_logprobs(self, batch: Batch) -> Tensor:
        """Return the logprobs of `score`; a collective."""
        return self.score(batch)[0]

    def score(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (logprobs, entropies) of the next token, each float32 [B, T]; a collective.

        They are 0 where the next-token aligned `loss_mask` is not set.
        """
        logprobs, entropy = self._score_rows(batch, 2)
        return logprobs, entropy

    def compute_values(self, batch: Batch) -> Tensor:
        """Return a score model's scores, float32 [B, T], 0 on padding; a collective."""
        return self._score_rows(batch, 1)[0]

    @torch.no_grad()
    def _score_rows(self, batch: Batch, num_columns: int) -> Tensor:
        self.model.eval()
        batch = self.agree(batch)
        columns = torch.zeros(num_columns, *batch["attention_mask"].shape, dtype=torch.float32)
        for rows in self.divide(batch):
            part = select_rows(batch, rows)
            found = self.forward(part).cpu()
            if rows:
                width = part["attention_mask"].shape[1]
                for column, flat in zip(columns, found.unbind(1), strict=True):
                    column[rows, :width] = scatter_tokens(flat, part["attention_mask"])
        if self.optimizer is None:
            self.sleep()  # this engine only scores
        return columns

    @torch.no_grad()
    def eval_batch(self, batch: Batch, loss_fn: Callable[..., object]) -> None:
        """Call `loss_fn` as `train_batch` does, without gradients; a collective."""
        self.model.eval()
        batch = self.agree(batch)
        for rows in self.divide(batch):
            part = select_rows(batch, rows)
            columns = self.forward(part)  # a collective: also without rows, other ranks may have some
            if rows:
                loss_fn(*columns.unbind(1), self.packed(part))

    def train_batch(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        weight_fn: Callable[[Batch], Tensor],
        observe: Callable[..., None] = ignore_event,
    ) -> TrainResult:
        """Take one optimizer step on a batch of next-token aligned rows; a collective.

        Args:
            batch: padded; `loss_fn` receives every per-token key packed.
            loss_fn: the loss, summed over the tokens of a packed micro-batch.
            weight_fn: the weight of a batch, which the sum of the loss is divided by; usually its
                number of tokens in the loss mask.
            observe: called with the event `loss` before each backward, `gradients` before clipping
                and `optimizer` after its step, the same number of times on every rank.

        Raises:
            ValueError: the engine has no optimizer, or the weight is 0 on all ranks; or the rows
                have no `routed_experts` to replay.
        """
        if self.optimizer is None or self.schedule is None:
            raise ValueError(
                "this engine has no optimizer: it can score, not train (actor.optimizer is not set)"
            )
        if self.routers is not None and ROUTED_EXPERTS not in batch:
            raise ValueError(
                "rollout.return_routed_experts is true and the rows have no routed_experts: let the workflow add "
                "those of the engine's response, as episode_tensors does, or set it to false"
            )
        total_weight = float(self.ranks.sum(weight_fn(batch).double()))
        if total_weight == 0:
            raise ValueError("the batch has no token in the loss mask on any rank: every loss_mask is 0")
        self.model.train()
        batch = self.agree(batch)
        groups = self.divide(batch)

        def compute(batch: Batch, groups: list[list[int]], observe: Callable[..., None]) -> Iterator[Any]:
            parts = [(batch, rows) for rows in groups]
            return self.gradients(parts, loss_fn, weight_fn, total_weight, observe)

        sums, fault = None, None
        if self.verification is None:
            results = list(compute(batch, groups, observe))
        else:
            results, sums, fault = self.verification.run(compute, batch, groups, observe)
        observe("gradients", batch=batch, total_weight=total_weight)
        parameters = list(self.model.parameters())
        norm = self.ranks.once(partial(gradient_norm, parameters, self.ranks))
        loss_sum, nonfinite, grad_norm, micro_batches = self._read(results, norm)
        lr = self.schedule.get_last_lr()[0]
        finite = nonfinite == 0 and math.isfinite(loss_sum) and math.isfinite(grad_norm)
        is_taken = finite and (fault is None or fault.kind != "corruption")
        if is_taken:
            self.ranks.once(partial(self._take_step, parameters, norm))
        if self.verification is not None and sums is not None:
            sums[-1] += self.verification.sums.of_weights()
        observe("optimizer", grad_norm=grad_norm, lr=lr, updated=is_taken)
        self.ranks.once(self.optimizer.zero_grad)
        return TrainResult(
            loss_sum / total_weight,
            total_weight,
            grad_norm,
            float(lr),
            is_taken,
            micro_batches,
            sums,
            fault,
        )

    def gradients(
        self,
        parts: Sequence[tuple[Batch, Sequence[int]]],
        loss_fn: LossFunction,
        weight_fn: Callable[[Batch], Tensor],
        total_weight: float,
        observe: Callable[..., None] = ignore_event,
    ) -> Iterator[DeviceResult]:
        """Compute the gradient of the sum over micro-batches, from none; a collective.

        Args:
            parts: micro-batches, each as a batch and its rows; the same number on every rank.
            others: as of `train_batch`; `total_weight` is the weight over all ranks.
        """
        assert self.optimizer is not None
        self.ranks.once(self.optimizer.zero_grad)
        for number, (batch, rows) in enumerate(parts):
            syncs = self.syncs_every_micro_batch or number == len(parts) - 1
            if self.syncs_every_micro_batch or number == 0:
                self.ranks.begin_sum(self.model)
            self.ranks.next_in_sum(self.model)
            fsdp_module(self.model).set_requires_gradient_sync(syncs)
            yield self.backward(batch, rows, loss_fn, weight_fn, total_weight, observe)
            if syncs:
                self.ranks.end_sum(self.model)

    def _take_step(self, parameters: list[Parameter], norm: Tensor) -> None:
        """Clip the gradients and update the weights; once in a process."""
        assert self.optimizer is not None
        if self.gradient_clipping > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.gradient_clipping, norm)
        take_step(self.optimizer, self.step_groups)

    def _read(
        self, results: Sequence[DeviceResult], norm: Tensor
    ) -> tuple[float, float, float, list[MicroBatchResult]]:
        """Transfer all numbers of a step at once, the only wait for the device; a collective.

        Returns:
            The loss and the number of tokens that are not finite, both summed over ranks; the
            gradient norm; the micro-batches of this rank.
        """
        losses = torch.stack([result.loss for result in results]).double()
        nonfinite = torch.stack([result.nonfinite for result in results]).sum()
        # Float64 sums of float32 losses are exact, whatever their order; + 0.0 makes -0.0 0.0.
        sums = self.ranks.sum(torch.stack([losses.sum() + 0.0, nonfinite.double()]))
        loss_sum, bad, grad_norm, *numbers = torch.cat([sums, norm[None].to(sums), losses]).tolist()
        weights = torch.stack([result.weight for result in results]).tolist()
        micro_batches = [
            MicroBatchResult(result.rows, result.num_tokens, result.num_computed, loss, float(weight))
            for result, loss, weight in zip(results, numbers, weights, strict=True)
        ]
        return loss_sum, bad, grad_norm, micro_batches

    def backward(
        self,
        batch: Batch,
        rows: Sequence[int],
        loss_fn: LossFunction,
        weight_fn: Callable[[Batch], Tensor],
        total_weight: float,
        observe: Callable[..., None] = ignore_event,
    ) -> DeviceResult:
        """Run forward and backward on some rows, adding to the gradients; a collective.

        Arguments are those of `train_batch`; `total_weight` is the weight over all ranks.
        """
        part = select_rows(batch, rows)
        pairs = self.forward(part)
        if not rows:
            # Every rank reaches every collective of FSDP: an empty micro-batch runs a backward of
            # weight 0.
            loss = pairs.sum() * 0.0
            observe("loss", micro_batch_rows=[], flat={}, logprobs=pairs[:, 0], loss=loss)
            loss.backward()
            zero = loss.new_zeros(())
            return DeviceResult([], 0, 0, zero, weight_fn(part), zero)
        flat = self.packed(part)
        columns = pairs.unbind(1)
        loss = loss_fn(*columns, flat)
        if len(columns) == 2:
            note_use_of_entropy(loss, pairs, columns[1])
        observe("loss", micro_batch_rows=list(rows), flat=flat, logprobs=pairs[:, 0], loss=loss)
        # FSDP averages gradients over ranks; multiplied by their number, that is a sum.
        (loss * (self.ranks.num_summed / total_weight)).backward()
        num_tokens = sum(sequence_lengths(part).tolist())
        (num_computed,) = self._num_computed(part, [list(range(len(rows)))])
        nonfinite = count_nonfinite(pairs[:, 0].detach(), flat)
        return DeviceResult(list(rows), num_tokens, num_computed, loss.detach(), weight_fn(part), nonfinite)

    def packed(self, part: Batch) -> Batch:
        """Return what a loss gets of rows: their per-token columns, packed, on the device."""
        flat = pack({key: t for key, t in part.items() if key not in RAGGED and key != ROUTED_EXPERTS})
        if self.ranks.device.type == "cuda":
            flat = {key: tensor if tensor.is_cuda else tensor.pin_memory() for key, tensor in flat.items()}
        return {key: tensor.to(self.ranks.device, non_blocking=True) for key, tensor in flat.items()}

    def forward(self, part: Batch) -> Tensor:
        """Return (logprob, entropy) of the next token at each packed position, float32 [tokens, 2].

        They are 0 outside of the loss mask. For a reward model: the score of each position, float32
        [tokens, 1]. A collective, also for a part without rows.
        """
        self.wake()
        if part["attention_mask"].shape[0] == 0:
            ones = torch.ones(1 if self.packs_rows else self.granularity, 1, dtype=torch.int32)
            text = {"input_ids": ones, "attention_mask": ones.bool(), "loss_mask": ones}
            part = text | text_only(text) if "image_count" in part else text
        if self.shares_prefixes:
            return forward_tree(self.model, part, self.ranks, self.temperature)
        if self.packs_rows:
            return self._forward_packed(part)
        rows = range(part["attention_mask"].shape[0])
        return torch.cat([self._forward_alone(select_rows(part, [row])) for row in rows])

    def _forward_packed(self, part: Batch) -> Tensor:
        lengths = sequence_lengths(part).tolist()
        tokens = slice_tokens(sum(lengths), self.ranks)
        flat = pack({key: part[key] for key in part.keys() & FORWARD_KEYS})
        input_ids = flat["input_ids"].to(self.ranks.device, torch.int64)
        positions = torch.cat([torch.arange(n, device=self.ranks.device) for n in lengths])
        inputs: dict[str, Any] = {
            "input_ids": tokens.of(input_ids)[None],
            "position_ids": tokens.of(positions)[None],
            "use_cache": False,
            "sequence_lengths": tokens.lengths(lengths),
            "sequence_parallel": tokens.group,
        }
        if self.vision is not None:  # all tokens: a hook divides them after pictures are embedded
            inputs |= self._on_device(self.vision.of(part, tokens.padding))
        if self.numbers_rows:
            numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
            inputs["seq_idx"] = numbers[None].to(self.ranks.device, torch.int32)
            inputs["cu_seq_lens_q"] = flat["cu_seqlens"].to(self.ranks.device)
        if self.routers is not None:
            chosen = flat.get(ROUTED_EXPERTS)
            self.routers.replay(None if chosen is None else tokens.of(chosen), self.ranks.device)
        if is_score_model(self.model):
            return tokens.gather(self.model(**inputs)[0])
        # The label of a sequence's last position is another sequence's first token; no loss mask
        # contains it.
        return tokens.gather(self._pairs(inputs, tokens.of(flat["loss_mask"]), tokens.of(input_ids.roll(-1))))

    def _forward_alone(self, row: Batch) -> Tensor:
        """Compute `forward` of one row as Transformers would, with the model's own attention."""
        flat = pack(row)
        input_ids = flat["input_ids"].to(self.ranks.device, torch.int64)
        inputs = {"input_ids": input_ids[None], "use_cache": False}
        if self.vision is not None:
            inputs |= self._on_device(self.vision.alone(row))
        if self.routers is not None:
            self.routers.replay(flat.get(ROUTED_EXPERTS), self.ranks.device)
        if is_score_model(self.model):
            return self.model(**inputs)[0]
        return self._pairs(inputs, flat["loss_mask"], input_ids.roll(-1))

    def _on_device(self, inputs: dict[str, Any]) -> dict[str, Any]:
        device = self.ranks.device
        return {
            key: {name: tensor.to(device) for name, tensor in value.items()}
            if isinstance(value, dict)
            else value.to(device)
            if isinstance(value, Tensor)
            else value
            for key, value in inputs.items()
        }

    def _pairs(self, inputs: dict[str, Any], loss_mask: Tensor, labels: Tensor) -> Tensor:
        """Run the model where the loss mask is set: (logprob, entropy) of the labels, else 0.

        The mask leaves out the prompt tokens. All are of this rank's tokens; float32 [tokens, 2].
        """
        scored = loss_mask.nonzero()[:, 0].to(self.ranks.device)
        at = scored if len(scored) else scored.new_zeros(1)
        pairs = self.model(**inputs, positions=at, labels=labels[at], temperature=self.temperature)[0]
        if not len(scored):
            pairs = pairs * 0.0
        return pairs.new_zeros(len(labels), 2).index_copy(0, at, pairs)

    def step_schedule(self) -> None:
        """Advance the learning rate; once per training step, whatever its number of minibatches."""
        assert self.schedule is not None
        with warnings.catch_warnings():
            # After an update that was skipped, in the first step, the order is right all the same.
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            self.ranks.once(self.schedule.step)

    def named_full_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Return every full weight in the compute dtype, merged with its adapter if there is one.

        The names are those of a checkpoint. The result can be iterated again. Iterating over it is
        a collective: every rank must reach its end.
        """
        self.wake()
        tensors: Iterable[tuple[str, Tensor]]
        if self.adapter is None:
            tensors = FullTensors(self.model, self.dtype, self.ranks.device)
        else:
            masters = FullTensors(self.model, torch.float32, self.ranks.device)
            tensors = MergedTensors(masters, self.adapter.scaling, self.dtype)
        return RenamedTensors(tensors, self.names) if self.names else tensors

    def named_adapter_tensors(self) -> AdapterTensors:
        self.wake()
        # A forward without a backward leaves a score head gathered, in the compute dtype.
        fsdp_module(self.model).reshard()
        return AdapterTensors(self.model, self.ranks.device)

    def checksums(self) -> dict[str, str]:
        """Return the crc32c of every trained parameter; a collective."""
        return self.all_checksums().tensors

    def all_checksums(self) -> Checksums:
        """Return the crc32c of every trained parameter, and of each rank's shards; a collective."""
        self.wake()
        return parameter_checksums(self.model, self.ranks)


def count_nonfinite(logprobs: Tensor, flat: Batch) -> Tensor:
    """Return the number of values in the loss mask that are not finite, [] on their device.

    Args:
        logprobs: of the model, [tokens].
        flat: packed rows; per-token floats [tokens], per-row floats [rows].
    """
    mask = flat["loss_mask"].bool()
    columns = [logprobs, *(tensor for tensor in flat.values() if tensor.is_floating_point())]
    bad = [~column.isfinite() for column in columns]
    return torch.stack([(b & mask if b.shape == mask.shape else b).sum() for b in bad]).sum()
