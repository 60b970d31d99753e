"""One planted fault at a time: what the engine reports, and what a user can supply to find it."""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from consistency import transforms
from consistency.alternatives import probes
from consistency.alternatives.variants import best_of, shards_of, variant_alternatives, variants_of
from consistency.case import NOISE, Request, Setting
from consistency.score import Scorer, logprobs_after, read_prefix, score, scorer_of
from consistency.tokens import Completion, Sequences, sequences_from_completions
from consistency.transforms import Prediction

from .faulty_engine import FaultyEngine, draw, report, sample_rows, sequences_of
from .models import BOS, VOCABULARY_SIZE, peaked_model

NUM_ROWS, PROMPT_LENGTH, NUM_TOKENS = 40, 12, 80
SETTING = Setting(vocabulary_size=VOCABULARY_SIZE, bos_token_id=BOS, noise=NOISE["bfloat16"])


@dataclass(frozen=True)
class World:
    """A trainer's model, prompts, and how noisy the engine is."""

    trainer: Scorer
    prompts: torch.Tensor
    noise: float
    seed: int

    def engine(self, scorer: Scorer | None = None, **transforms) -> FaultyEngine:
        return FaultyEngine(scorer or self.trainer, noise=self.noise, **transforms)

    def sample(self, scorer: Scorer | None = None, context=None, **transforms) -> Sequences:
        if scorer is None and context is None and not transforms:
            return copy.deepcopy(self.sound)
        engine = self.engine(scorer, **transforms)
        return sample_rows(engine, self.prompts, NUM_TOKENS, self.seed, context)

    @functools.cached_property
    def sound(self) -> Sequences:
        """What an engine without a fault samples. Not to be changed."""
        return sample_rows(self.engine(), self.prompts, NUM_TOKENS, self.seed)

    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)


@dataclass(frozen=True)
class Given:
    sequences: Sequences
    setting: Setting = SETTING
    alternatives: Sequence[Prediction] = ()


def make_world(seed: int, noise: float, num_rows: int = NUM_ROWS) -> World:
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, VOCABULARY_SIZE, (num_rows, PROMPT_LENGTH), generator=generator)
    return World(scorer_of(peaked_model(seed)), prompts, noise, seed)


def moved(scorer: Scorer, seed: int, size: float = 0.15) -> Scorer:
    """Return the model some updates later: every weight moved by a fraction of its tensor's std."""
    model = copy.deepcopy(scorer.model)
    generator = torch.Generator().manual_seed(seed + 77)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data += size * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return scorer_of(model)


def both(transform, **options) -> dict:
    """Draw tokens from the transform and report its logprobs."""
    bound = functools.partial(transform, **options)
    return {"draws": bound, "reports": bound}


def with_transforms(**transforms) -> Callable[[World], Given]:
    return lambda world: Given(world.sample(**transforms))


def at_temperature(recorded: float, reported: float, drawn: float) -> Callable[[World], Given]:
    def build(world: World) -> Given:
        engine = {
            "draws": functools.partial(transforms.at_temperature, temperature=drawn),
            "reports": functools.partial(transforms.at_temperature, temperature=reported),
        }
        return Given(world.sample(**engine), replace(SETTING, temperature=recorded))

    return build


def reported(change: Callable[[np.ndarray, World], np.ndarray]) -> Callable[[World], Given]:
    """Plant a fault in the reported logprobs alone; `change` gets logprobs [rows, tokens]."""

    def build(world: World) -> Given:
        sequences = world.sample()
        values = sequences.engine_logprobs[sequences.scored].reshape(-1, NUM_TOKENS)
        sequences.engine_logprobs[sequences.scored] = change(values.copy(), world).reshape(-1)
        return Given(sequences)

    return build


def with_other(cause: str, name: str, size: float = 0.15) -> Callable[[World], Given]:
    """The engine holds other weights, and its checkpoint is available."""

    def build(world: World) -> Given:
        other = moved(world.trainer, world.seed, size)
        sequences = world.sample(other)
        return Given(sequences, alternatives=[Prediction(cause, name, 0.0, score(other, sequences).logprob)])

    return build


def stitched(
    which: Callable[[np.ndarray, np.ndarray], np.ndarray], transform: Callable | None = None, **columns
) -> Callable[[World], Given]:
    """Mix a healthy engine with another, of other weights or a transform, if `which(row, place)`."""

    def build(world: World) -> Given:
        right, others = world.sample(), {} if transform is None else {"reports": transform}
        other = world.engine(moved(world.trainer, world.seed) if transform is None else None, **others)
        wrong = which(*np.divmod(np.arange(len(right.scored)), NUM_TOKENS))
        values = np.where(wrong, report(other, right, world.seed), right.engine_logprobs[right.scored])
        right.engine_logprobs[right.scored] = values
        return Given(replace(right, **{name: column(right, wrong) for name, column in columns.items()}))

    return build


