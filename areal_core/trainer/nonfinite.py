"""What a run does about values that are not finite, or computed wrongly: stop, or skip the update.

`FSDPEngine.train_batch` takes no optimizer step if a number of it is not finite on any rank, which
every rank knows from sums that it needs anyway. Only then `find_cause` looks for the first of them,
in the order in which data flow:

    weight -> columns of the batch (reward, log-probs, values, advantages) -> log-prob -> loss -> gradient

A step with such an update is completed and observed like any other, so that a record contains it
and can be replayed up to it; then the run stops, before its weights are sent or saved. The same
holds for a step that was computed again to other bits (`debug.verify_every`, `recompute.py`).
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from areal_core.config import BaseExperimentConfig, TrainEngineConfig
from areal_core.data.batch import Batch, select_rows
from areal_core.engine.checkpoint.distributed import Engines
from areal_core.engine.determinism import rng_state, set_rng_state
from areal_core.engine.fsdp import FSDPEngine, LossFunction
from areal_core.engine.observe_bits import BitSums
from areal_core.engine.optimizer import gradient_norm
from areal_core.engine.ranks import Ranks
from areal_core.engine.recompute import Fault, Verification
from areal_core.engine.reduction import local_of
from areal_core.engine.scores import is_score_model
from areal_core.errors import MiscomputedError, NonFiniteError
from areal_core.paths import record_folder
from areal_core.telemetry.stats import Stats

ROWS_SHOWN = 3
HEAD_CHARACTERS, TAIL_CHARACTERS = 60, 100  # of a row's text
# Floats of a batch, in the order in which a step computes them.
COLUMNS = {
    "rewards": "reward",
    "logprobs": "log-prob (logprobs)",
    "values": "value (values)",
    "prox_logp": "log-prob (prox_logp)",
    "entropy": "entropy",
    "ref_logp": "log-prob of the reference (ref_logp)",
    "teacher_logp": "log-prob of the teacher (teacher_logp)",
    "kl_rewards": "KL penalty (kl_rewards)",
    "total_rewards": "reward (total_rewards)",
    "advantages": "advantage",
    "returns": "return",
}
NOT_SEEN_AGAIN = "the loss or the gradient, though not when it was computed again,"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cause:
    """The first thing that is not finite, and the rows of this rank in which it is.

    `is_example`: other rows may have the same.
    """

    what: str
    rows: list[int] = field(default_factory=list)
    is_example: bool = False


@dataclass
class NonFiniteGuard:
    """The policy of a run: `nonfinite`, `nonfinite_skips` of its models, `debug.verify_every`.

    Every method is a collective, and raises or returns alike on every rank.

    Args:
        stops: false in a replay, which follows its record.
    """

    config: BaseExperimentConfig
    options: Mapping[str, TrainEngineConfig]
    ranks: Ranks
    tokenizer: PreTrainedTokenizerBase
    stats: Stats
    stops: bool = True
    num_skipped: dict[str, int] = field(default_factory=dict)
    stopped: RuntimeError | None = None

    def verify(self, engines: Engines, step: int) -> None:
        """Let engines keep sums of the bits of a step, and compute it again, as `debug` says."""
        debug = self.config.debug
        is_due = debug.verify_every is not None and step % debug.verify_every == 0
        for engine in engines.values():
            engine.verification = None
            if is_due or debug.record_bit_sums:
                engine.verification = Verification(
                    self.ranks,
                    BitSums(engine.model, self.ranks),
                    self.stats.discarded,
                    swaps=debug.verify_on == "neighbour",
                    recomputes=is_due and self.stops,
                )

    def check_weights(self, engines: Engines, where: str, step: int | None = None) -> None:
        """Raise NonFiniteError if an update was not skipped, or a weight is not finite.

        Or MiscomputedError after an update that was computed wrongly.

        Args:
            where: the moment, for the message.
            step: that has just been completed, if any.
        """
        if self.stops and self.stopped is None:
            self._find_broken_weight(engines, where, step)
        if self.stopped is not None:
            raise self.stopped

    def _find_broken_weight(self, engines: Engines, where: str, step: int | None) -> None:
        largest = torch.stack([largest_weight(e.model.parameters()).cpu() for e in engines.values()])
        if float(self.ranks.sum_parts((~largest.isfinite()).sum())) == 0:
            return
        for name, engine in engines.items():
            if (what := broken_tensors(engine)) is not None:
                found = self.message(f"{where}, {name}: the weight {what} is not finite", step)
                self.stopped = NonFiniteError(found)
                return

    def skipped(
        self,
        name: str,
        engine: FSDPEngine,
        inputs: Batch,
        loss_fn: LossFunction,
        weight_fn: Callable[[Batch], Tensor],
        *,
        step: int,
        minibatch: int,
        rows: Sequence[int],
        names: Sequence[str] | None = None,
        fault: Fault | None = None,
    ) -> None:
        """Find and log the cause of an update that was not taken, and count it.

        Args:
            name: of the model, "actor" or "critic".
            inputs: the batch of the step, of which `rows` were the minibatch.
            names: of the rows; by default their prompt and sample.
            fault: what was computed wrongly, in place of a value that is not finite.
        """
        if not self.stops or self.stopped is not None:
            return
        where = f"step {step}, {name}, minibatch {minibatch}"
        if fault is not None:
            self._miscomputed(fault, where, step)
            return
        with self.stats.discarded():
            cause = find_cause(engine, inputs, rows, loss_fn, weight_fn)
        options: TrainEngineConfig = self.options[name]
        message = f"{where}: the {cause.what} is not finite{self.shown_rows(inputs, cause, names)}"
        count = self.num_skipped[name] = self.num_skipped.get(name, 0) + 1
        limit = options.nonfinite_skips
        if options.nonfinite == "skip" and (limit is None or count <= limit):
            if self.ranks.rank == 0:
                logger.warning("%s\nskipped this update, number %d of at most %s", message, count, limit)
            return
        hint = f"{name}.nonfinite=skip continues without such updates"
        if options.nonfinite == "skip":
            hint = f"{name}.nonfinite_skips is {limit}, and this is update {count} that is skipped"
        self.stopped = NonFiniteError(self.message(message, step, hint))

    def _miscomputed(self, fault: Fault, where: str, step: int) -> None:
        """Stop, or log, an update that was computed again to other bits."""
        found = f"{where}: {fault}"
        is_corrupt = fault.kind == "corruption"
        if self.config.debug.verify_action == "warn":
            if self.ranks.rank == 0:
                logger.warning("%s; this update is %s", found, "skipped" if is_corrupt else "taken")
            return
        advice = "run it without that device; debug.verify_action=warn skips such updates"
        if not is_corrupt:
            advice = "set deterministic to true, and see what `areal-debug check run` finds"
        self.stopped = MiscomputedError(self.message(found, step, advice, "--find-faulty --step"))

    def message(self, found: str, step: int | None = None, hint: str = "", option: str = "--explain") -> str:
        """Add the commands that show a step, if it is recorded, and what else to do."""
        lines, debug = [found], self.config.debug
        if step is not None and debug.dump_rollout_data:
            every, steps = debug.dump_every, debug.dump_steps
            if step in steps if steps is not None else step % every == 0:
                record = record_folder(self.config)
                lines += [
                    f"    areal-debug record show {record} --step {step}",
                    f"    areal-debug open {record} --step {step}",
                    f"    areal-debug replay {record} {option} {step}",
                ]
        return "\n".join([*lines, *([hint] if hint else [])])

    def shown_rows(self, inputs: Batch, cause: Cause, names: Sequence[str] | None) -> str:
        mine = [
            f"    rank {self.ranks.data_parallel_rank}, row {row}, {name_of(inputs, row, names)}: {self.excerpt(inputs, row)}"
            for row in cause.rows[:ROWS_SHOWN]
        ]
        gathered = self.ranks.gather_leaders((len(cause.rows), mine))
        count, shown = sum(n for n, _ in gathered), [line for _, lines in gathered for line in lines]
        if not count:
            return ""
        of = f", the first {ROWS_SHOWN} of them" if count > ROWS_SHOWN else ""
        number = f"{'at least ' if cause.is_example else ''}{count} row{'s' * (count > 1)}"
        return "\n".join([f" in {number}{of}:", *shown[:ROWS_SHOWN]])

    def excerpt(self, inputs: Batch, row: int) -> str:
        """Return the head and the tail of a row's text, quoted."""
        text = self.tokenizer.decode(inputs["input_ids"][row][inputs["attention_mask"][row]].tolist())
        if len(text) > HEAD_CHARACTERS + TAIL_CHARACTERS:
            text = f"{text[:HEAD_CHARACTERS]} ... {text[-TAIL_CHARACTERS:]}"
        return repr(text)


