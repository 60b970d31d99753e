"""Check, before the first step, that packed rows get the log-probs that each row has alone.

A family may carry state from one packed row to the next, ignore the lengths of packed rows, or do
more to its logits than training follows: every metric of the run would still look plausible. So a
few rows of random tokens are computed both as training does and one at a time by the model's own
forward, with the real weights on the real ranks.

```
packed rows -- as training computes them --> log-probs, entropies --+
                                                                    +--> largest difference, against rounding
each row alone -- the class's own forward --> logits ---------------+
```

Where packed rows differ, layers get the numbers of the rows, if they can use them, or else rows are
computed one at a time; both are checked again.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, pad
from transformers import PretrainedConfig

from areal_core.data.batch import Batch
from areal_core.engine.attention import INVARIANT, MIN_KEYS, InvariantAttention, attend_rows
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.logits import output_layer, replaced_forward
from areal_core.engine.model import attention_of, own_attention, set_attention
from areal_core.engine.scores import is_score_model
from areal_core.engine.sequence_parallel import MIN_ROWS
from areal_core.engine.sharding import fsdp_module
from areal_core.engine.tensor_parallel import whole_vocabulary
from areal_core.engine.vision_models import plain_inputs
from areal_core.errors import EngineError, ModelError

logger = logging.getLogger(__name__)

LENGTHS = (11, 1, 6)  # of the rows; one more is longer than the sliding window
LONGEST = {"cpu": 512, "cuda": 8192}  # tokens of that row; a larger window is reported as not checked
# Differences in nats below which no model is refused: rounding that the noise of two rows does not
# show. Families that pack wrongly differ by 0.05 to 4 in float32.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.01, torch.float16: 0.002}
# Of products and of attention, in `require_invariant_products`.
CHECKED_ROWS, CHECKED_KEYS = (MIN_ROWS, 17, 33, 512), (MIN_KEYS, 33, 130, 200, 300, 700, 1024)
NOISE_FACTOR = 4.0  # of the measured noise
LEAK_FACTOR = 1 / 4  # of the tolerance: the same shapes are computed twice, so rounding cancels
# Options of layers whose attention depends on the whole forward; a few short rows do not show it.
DEPENDS_ON_FORWARD = {
    "attention_chunk_size": "chunks of attention are counted from the start of the forward",
    "attn_temperature_tuning": "attention is scaled by the position in the forward",
    "index_topk": "attention selects among all tokens of the forward",
    "keep_window_size": "attention selects among all tokens of the forward",
}


@dataclass(frozen=True)
class Parity:
    """The result of a check: differences are the largest of any token, in nats.

    Args:
        is_equal: rows as training computes them are equal to rows alone, within `tolerance`.
        packs_rows: training computes packed rows in one forward.
        reason: why it does not, None if it does.
        difference: of log-probs and entropies (scores, of a reward model), as training computes.
        packed_difference: the same of packed rows; None if they were not tried.
        tolerance: the larger of the dtype's minimum and `NOISE_FACTOR` times `noise`.
        noise: between forwards of the class with other shapes or another attention; None if the
            minimum was enough.
        lengths: of the rows.
        unchecked: what the rows are too short to show.
    """

    model_type: str
    dtype: str
    is_equal: bool
    packs_rows: bool
    reason: str | None
    difference: float
    packed_difference: float | None
    tolerance: float
    noise: float | None
    lengths: tuple[int, ...]
    unchecked: tuple[str, ...]


def require_parity(engine: FSDPEngine, name: str) -> Parity:
    """Check an engine and choose how it computes rows; a collective.

    Args:
        name: of the model in messages.

    Raises:
        ModelError: its log-probs differ from those of the model's own forward, also with one row at
            a time, or only that way on ranks that share a row.
    """
    parity = measure_parity(engine)
    if not parity.is_equal:
        raise ModelError(
            f"{name}: a {parity.model_type!r} model gets log-probs that differ by {parity.difference:.3g} nats from "
            f"those of its own forward in Transformers ({parity.dtype} rounding is up to {parity.tolerance:.2g}): "
            f"{parity.reason}; train another model, or set actor.parity_check=false to train it nevertheless"
        )
    refuse_split_rows(engine, parity, name)
    if is_invariant(engine):
        require_invariance(engine, name)
    if parity.reason is not None and engine.ranks.rank == 0:
        logger.warning(
            "%s: rows of a %r model are computed one at a time, which is slower: %s",
            name,
            parity.model_type,
            parity.reason,
        )
    return parity


def is_invariant(engine: FSDPEngine) -> bool:
    """Return whether log-probs are to have the same bits in any batch (`attn_impl`)."""
    return engine.model.config.get_text_config()._attn_implementation == INVARIANT


def require_invariance(engine: FSDPEngine, name: str) -> None:
    """Check on a few rows that log-probs have the same bits packed and alone; a collective.

    Raises:
        ModelError: they have not, or ranks share sums.
    """
    if engine.ranks.tensor_parallel_size > 1:
        raise ModelError(
            f"{name}: attn_impl is 'batch_invariant' with t{engine.ranks.tensor_parallel_size} in the allocation, "
            f"whose ranks add parts of sums in another order: leave t out"
        )
    require_invariant_products(engine.model)
    rows = random_rows(LENGTHS, engine.model.config.get_text_config().vocab_size)
    difference = largest_difference(
        engine, columns_of(engine, rows), [columns_of(engine, [row])[0] for row in rows]
    )
    if difference > 0:
        raise ModelError(
            f"{name}: attn_impl is 'batch_invariant', and packed rows of this {engine.model.config.model_type!r} "
            f"model differ from rows alone by {difference:.3g} nats: use attn_impl=sdpa"
        )


@torch.no_grad()
def require_invariant_products(model: nn.Module) -> None:
    """Check that products with the model's weights, and attention, have the same bits in any batch.

    Raises:
        ModelError: they have not on this machine.
    """
    generator = torch.Generator().manual_seed(0)
    linears = (module for module in model.modules() if isinstance(module, nn.Linear))
    shapes = {(layer.in_features, layer.out_features, layer.weight.dtype) for layer in linears}
    for width, height, dtype in sorted(shapes, key=str):
        rows = torch.randn(max(CHECKED_ROWS), width, generator=generator).to(dtype)
        weight = torch.randn(height, width, generator=generator).to(dtype)
        expected = linear(rows, weight)
        for count in CHECKED_ROWS:
            if not torch.equal(linear(rows[-count:], weight), expected[-count:]):
                raise ModelError(
                    f"attn_impl is 'batch_invariant', and this machine computes a product of {count} rows and a "
                    f"[{height}, {width}] matrix to other bits than one of {max(CHECKED_ROWS)}: use attn_impl=sdpa"
                )
    query, key, value = torch.randn(3, 1, 2, max(CHECKED_KEYS), 64, generator=generator)
    together = InvariantAttention.apply(query, key, value, 0.125)[0]  # [tokens, heads, head_dim]
    for count in CHECKED_KEYS:
        alone = attend_rows(
            query[:, :, count - 1 : count],
            key[:, :, :count],
            value[:, :, :count],
            torch.ones(1, 1, 1, count, dtype=torch.bool),
            0.125,
        )
        if not torch.equal(alone[0, 0], together[count - 1]):
            raise ModelError(
                f"attn_impl is 'batch_invariant', and this machine computes attention of one token over {count} "
                f"keys to other bits than of {max(CHECKED_KEYS)} tokens at once: use attn_impl=sdpa"
            )


def refuse_split_rows(engine: FSDPEngine, parity: Parity, name: str) -> None:
    """Raise ModelError if ranks share a row that must be computed alone."""
    if not parity.packs_rows and engine.ranks.sequence_parallel_size > 1:
        raise ModelError(
            f"{name}: rows of a {parity.model_type!r} model cannot be split over "
            f"c{engine.ranks.sequence_parallel_size} ranks: {parity.reason}; leave c out of the allocation"
        )


def measure_parity(engine: FSDPEngine) -> Parity:
    """Compare rows as training computes them with rows alone; a collective.

    Sets `engine.packs_rows`, and with it the model's attention.

    Raises:
        ModelError: the model's own forward fails, or has no finite log-probs.
    """
    try:
        parity = _measure_parity(engine)
        # A forward without a backward leaves the weights outside of layers gathered.
        fsdp_module(engine.model).reshard()
        return parity
    except (EngineError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        config = engine.model.config.get_text_config()
        raise ModelError(
            f"a {config.model_type!r} model cannot be computed in {engine.dtype}: {str(error).splitlines()[0]}; "
            f"use another actor.dtype, or train another model"
        ) from error


def _measure_parity(engine: FSDPEngine) -> Parity:
    config = engine.model.config.get_text_config()
    lengths, unchecked = choose_lengths(config, engine.ranks.device.type)
    rows = random_rows(lengths, config.vocab_size)
    expected = [own_columns(engine, row) for row in rows]
    if not all(bool(columns.isfinite().all()) for columns in expected):
        raise ModelError(
            f"a {config.model_type!r} model has log-probs that are not finite in its own forward: its weights are "
            f"damaged, or {engine.dtype} is too narrow for them"
        )
    tolerance, noise = TOLERANCE[engine.dtype], None
    reason, packed = depends_on_forward(config), None
    if reason is None:
        packed, leak = measure_packed(engine, rows, expected)
        if packed > tolerance:
            noise = measure_noise(engine, rows[0], expected[0])
            tolerance = max(tolerance, NOISE_FACTOR * noise)
        reason = why_not_packed(packed, leak, tolerance)
    if reason is not None and packed is not None and engine.ranks.sequence_parallel_size == 1:
        engine.numbers_rows = True
        numbered, leak = measure_packed(engine, rows, expected)
        engine.numbers_rows = why_not_packed(numbered, leak, tolerance) is None
        if engine.numbers_rows:
            reason, packed = None, numbered
    difference = packed
    if reason is not None or packed is None:
        compute_rows_alone(engine)
        difference = measure_rows(engine, rows, columns_of(engine, rows), expected)
        if difference > tolerance:
            reason = "its class computes logits, masks or positions in a way that training does not follow"
    assert difference is not None
    return Parity(
        config.model_type,
        str(engine.dtype).removeprefix("torch."),
        difference <= tolerance,
        engine.packs_rows,
        reason,
        difference,
        packed,
        tolerance,
        noise,
        lengths,
        unchecked,
    )


def measure_packed(
    engine: FSDPEngine, rows: Sequence[Tensor], expected: Sequence[Tensor]
) -> tuple[float, float]:
    found = columns_of(engine, rows)
    other = (rows[0] + 1) % engine.model.config.get_text_config().vocab_size
    leak = largest_difference(engine, columns_of(engine, [other, *rows[1:]])[1:], found[1:])
    return measure_rows(engine, rows, found, expected), leak


def measure_rows(
    engine: FSDPEngine, rows: Sequence[Tensor], found: Sequence[Tensor], expected: Sequence[Tensor]
) -> float:
    """Return how much rows, and of a vision model a row with a picture, differ; a collective."""
    difference = largest_difference(engine, found, expected)
    return difference if engine.vision is None else max(difference, measure_images(engine, rows))


def measure_images(engine: FSDPEngine, rows: Sequence[Tensor]) -> float:
    """Return how much a row with a picture, between rows of text, differs; a collective."""
    assert engine.vision is not None
    example = engine.vision.example(rows[0])
    ids, types = example["input_ids"][0].long(), example["mm_token_type_ids"][0].long()
    pixels: dict[str, Tensor] = {
        key: example[key] for key in ("pixel_values", "image_grid_thw") if key in example
    }
    batch = batch_of([rows[0], ids, rows[-1]])
    batch["mm_token_type_ids"] = batch_of([rows[0] * 0, types, rows[-1] * 0])["input_ids"]
    counts = {"image_count": torch.tensor([0, 1, 0], dtype=torch.int32)}
    engine.model.eval()
    with torch.no_grad():
        found = engine.forward(batch | pixels | counts | {"image_units": example["image_units"]}).cpu()
    mine = found[len(rows[0]) :][: len(ids) - 1]
    return largest_difference(
        engine, [mine], [own_columns(engine, ids, plain_inputs(engine.model, types, pixels))]
    )


def why_not_packed(difference: float, leak: float, tolerance: float) -> str | None:
    """Say why packed rows are wrong; None if they are right."""
    if leak > LEAK_FACTOR * tolerance:
        return f"other tokens in one packed row change the log-probs of the next by up to {leak:.2g} nats"
    if difference > tolerance:
        return f"packed rows differ from rows alone by up to {difference:.2g} nats"
    return None


def measure_noise(engine: FSDPEngine, row: Tensor, expected: Tensor) -> float:
    """Return what rounding changes in the class's own forward; a collective.

    That is another shape, in a batch of two rows, and another kernel of attention.
    """
    others = [own_columns(engine, row, twice=True)]
    with sdpa_kernel(SDPBackend.MATH):
        others.append(own_columns(engine, row))
    return largest_difference(engine, others, [expected, expected])


def compute_rows_alone(engine: FSDPEngine) -> None:
    """Compute each row in a forward of its own, with the attention of the model's class.

    Raises:
        ModelError: the engine's log-probs are to have the same bits in any batch.
    """
    if is_invariant(engine):
        raise ModelError(
            f"attn_impl is 'batch_invariant', and rows of a {engine.model.config.model_type!r} model cannot be "
            f"packed: use attn_impl=sdpa"
        )
    engine.packs_rows = False
    set_attention(engine.model, own_attention(engine.model))


def choose_lengths(config: PretrainedConfig, device: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the lengths of the rows, and what they are too short to show."""
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or window <= 0:
        return LENGTHS, ()
    if window + 3 > LONGEST[device]:
        return LENGTHS, (f"rows longer than the sliding window of {window} tokens",)
    return (*LENGTHS, window + 3), ()