def versions(right: Sequences, wrong: np.ndarray) -> np.ndarray:
    column = np.full(len(right.input_ids), -1)
    column[right.scored] = np.where(wrong, 6, 7)
    return column


def per_row(right: Sequences, wrong: np.ndarray) -> np.ndarray:
    return wrong.reshape(-1, NUM_TOKENS)[:, 0].astype(np.int64)


def output_bias(num_ids: int) -> Callable[[World], Given]:
    def build(world: World) -> Given:
        bias = torch.zeros(VOCABULARY_SIZE)
        ids = world.random().permutation(VOCABULARY_SIZE)[:num_ids]
        bias[ids] = 1.5 * torch.randn(num_ids, generator=torch.Generator().manual_seed(world.seed)).sign()

        def transform(rows):
            return transforms.normalised(rows.logits + bias)

        return Given(world.sample(draws=transform, reports=transform))

    return build


def missing_bos(world: World) -> Given:
    recorded_prompt = torch.cat([torch.full((len(world.prompts), 1), BOS), world.prompts], 1)
    full = draw(world.engine(), world.prompts, NUM_TOKENS, world.seed)
    true = sequences_of(full, PROMPT_LENGTH)
    sequences = sequences_of(torch.cat([recorded_prompt[:, :1], full], 1), PROMPT_LENGTH + 1)
    sequences.engine_logprobs[sequences.scored] = report(world.engine(), true, world.seed)
    return Given(sequences, alternatives=probes.bos_alternatives(probing(world, sequences)))


def cut_prompts(world: World) -> Given:
    """The engine keeps the last 5 tokens of each prompt."""
    cut = PROMPT_LENGTH - 5
    kept = replace(world, prompts=world.prompts[:, cut:]).sample()
    tokens = torch.cat(
        [world.prompts[:, :cut], torch.as_tensor(kept.input_ids.reshape(len(world.prompts), -1))], 1
    )
    logprobs = np.pad(kept.engine_logprobs.reshape(len(world.prompts), -1), [(0, 0), (cut, 0)])
    sequences = replace(sequences_of(tokens, PROMPT_LENGTH), engine_logprobs=logprobs.reshape(-1))
    return Given(sequences, alternatives=probes.cut_prompts(probing(world, sequences)))


def likely_tokens_forbidden(reports: bool) -> Callable[[World], Given]:
    def build(world: World) -> Given:
        plain = world.sample()
        likely = np.argsort(-np.bincount(plain.input_ids[plain.scored]))[:4].tolist()
        without = functools.partial(transforms.forbidden, ids=likely)
        return Given(world.sample(draws=without, **({"reports": without} if reports else {})))

    return build


def lost_token(world: World) -> Given:
    """Re-tokenising merged two tokens of each row; later ids are the same, one position earlier."""
    full = world.sample()
    tokens = full.input_ids.reshape(len(world.prompts), -1)
    logprobs = full.engine_logprobs.reshape(len(world.prompts), -1)
    places = world.random().integers(PROMPT_LENGTH + 12, PROMPT_LENGTH + 60, len(tokens))
    kept = np.stack([np.delete(np.arange(tokens.shape[1]), place) for place in places])
    merged = np.take_along_axis(tokens, kept, 1)
    merged[np.arange(len(tokens)), places] = world.random().integers(3, VOCABULARY_SIZE, len(tokens))
    sequences = sequences_of(torch.as_tensor(merged), PROMPT_LENGTH)
    return Given(replace(sequences, engine_logprobs=np.take_along_axis(logprobs, kept, 1).reshape(-1)))