def name_of(inputs: Batch, row: int, names: Sequence[str] | None) -> str:
    """Return the given name of a row, or its prompt and sample."""
    if names is not None:
        return names[row]
    return f"prompt {int(inputs['prompt_id'][row])}, sample {int(inputs['sample_id'][row])}"


def find_cause(
    engine: FSDPEngine,
    inputs: Batch,
    rows: Sequence[int],
    loss_fn: LossFunction,
    weight_fn: Callable[[Batch], Tensor],
) -> Cause:
    """Find the first value of a step that is not finite; a collective that takes some passes.

    The weights, and the random numbers of this process, stay as they are; gradients do not.
    """
    if (what := broken_tensors(engine)) is not None:
        return Cause(f"weight {what}")
    random_numbers = rng_state()
    try:
        return (
            broken_column(engine.ranks, inputs)
            or broken_scores(engine, inputs, rows, loss_fn)
            or broken_gradient(engine, inputs, rows, loss_fn, weight_fn)
            or Cause(NOT_SEEN_AGAIN)
        )
    finally:
        set_rng_state(random_numbers)


def broken_tensors(engine: FSDPEngine, gradients: bool = False) -> str | None:
    """Name the parameters of which any rank's shard, or its gradient, is not finite; a collective."""
    mine = set()
    for name, parameter in engine.model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        if tensor is not None and not bool(local_of(tensor).isfinite().all()):
            mine.add(name)
    everywhere = set().union(*engine.ranks.gather_objects(mine))
    broken = [name for name, _ in engine.model.named_parameters() if name in everywhere]
    if not broken:
        return None
    return broken[0] + (f" (and {len(broken) - 1} more)" if len(broken) > 1 else "")


