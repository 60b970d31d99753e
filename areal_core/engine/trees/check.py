"""Whether a model can compute rows as a tree: what its class says, and what it measures.

A state that passes from token to token, as in Mamba or linear attention, follows one row and cannot
branch. What else a class does by row is found by measurement: rows with common beginnings are
computed as a tree and packed, with the real weights on the real ranks, as in `parity.py`. A model
that draws random numbers while it trains would draw once for tokens that rows share.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from areal_core.engine.attention import FLASH, PACKED
from areal_core.engine.fsdp import FSDPEngine
from areal_core.engine.model import dropout_options
from areal_core.engine.parity import (
    LENGTHS,
    NOISE_FACTOR,
    TOLERANCE,
    batch_of,
    choose_lengths,
    columns_of,
    largest_difference,
    measure_noise,
    own_columns,
    random_rows,
)
from areal_core.engine.sharding import fsdp_module
from areal_core.engine.vision_models import depends_on_length

logger = logging.getLogger(__name__)


def share_prefixes(engine: FSDPEngine, name: str) -> str | None:
    """Let an engine compute rows as trees if its model can, else log why not; a collective.

    Args:
        name: of the model in messages.

    Returns:
        Why rows do not share tokens; None if they do.
    """
    reason = why_no_tree(engine) or why_random(engine) or why_other_logprobs(engine)
    engine.shares_prefixes = reason is None
    if reason is not None and engine.ranks.rank == 0:
        logger.warning("%s: enable_tree_training has no effect, rows do not share tokens: %s", name, reason)
    return reason


def why_no_tree(engine: FSDPEngine) -> str | None:
    """Say what in a model depends on complete rows; None if nothing is known."""
    config = engine.model.config.get_text_config()
    if engine.vision is not None:
        return "tokens of pictures are not shared"
    if not engine.packs_rows:
        return f"rows of a {config.model_type!r} model are computed one at a time"
    if engine.numbers_rows:
        return f"layers of a {config.model_type!r} model carry a state along a row, which cannot branch"
    if not str(config._attn_implementation).startswith((PACKED, FLASH)):
        return f"a {config.model_type!r} model has an attention of its own"
    if any(depends_on_length(module) for module in engine.model.modules()):
        return "rotary embeddings depend on the length of the row"
    dropouts = {key: value for key, value in dropout_options(config).items() if value > 0}
    if dropouts and engine.optimizer is not None:
        listed = ", ".join(f"{key}={value}" for key, value in dropouts.items())
        return f"dropout is drawn for each row ({listed}): set disable_dropout to true"
    return None


def why_random(engine: FSDPEngine) -> str | None:
    """Say that a model to train draws random numbers by token, as phimoe for its experts.

    A collective. None if the forward of training leaves the state of the generators as it is, or
    changes it by as much for few tokens as for many: OPT and BioGPT draw one number a layer.
    """
    if engine.optimizer is None:
        return None
    config, device = engine.model.config.get_text_config(), engine.ranks.device
    on_gpu = [device] if device.type == "cuda" else []

    def state_after(lengths: Sequence[int]) -> Tensor:
        with torch.random.fork_rng(on_gpu), torch.no_grad():
            engine.forward(batch_of(random_rows(lengths, config.vocab_size)))
            return torch.cat([torch.get_rng_state(), *map(torch.cuda.get_rng_state, on_gpu)])

    engine.model.train()
    draws = not torch.equal(state_after(LENGTHS), state_after(LENGTHS[:1]))
    # A forward without a backward leaves the weights outside of layers gathered.
    fsdp_module(engine.model).reshard()
    if draws:
        return f"a {config.model_type!r} model draws random numbers for each token while it trains"
    return None


def why_other_logprobs(engine: FSDPEngine) -> str | None:
    """Say by how much trees differ from packed rows; None if by rounding; a collective."""
    config = engine.model.config.get_text_config()
    lengths, _ = choose_lengths(config, engine.ranks.device.type)
    rows = branching_rows(random_rows(lengths, config.vocab_size))
    packed = columns_of(engine, rows)
    engine.shares_prefixes = True
    difference = largest_difference(engine, columns_of(engine, rows), packed)
    tolerance = TOLERANCE[engine.dtype]
    if difference > tolerance:
        noise = measure_noise(engine, rows[0], own_columns(engine, rows[0]))
        tolerance = max(tolerance, NOISE_FACTOR * noise)
    fsdp_module(engine.model).reshard()
    if difference > tolerance:
        return f"a tree changes log-probs by up to {difference:.2g} nats, and rounding by {tolerance:.2g}"
    return None


def branching_rows(rows: Sequence[Tensor]) -> list[Tensor]:
    """Return rows of a tree with branches in branches, a repeated row and one that ends early.

    Args:
        rows: int64 [length] each; the first and the last have several tokens.
    """
    first, _, last, *longer = rows
    branch = torch.cat([first[:7], last])
    found = [first, branch, torch.cat([branch[:9], first]), last, first[:4], first]
    for row in longer:
        found += [row, torch.cat([row[:-2], last]), torch.cat([row[:3], last])]
    return found