def stripped_history(world: World) -> Given:
    """Two turns; in the second the engine saw the first without its first half."""
    first = draw(world.engine(), world.prompts, NUM_TOKENS // 2, world.seed)
    user = world.prompts.roll(1, 0)[:, :6]
    stripped = torch.cat([first[:, :PROMPT_LENGTH], first[:, PROMPT_LENGTH + NUM_TOKENS // 4 :], user], 1)
    second = draw(world.engine(), stripped, NUM_TOKENS // 2, world.seed + 1)
    answer = second[:, stripped.shape[1] :]
    full = torch.cat([first, user, answer], 1)
    sequences = sequences_of(full, PROMPT_LENGTH)
    mask = sequences.sampled.reshape(len(world.prompts), -1).copy()
    mask[:, first.shape[1] : first.shape[1] + 6] = False
    sequences = replace(sequences, sampled=mask.reshape(-1))
    logprobs = sequences.engine_logprobs.reshape(len(world.prompts), -1)
    of_first, of_second = sequences_of(first, PROMPT_LENGTH), sequences_of(second, stripped.shape[1])
    for at, turn in (
        (slice(PROMPT_LENGTH, first.shape[1]), of_first),
        (slice(-NUM_TOKENS // 2, None), of_second),
    ):
        logprobs[:, at] = report(world.engine(), turn, world.seed).reshape(len(world.prompts), -1)
    return Given(sequences)


def missing_last_logprob(world: World) -> Given:
    full = world.sample()
    replies = []
    for i in range(len(world.prompts)):
        ids, logprobs = full.input_ids[full.row(i)], full.engine_logprobs[full.row(i)]
        kept = logprobs[PROMPT_LENGTH : None if i % 3 else -1]
        replies.append(Completion(ids[:PROMPT_LENGTH], ids[PROMPT_LENGTH:], kept))
    return Given(sequences_from_completions(replies))


def added_tokens(world: World) -> Given:
    given = output_bias(8)(world)
    ids = world.random().permutation(VOCABULARY_SIZE)[:8]
    return replace(given, setting=replace(SETTING, added_token_ids=frozenset(ids.tolist())))


def quiet(world: World) -> World:
    """The noise is small, because noise as large as the grid would hide the rounding."""
    return replace(world, noise=min(world.noise, 0.004))


def zero_spans(values: np.ndarray, world: World) -> np.ndarray:
    for row in range(0, len(values), 4):
        values[row, 20:32] = 0.0
    return values


def tool_output(world: World, size: int = 12) -> Given:
    """Every fourth row has a span of random tokens, whose logprobs were filled with 0."""
    rows = world.sample()
    span = rows.scored.reshape(-1, NUM_TOKENS)[::4, 20 : 20 + size]
    rows.input_ids[span] = world.random().integers(3, VOCABULARY_SIZE, span.shape)
    rows.engine_logprobs[rows.scored] = report(world.engine(), rows, world.seed)
    rows.engine_logprobs[span] = 0.0
    return Given(rows)


def stale_prompts(world: World) -> Given:
    """Every second prompt was cached under other weights, but for its last tokens."""
    other, rows = moved(world.trainer, world.seed), world.sample()
    places = rows.scored.reshape(-1, NUM_TOKENS)
    for row in range(0, len(places), 2):
        ids, at = rows.input_ids[rows.row(row)], places[row] - rows.cu_seqlens[row]
        cache = read_prefix(other, ids[:8])
        rows.engine_logprobs[places[row]] = logprobs_after(world.trainer, cache, ids[8:], at - 8)
    found = probes.stale_prefixes(probing(world, rows), other, "the previous checkpoint")
    return Given(rows, alternatives=found)


def changed_while_sampling(world: World) -> Given:
    """The first tokens of each row, whose versions are not known, are of other weights."""
    given = stitched(lambda row, place: place < 10 + row)(world)
    other = moved(world.trainer, world.seed)
    before = Prediction("R24", "the previous checkpoint", 0.0, score(other, given.sequences).logprob)
    found = probes.changed_within_rows(probing(world, given.sequences), other, before)
    return replace(given, alternatives=[before, *found])


def probing(world: World, rows: Sequences) -> probes.ProbeInputs:
    now = score(world.trainer, rows).logprob
    return probes.ProbeInputs(world.trainer, rows, Request(""), SETTING, "float32", now)


def few_far_off(values: np.ndarray, world: World) -> np.ndarray:
    rng = world.random()
    return np.minimum(values + (rng.random(values.shape) < 0.03) * rng.normal(0, 1.0, values.shape), -1e-3)


def noisy(places: slice, size: float) -> Callable[[np.ndarray, World], np.ndarray]:
    def change(values: np.ndarray, world: World) -> np.ndarray:
        noise = world.random().normal(0, size, values[:, places].shape)
        values[:, places] = np.minimum(values[:, places] + noise, -1e-3)
        return values

    return change


def some_nan(values: np.ndarray, world: World) -> np.ndarray:
    values[world.random().random(values.shape) < 0.02] = np.nan
    return values


def divided_by_the_temperature(world: World) -> Given:
    divided = functools.partial(transforms.divided, temperature=0.7)
    draws = functools.partial(transforms.at_temperature, temperature=0.7)
    return Given(world.sample(draws=draws, reports=divided), replace(SETTING, temperature=0.7))


def of_others(values: np.ndarray, world: World) -> np.ndarray:
    values[::3] = world.random().permuted(values[::3], axis=1)
    return values


def from_a_place_of_the_row(values: np.ndarray, world: World) -> np.ndarray:
    for row, place in zip(values[::2], world.random().integers(5, 40, len(values)), strict=False):
        row[place:] = np.roll(row[place:], -1)
    return values


def variant(name: str) -> Callable[[World], Given]:
    """Sample with a variant of the model, and let the diagnosis look for it among all of them."""

    def build(world: World) -> Given:
        model = world.trainer.model
        chosen = next(one for one in variants_of(model) if one.name.startswith(name))
        with chosen.applied():
            engine = replace(world.engine(), noise=0.001)
            sequences = sample_rows(engine, world.prompts, NUM_TOKENS, world.seed)
        return Given(sequences, alternatives=variant_alternatives(world.trainer, sequences, 1.0))

    return build


def half_the_adapter(world: World) -> Given:
    base = moved(world.trainer, world.seed)
    half = copy.deepcopy(world.trainer.model)
    for mine, first in zip(half.parameters(), base.model.parameters(), strict=True):
        mine.data = torch.lerp(first.data, mine.data, 0.6)
    sequences = world.sample(scorer_of(half))
    scales = probes.adapter_scales(world.trainer, base)
    return Given(sequences, alternatives=best_of(world.trainer, sequences, 1.0, list(scales)))


def two_penalties(rows):
    scaled = transforms.repetition_penalty(rows, 1.2)
    return transforms.presence_penalty(replace(rows, logits=scaled), 0.6)


def stale_shard(world: World) -> Given:
    """The second of two ranks has the tensors of before."""
    old, engine = moved(world.trainer, world.seed), copy.deepcopy(world.trainer.model)
    for (name, mine), before in zip(engine.named_parameters(), old.model.parameters(), strict=True):
        by_columns = int("o_proj" in name or "down_proj" in name)
        if mine.dim() == 2:
            mine.data.chunk(2, by_columns)[1].copy_(before.data.chunk(2, by_columns)[1])
    shards = list(shards_of(world.trainer.model, old.model, "R25"))
    sequences = world.sample(scorer_of(engine))
    return Given(sequences, alternatives=best_of(world.trainer, sequences, 1.0, shards))


CLEAN = with_transforms()
FAULTS: dict[str, tuple[str, Callable[[World], Given]]] = {
    "temperature 0.8 in the engine": ("R01", with_transforms(**both(transforms.at_temperature, temperature=0.8))),
    "drawn at 0.8, reported at 1": ("R01", at_temperature(1.0, reported=1.0, drawn=0.8)),
    "min-p renormalised": ("R03", with_transforms(**both(transforms.min_p, min_p=0.1))),
    "top-k drawn": ("R04", with_transforms(draws=functools.partial(transforms.top_k, top_k=20))),
    "min-p drawn": ("R04", with_transforms(draws=functools.partial(transforms.min_p, min_p=0.1))),
    "repetition penalty": ("R05", with_transforms(**both(transforms.repetition_penalty, penalty=1.15))),
    "repetition penalty of the output": ("R05", with_transforms(**both(transforms.output_repetition_penalty, penalty=1.15))),
    "frequency penalty": ("R05", with_transforms(**both(transforms.frequency_penalty, penalty=0.4))),
    "penalties at once": ("R05", with_transforms(**both(two_penalties))),
    "presence penalty": ("R05", with_transforms(**both(transforms.presence_penalty, penalty=0.6))),
    "likely tokens forbidden": ("R06", likely_tokens_forbidden(reports=True)),
    "likely tokens not drawn": ("R06", likely_tokens_forbidden(reports=False)),
    "constant offset": ("R07", reported(lambda v, w: v - 0.1)),
    "base 10": ("R08", reported(lambda v, w: v / np.log(10))),
    "cumulative": ("R08", reported(lambda v, w: np.cumsum(v, 1))),
    "means of rows": ("R08", reported(lambda v, w: np.broadcast_to(v.mean(1, keepdims=True), v.shape))),
    "logprob of the likeliest token": ("R09", with_transforms(reports=lambda rows: transforms.largest_logprob(rows, 0.0))),
    "negative entropy": ("R08", with_transforms(reports=lambda rows: transforms.negative_entropy(rows, 0.0))),
    "shift by minus one": ("R11", reported(lambda v, w: np.roll(v, -1, axis=1))),
    "shift from the 20th token on": ("R11", reported(lambda v, w: np.hstack([v[:, :20], v[:, 21:], v[:, -1:]]))),
    "rows shifted from a place of their own on": ("R11", reported(from_a_place_of_the_row)),
    "biased tokens": ("R26", output_bias(3)),
    "a stale shard": ("R25", stale_shard),
    "rows reversed": ("R11", reported(lambda v, w: v[:, ::-1])),
    "rows of a pack shifted": (
        "R11",
        reported(lambda v, w: np.stack([np.roll(row, -(number % 4)) for number, row in enumerate(v)])),
    ),
    "rows mixed up": ("R12", reported(lambda v, w: v[w.random().permutation(len(v))])),
    "re-tokenised": ("R13", lost_token),
    "history stripped": ("R14", stripped_history),
    "missing BOS": ("R15", missing_bos),
    "prompts cut": ("R16", cut_prompts),
    "last logprob missing": ("R17", missing_last_logprob),
    "two tokens of tool output": ("R18", lambda world: tool_output(world, 2)),
    "tool output in the mask": ("R18", tool_output),
    "stale weights": ("R24", with_other("R24", "previous checkpoint")),
    "added tokens": ("R55", added_tokens),
    "output bias": ("R27", output_bias(VOCABULARY_SIZE)),
    "update in flight": ("R30", stitched(lambda row, place: place < 10 + row, versions=versions)),
    "one stale worker that reuses prefixes": (
        "R34", stitched(lambda row, place: row % 4 == 0, worker=per_row, cached_tokens=per_row),
    ),
    "bfloat16 logits": ("R37", lambda world: Given(quiet(world).sample(reports=transforms.bfloat16_logits))),
    "changed while sampling": ("R30", changed_while_sampling),
    "zero points": ("R44", variant("weights in int4 with a zero point, groups of 32")),
    "MXFP4": ("R44", variant("weights in float4, groups of 32")),
    "few tokens far off": ("R42", reported(few_far_off)),
    "half the adapter": ("R32", half_the_adapter),
    "attention scores doubled": ("R54", variant("scaling of LlamaAttention times 2")),
    "divided by the temperature": ("R08", divided_by_the_temperature),
    "temperature of some rows": (
        "R01", stitched(lambda row, place: row % 3 == 0, functools.partial(transforms.at_temperature, temperature=0.6)),
    ),
    "logprobs of a draft": (
        "R45", stitched(lambda row, place: place * (row + 3) % 5 > 1, functools.partial(transforms.at_temperature, temperature=3.0)),
    ),
    "logprobs of other samples": ("R12", reported(of_others)),
    "gate and up in shards": ("R25", variant("gate and up joined, then cut into 2 shards")),
    "a tensor doubled": ("R25", variant("model.layers.1.mlp.down_proj.weight doubled")),
    "float8 inputs": ("R44", variant("weights in float8 with one scale a tensor, and inputs")),
    "decoded tokens": ("R40", reported(noisy(slice(1, None), 0.4))),
    "rotary table of zeros": ("R49", variant("a rotary table of zeros")),
    "rotary pairs side by side": ("R49", variant("rotary pairs side by side")),
    "rotary base": ("R49", variant("rotary base 5e+04")),
    "heads of keys and values": ("R25", variant("the heads of k and v in reverse order")),
    "gate and up": ("R25", variant("gate and up exchanged")),
    "a skipped layer": ("R25", variant("layer 1 skipped")),
    "layers exchanged": ("R25", variant("layers 0 and 1 exchanged")),
    "MLPs of layers exchanged": ("R25", variant("mlp of layers 0 and 1 exchanged")),
    "a tensor transposed": ("R25", variant("model.layers.1.self_attn.o_proj.weight transposed")),
    "a skipped norm": ("R25", variant("post_attention_layernorm skipped")),
    "another activation": ("R54", variant("the activation relu")),
    "output layer of zeros": ("R26", variant("lm_head.weight zero")),
    "soft cap": ("R50", with_transforms(**both(transforms.soft_cap, cap=5.0))),
    "narrow window": ("R52", variant("a window of 32 tokens")),
    "vocabulary padding": ("R53", with_transforms(**both(transforms.padded_vocabulary, num_padding=64.0))),
    "policy moved": ("R57", stitched(lambda row, place: row % 2 == 0, versions=versions)),
    "NaN": ("R60", reported(some_nan)),
    "missing logprobs": ("R60", reported(zero_spans)),
    "cache kept, unrecorded": ("R29", stale_prompts),
}  # fmt: skip