def broken_column(ranks: Ranks, inputs: Batch) -> Cause | None:
    """Find the first column of a batch that is not finite in the loss mask; a collective."""
    names = [name for name in COLUMNS if name in inputs]
    bad = {name: broken_rows(inputs[name], inputs["loss_mask"]) for name in names}
    mine = next((index for index, name in enumerate(names) if bad[name]), len(names))
    first = len(names) - ranks.maximum(len(names) - mine)
    return Cause(COLUMNS[names[first]], bad[names[first]]) if first < len(names) else None


def broken_rows(column: Tensor, mask: Tensor) -> list[int]:
    bad = ~column.isfinite()
    in_row = (bad & mask.bool()).any(1) if bad.dim() == 2 else bad
    return in_row.nonzero()[:, 0].tolist()


def broken_scores(
    engine: FSDPEngine, inputs: Batch, rows: Sequence[int], loss_fn: LossFunction
) -> Cause | None:
    """Find the rows whose log-probs, or scores, by the current weights are not finite, or the loss.

    A collective.
    """
    batch = select_rows(inputs, rows)
    is_scorer = is_score_model(engine.model)
    columns = [engine.compute_values(batch)] if is_scorer else list(engine.score(batch))
    bad = broken_rows(columns[0], batch["loss_mask"])
    if engine.ranks.maximum(len(bad)):
        what = "score of the current weights" if is_scorer else "log-prob of the current weights"
        return Cause(what, [rows[row] for row in bad])
    size = engine.granularity
    units = [list(range(first, first + size)) for first in range(0, len(rows), size)]
    bad = [row for unit in units if not loss_is_finite(engine, batch, columns, unit, loss_fn) for row in unit]
    if engine.ranks.maximum(len(bad)):
        return Cause("loss", [rows[row] for row in bad])
    return None


@torch.no_grad()
def loss_is_finite(
    engine: FSDPEngine, batch: Batch, columns: Sequence[Tensor], unit: Sequence[int], loss_fn: LossFunction
) -> bool:
    own = {str(number): column for number, column in enumerate(columns)}
    flat = engine.packed(select_rows(batch | own, unit))
    return bool(loss_fn(*(flat.pop(name) for name in own), flat).isfinite())


def broken_gradient(
    engine: FSDPEngine,
    inputs: Batch,
    rows: Sequence[int],
    loss_fn: LossFunction,
    weight_fn: Callable[[Batch], Tensor],
) -> Cause | None:
    """Find a row of any rank whose gradient is not finite, by bisection; a collective."""
    ranks, size = engine.ranks, engine.granularity
    counts = ranks.gather_leaders(len(rows) // size)
    suspects = [(rank, unit) for rank, count in enumerate(counts) for unit in range(count)]

    def mine(units: Sequence[tuple[int, int]]) -> list[int]:
        own = [unit for rank, unit in units if rank == ranks.data_parallel_rank]
        return [rows[unit * size + row] for unit in own for row in range(size)]

    def gradient_breaks(units: Sequence[tuple[int, int]]) -> bool:
        return not gradient_is_finite(engine, select_rows(inputs, mine(units)), loss_fn, weight_fn)

    if gradient_breaks([]):  # whatever the rows
        suspects = []
    elif not gradient_breaks(suspects):
        return None
    while len(suspects) > 1:
        half = suspects[: len(suspects) // 2]
        suspects = half if gradient_breaks(half) else suspects[len(half) :]
    if suspects and not gradient_breaks(suspects):
        suspects = []  # only the sum of several rows is too large
    what = broken_tensors(engine, gradients=True)
    assert engine.optimizer is not None
    engine.optimizer.zero_grad()
    return Cause(f"gradient of {what}" if what else "gradient norm", mine(suspects), is_example=True)


def gradient_is_finite(
    engine: FSDPEngine, batch: Batch, loss_fn: LossFunction, weight_fn: Callable[[Batch], Tensor]
) -> bool:
    assert engine.optimizer is not None
    engine.model.train()
    engine.optimizer.zero_grad()
    total_weight = max(float(engine.ranks.sum(weight_fn(batch).double())), 1.0)
    for group in engine.divide(batch):
        engine.backward(batch, group, loss_fn, weight_fn, total_weight)
    return bool(gradient_norm(engine.model.parameters()).isfinite())


def largest_weight(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the largest absolute value of this rank's shards, []; NaN if they contain one."""
    shards = [local_of(parameter) for parameter in parameters]
    # A rank may have no rows of a small parameter.
    return torch.nn.utils.get_total_norm([s.detach() for s in shards if s.numel()], torch.inf)
