"""Score sampled tokens with a Hugging Face model: logprob, entropy, rank and top tokens.

Rows are packed by length without padding, and logits are computed for a few tokens at a time:
float32 `[tokens, vocab]` never exists.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from areal_core.config.vision_checks import model_type
from areal_core.data.batch import first_fit_decreasing
from areal_core.data.processor import VisionProcessor, load_processor
from areal_core.engine.logits import LogitMap, measure_logit_map, transformer
from areal_core.engine.logprobs import LOGITS_AT_A_TIME
from areal_core.engine.model import attention_of, cache_argument, load_model, own_attention, set_attention
from areal_core.engine.parity import TOLERANCE, choose_lengths, depends_on_forward, random_rows
from areal_core.engine.routers import Routers
from areal_core.engine.vision_models import choose_frequencies_by_row, plain_inputs
from areal_core.errors import ModelError
from consistency.tokens import Floats, Ints, Sequences

TOKENS_PER_PASS = 4096
NO_ROWS = np.empty(0, np.int64)
# Logits that are reduced at a time on a CPU: 2 MB, which stay in its caches from pass to pass.
REDUCED_AT_A_TIME = {"cpu": 1 << 19, "cuda": 1 << 27}
TOP_BLOCK = 128  # columns of which the largest is taken first to find the most likely tokens
HIDDEN_FACTOR = 5.0  # relative rounding of hidden states to that of log-probs, in nats
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Scores:
    """One value per scored token, [n], in the order of `Sequences.scored`.

    All are under softmax(logits / temperature): `logprob`; `entropy` and `variance` of the logprob
    of a token drawn from the distribution; `rank`, the number of more likely tokens, and
    `mass_before`, their total probability; `top_ids` and `top_logprobs` [n, k]. Tokens of rows not scored in detail have a `logprob` alone:
    the rest is NaN, and `rank` is -1.
    """

    logprob: Floats
    entropy: Floats
    variance: Floats
    rank: Ints
    mass_before: Floats
    top_ids: Ints
    top_logprobs: Floats

    @classmethod
    def empty(cls, num_tokens: int, top_k: int) -> Self:
        """Allocate unset scores of `num_tokens` tokens."""
        logprob, entropy, variance, mass_before = (np.full(num_tokens, np.nan) for _ in range(4))
        rank, top_ids = np.full(num_tokens, -1), np.zeros((num_tokens, top_k), np.int64)
        top_logprobs = np.full((num_tokens, top_k), np.nan)
        return cls(logprob, entropy, variance, rank, mass_before, top_ids, top_logprobs)


@dataclass(frozen=True)
class Head:
    """The output layer, and what the model's class does before and after it."""

    layer: torch.nn.Linear
    logit_map: LogitMap

    @property
    def vocabulary_size(self) -> int:
        """Number of rows of the output layer."""
        return self.layer.weight.shape[0]

    def uncapped(self, hidden: Tensor) -> Tensor:
        """Map hidden [rows, dim] to float32 logits [rows, vocab] before the cap."""
        if self.logit_map.input_factor != 1.0:
            hidden = hidden * self.logit_map.input_factor
        logits: Tensor = self.layer(hidden.to(self.layer.weight.dtype)).float()
        return replace(self.logit_map, softcap=None).apply(logits)

    def cap(self, logits: Tensor) -> Tensor:
        """Apply the model's soft cap, if it has one."""
        return LogitMap(softcap=self.logit_map.softcap).apply(logits)

    def rows_at_a_time(self, device: torch.device) -> int:
        """Number of rows of logits to hold at once."""
        return max(1, LOGITS_AT_A_TIME[device.type] // self.vocabulary_size)

    def rows_reduced(self, device: torch.device) -> int:
        return max(1, REDUCED_AT_A_TIME[device.type] // self.vocabulary_size)


@dataclass(frozen=True)
class Scorer:
    """A model in evaluation mode; `packs_rows` if packed rows do not change each other.

    `processor` makes the pixels of images, and is None for a text model. `marks_images` gives the
    model the types of its tokens; without them, images have the positions and the causal attention
    of text. `routers`, of a scorer that packs rows, replay the experts of the rows.
    """

    model: Any
    transformer: torch.nn.Module
    head: Head
    packs_rows: bool
    processor: VisionProcessor | None = None
    marks_images: bool = True
    routers: Routers | None = None

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return torch.device(self.model.device)


def load_scorer(path: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Scorer:
    """Load a checkpoint in Hugging Face format.

    Raises:
        ModelError: the checkpoint cannot be read.
    """
    refuse_lone_vision_model(Path(path))
    model: Any = load_model(path, dtype=dtype)
    return scorer_of(model.to(device), load_processor(path) if sees_images(model.config) else None)


def sees_images(config: Any) -> bool:
    """Return whether a config (Transformers) is that of an image-text model."""
    return getattr(config, "vision_config", None) is not None


def refuse_lone_vision_model(folder: Path) -> None:
    """Raise ModelError for an image-text model without its processor."""
    is_vision = model_type(str(folder), "vision_config") is not None
    if is_vision and not any((folder / name).is_file() for name in PROCESSOR_FILES):
        raise ModelError(
            f"{folder} is an image-text model without its processor (none of {', '.join(PROCESSOR_FILES)}): "
            "copy the processor's files there, or name the text model"
        )


def scorer_of(model: Any, processor: VisionProcessor | None = None) -> Scorer:
    """Make a read-only scorer of a loaded model: no gradients, no dropout.

    `processor` is that of an image-text model.
    """
    head = Head(model.get_output_embeddings(), measure_logit_map(model))
    find_hidden = transformer(model)
    choose_frequencies_by_row(find_hidden)
    scorer = Scorer(model.eval().requires_grad_(False), find_hidden, head, packs_rows=True)
    if processor is None and packs_rows(scorer):
        return scorer
    set_attention(model, own_attention(model))
    return replace(scorer, packs_rows=False, processor=processor)


def packs_rows(scorer: Scorer) -> bool:
    """Return whether packed rows of random tokens get the hidden states that each has alone."""
    config = scorer.model.config.get_text_config()
    if depends_on_forward(config) is not None:
        return False
    lengths, _ = choose_lengths(config, scorer.device.type)
    rows = [row.numpy() for row in random_rows(lengths, config.vocab_size)]
    try:
        packed = hidden_states(scorer, np.concatenate(rows), lengths)
    except TypeError:  # its layers do not accept the lengths of packed rows
        return False
    with attention_of(scorer.model, own_attention(scorer.model)):
        alone = hidden_states(replace(scorer, packs_rows=False), np.concatenate(rows), lengths)
    error = (packed - alone).abs().max() / alone.abs().max()
    return bool(error <= HIDDEN_FACTOR * TOLERANCE[scorer.model.dtype])


def score(
    scorer: Scorer,
    sequences: Sequences,
    *,
    temperature: float = 1.0,
    top_k: int = 5,
    tokens_per_pass: int = TOKENS_PER_PASS,
    detailed_rows: Ints | None = None,
    progress: Progress = lambda num_tokens: None,
) -> Scores:
    """Score every sampled token.

    `top_k` most likely tokens are kept, of `detailed_rows` or of all; `progress` is called with the
    number of tokens of each finished pass.
    """
    top_k = min(top_k, scorer.head.vocabulary_size)
    result = Scores.empty(len(sequences.scored), top_k)
    row_of_place = sequences.row_of_token[sequences.scored]
    is_detailed = np.ones(len(row_of_place), bool)
    if detailed_rows is not None:
        is_detailed = np.isin(row_of_place, detailed_rows)
    size = scorer.head.rows_at_a_time(scorer.device)
    for places, hidden, labels, num_tokens in predictors(scorer, sequences, tokens_per_pass):
        for in_detail in (True, False):
            wanted = np.flatnonzero(is_detailed[places] == in_detail)
            for begin in range(0, len(wanted), size):
                rows = torch.as_tensor(wanted[begin : begin + size], device=hidden.device)
                logits = scorer.head.cap(scorer.head.uncapped(hidden[rows]))
                columns = score_logits(
                    logits,
                    labels[rows],
                    temperature,
                    top_k if in_detail else None,
                    scorer.head.rows_reduced(scorer.device),
                )
                for name, values in columns.items():
                    getattr(result, name)[places[wanted[begin : begin + size]]] = values.cpu().numpy()
        progress(num_tokens)
    return result


def score_logprobs(
    scorer: Scorer, sequences: Sequences, *, temperature: float = 1.0, tokens_per_pass: int = TOKENS_PER_PASS
) -> Floats:
    return score(
        scorer,
        sequences,
        temperature=temperature,
        top_k=1,
        tokens_per_pass=tokens_per_pass,
        detailed_rows=NO_ROWS,
    ).logprob


def predictors(
    scorer: Scorer, sequences: Sequences, tokens_per_pass: int
) -> Iterator[tuple[Ints, Tensor, Tensor, int]]:
    """Run forward passes over the rows with scored tokens.

    Yields:
        Indices among the scored tokens [m], hidden states that predict them [m, dim], labels [m],
        and the number of tokens of the pass.
    """
    lengths = np.diff(sequences.cu_seqlens).tolist()
    rows_with_scores = set(np.unique(sequences.row_of_token[sequences.scored]).tolist())
    place_of_token = np.full(len(sequences.input_ids), -1)
    place_of_token[sequences.scored] = np.arange(len(sequences.scored))
    for pack in first_fit_decreasing(lengths, max(tokens_per_pass, max(lengths, default=0))):
        rows = [row for row in pack if row in rows_with_scores]
        if not rows:
            continue
        tokens = np.concatenate([np.arange(*sequences.cu_seqlens[row : row + 2]) for row in rows])
        images = None if sequences.images is None else [sequences.images[row] for row in rows]
        if scorer.routers is not None and sequences.experts is not None:
            scorer.routers.replay(torch.from_numpy(sequences.experts[tokens]), scorer.device)
        hidden = hidden_states(scorer, sequences.input_ids[tokens], [lengths[row] for row in rows], images)
        targets = np.flatnonzero(place_of_token[tokens] >= 0)
        labels = torch.as_tensor(sequences.input_ids[tokens][targets], device=scorer.device)
        at = torch.as_tensor(targets - 1, device=scorer.device)
        yield place_of_token[tokens][targets], hidden[at], labels, len(tokens)


def hidden_states(
    scorer: Scorer, input_ids: Ints, lengths: Sequence[int], images: Sequence[Sequence[bytes]] | None = None
) -> Tensor:
    """Compute the last hidden states [tokens, dim] of packed, isolated sequences.

    `images` are those of each sequence, for a scorer with a processor.
    """
    tokens = torch.as_tensor(input_ids, dtype=torch.int64, device=scorer.device)[None]
    if not scorer.packs_rows:
        rows = tokens.split(list(lengths), dim=1)
        alone = [
            scorer.transformer(
                input_ids=row, use_cache=False, **image_inputs(scorer, row, pictures)
            ).last_hidden_state[0]
            for row, pictures in zip(rows, images or [()] * len(rows), strict=True)
        ]
        return torch.cat(alone)
    positions = torch.cat([torch.arange(length) for length in lengths])
    output = scorer.transformer(
        input_ids=tokens,
        position_ids=positions[None].to(scorer.device),
        attention_mask=None,
        use_cache=False,
        sequence_lengths=list(lengths),
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


@torch.no_grad()
def read_prefix(scorer: Scorer, ids: Ints) -> DynamicCache:
    """Return the keys and values of the first tokens of a row; empty of none."""
    cache = DynamicCache()
    if len(ids):
        tokens = torch.as_tensor(ids, device=scorer.device)[None]
        with attention_of(scorer.model, own_attention(scorer.model)):
            scorer.transformer(
                input_ids=tokens, use_cache=True, **{cache_argument(type(scorer.transformer).forward): cache}
            )
    return cache


@torch.no_grad()
def logprobs_after(
    scorer: Scorer, cache: DynamicCache, ids: Ints, at: Ints, temperature: float = 1.0
) -> Floats:
    """Score the tokens `at` places of the rest of a row, after the keys and values of its beginning."""
    tokens, places = (torch.as_tensor(values, device=scorer.device) for values in (ids, at))
    argument = cache_argument(type(scorer.transformer).forward)
    with attention_of(scorer.model, own_attention(scorer.model)):
        read = scorer.transformer(input_ids=tokens[None], use_cache=True, **{argument: cache})
    logits = scorer.head.cap(scorer.head.uncapped(read.last_hidden_state[0, places - 1]))
    return score_logits(logits, tokens[places], temperature, None)["logprob"].double().cpu().numpy()


def image_inputs(scorer: Scorer, input_ids: Tensor, images: Sequence[bytes]) -> dict[str, Tensor]:
    """Return the options of a row's forward besides its ids [1, tokens]; none without images."""
    if not images:
        return {}
    assert scorer.processor is not None, "a text model has no images"
    types = (input_ids[0] == scorer.processor.image_token_id).long() * scorer.marks_images
    pixels = {key: tensor.to(scorer.device) for key, tensor in scorer.processor.pixels(images).items()}
    pixels["pixel_values"] = pixels["pixel_values"].to(scorer.model.dtype)
    return plain_inputs(scorer.model, types, pixels)


def score_logits(
    logits: Tensor, labels: Tensor, temperature: float, top_k: int | None, rows_at_a_time: int = 1 << 30
) -> dict[str, Tensor]:
    """Compute the fields of `Scores` for some rows, `logprob` alone if `top_k` is None.

    `logits`, float32 [rows, vocab], is overwritten.
    """
    parts = [
        reduced(part, of_part, temperature, top_k)
        for part, of_part in zip(logits.split(rows_at_a_time), labels.split(rows_at_a_time), strict=True)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def reduced(logits: Tensor, labels: Tensor, temperature: float, top_k: int | None) -> dict[str, Tensor]:
    """Compute the fields of `score_logits` for rows whose logits are reduced together."""
    if temperature != 1.0:
        logits = logits.div_(temperature)
    if top_k is None:
        shifted = logits.sub_(logits.amax(1, keepdim=True))
        at_label = shifted.gather(1, labels[:, None])[:, 0]
        return {"logprob": at_label - shifted.exp_().sum(1).log()}
    top_ids = most_likely(logits, top_k)
    shifted = logits.sub_(logits.gather(1, top_ids[:, :1]))
    at_label = shifted.gather(1, labels[:, None])  # [rows, 1]
    top_logits = shifted.gather(1, top_ids)
    weights = shifted.exp()
    total = weights.sum(1)
    log_total = total.log()
    # 0 and 1 as floats, whose sums are exact up to 2**24: sums of booleans take five times as long
    likelier = torch.gt(shifted, at_label, out=torch.empty_like(shifted))
    rank = likelier.sum(1).long()
    mass_before = likelier.mul_(weights).sum(1) / total
    weighted = weights.mul_(shifted)
    mean = weighted.sum(1) / total
    square = weighted.mul_(shifted).sum(1) / total
    return {
        "logprob": at_label[:, 0] - log_total,
        "entropy": log_total - mean,
        "variance": (square - mean**2).clamp_(min=0),
        "rank": rank,
        "mass_before": mass_before,
        "top_ids": top_ids,
        "top_logprobs": top_logits - log_total[:, None],
    }


def most_likely(logits: Tensor, count: int) -> Tensor:
    """Return the columns of the largest logits of each row [rows, count], descending.

    They lie in as many blocks of columns as there are of them, those with the largest maxima:
    `topk` of complete rows takes ten times as long.
    """
    num_blocks = logits.shape[1] // TOP_BLOCK
    if num_blocks <= count:
        return logits.topk(count, dim=1).indices
    end = num_blocks * TOP_BLOCK
    blocks = logits[:, :end].unflatten(1, (num_blocks, TOP_BLOCK)).amax(2).topk(count, dim=1).indices
    inside = torch.arange(TOP_BLOCK, device=logits.device)
    after = torch.arange(end, logits.shape[1], device=logits.device).expand(len(logits), -1)
    columns = torch.cat([(blocks[:, :, None] * TOP_BLOCK + inside).flatten(1), after], dim=1)
    return columns.gather(1, logits.gather(1, columns).topk(count, dim=1).indices)