def depends_on_forward(config: PretrainedConfig) -> str | None:
    """Say why a family's rows cannot be packed, whatever they measure; None if nothing is known."""
    for name, reason in DEPENDS_ON_FORWARD.items():
        if value := getattr(config, name, None):
            return f"{reason} ({name} is {value})"
    return None


def random_rows(lengths: Sequence[int], vocab_size: int) -> list[Tensor]:
    """Draw int64 tokens [length] for each row, without using the random state of the run."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


def batch_of(rows: Sequence[Tensor]) -> Batch:
    """Return rows of tokens as a batch in which every next token is trained on."""
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    positions = torch.arange(width)
    return {
        "input_ids": torch.stack([pad(row, (0, width - len(row))) for row in rows]).int(),
        "attention_mask": positions < lengths[:, None],
        "loss_mask": (positions < lengths[:, None] - 1).int(),
    }


@torch.no_grad()
def columns_of(engine: FSDPEngine, rows: Sequence[Tensor]) -> list[Tensor]:
    """Compute rows as training does; a collective.

    Returns:
        Per row, float32 [length - 1, 2] logprob and entropy of the next token; of a reward model,
        [length, 1] scores.
    """
    engine.model.eval()
    parts = engine.forward(batch_of(rows)).cpu().split([len(row) for row in rows])
    return list(parts) if is_score_model(engine.model) else [part[:-1] for part in parts]


@torch.no_grad()
def own_columns(
    engine: FSDPEngine, row: Tensor, options: dict[str, Tensor] | None = None, *, twice: bool = False
) -> Tensor:
    """Compute one row by the forward of the model's class, without packing; a collective.

    Args:
        options: of the forward, for the row's pictures.
        twice: in a batch of two rows, which changes the rounding only.

    Returns:
        As `columns_of`.
    """
    engine.wake()
    engine.model.eval()
    ids = torch.stack([row, row.roll(1)] if twice else [row]).to(engine.ranks.device)
    if is_score_model(engine.model):
        with attention_of(engine.model, own_attention(engine.model)):
            scores: Tensor = engine.model(input_ids=ids, use_cache=False)[0]
        return scores.float().cpu()
    if len(row) == 1:
        return torch.zeros(0, 2)  # nothing is predicted; it only has to leave its neighbours alone
    with own_forward(engine):
        images = {key: tensor.to(ids.device) for key, tensor in (options or {}).items()}
        logits = engine.model(input_ids=ids, use_cache=False, **images).logits[0, :-1]  # [length - 1, vocab]
    log_p = torch.log_softmax(logits.float() / engine.temperature, -1).cpu()
    logprobs = log_p.gather(1, row[1:, None])[:, 0]
    return torch.stack([logprobs, -(log_p.exp() * log_p).sum(-1)], 1)


@contextmanager
def own_forward(engine: FSDPEngine) -> Iterator[None]:
    """Let the model compute logits by forward and attention of its class, in the body.

    The outputs of the output layer become float32: its bias, and what the class does to logits
    afterwards, scaling or a soft cap, would round to the dtype of compute, as training does not.
    """
    model, ranks = engine.model, engine.ranks
    head = output_layer(model)
    assert head is not None
    whole = whole_vocabulary(head, ranks.tensor_mesh) if ranks.tensor_parallel_size > 1 else None

    def compute(features: Tensor) -> Tensor:
        weight, bias = cast(nn.Linear, head).weight, cast(nn.Linear, head).bias
        logits = (linear(features, weight) if whole is None else whole(features)).float()
        return logits if bias is None else logits + bias

    with (
        replaced_forward(model, None),
        replaced_forward(head, compute),
        attention_of(model, own_attention(model)),
    ):
        yield


def largest_difference(engine: FSDPEngine, found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference on any rank; infinity if one is not finite; a collective."""
    pairs = zip(found, expected, strict=True)
    differences = torch.cat([(a - b).abs().nan_to_num(torch.inf, torch.inf).flatten() for a, b in pairs])
    return max(engine.ranks.gather_objects(float(differences.max())))
