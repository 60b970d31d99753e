"""Probes: score the sampled tokens again under alternative settings while the verdict is in doubt.

A probe is another checkpoint, dtype, quantisation, BOS or detail of the architecture. Each costs
some forward passes over the sample, so probing stops at the first settled verdict. Probes also set
the noise floor: the published level of a precision, raised by what model or engine show.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jinja2 import TemplateError

from areal_core.engine.model import load_tokenizer_at
from areal_core.engine.routers import Routers
from areal_core.errors import ModelError
from consistency.alternatives.images import image_alternatives
from consistency.alternatives.variants import (
    Variant,
    best_of,
    scanned,
    shards_of,
    variant_alternatives,
)
from consistency.case import DTYPES, Request, Setting
from consistency.diagnose import Diagnosis, is_accusation
from consistency.measure import NOISE, Noise, k3
from consistency.rescoring import Rescoring
from consistency.score import Scorer, load_scorer, logprobs_after, read_prefix, score_logprobs
from consistency.tensors import find_changed_tensor, find_stale_tensors, swapped, tensors_of
from consistency.tokens import Floats, Ints, Sequences
from consistency.transforms import (
    EXPLAINED,
    LEAST_TO_WEIGH,
    ROWS_TO_TRY,
    Prediction,
    Replays,
    best_by_row,
    bounded,
    of_some_rows,
    residual_size,
    row_means,
    select_rows,
    usable_or,
)

# Two rounding kernels differ more than a rounding one from an exact one: sqrt(2), with a margin.
NOISE_MARGIN = 1.6

SETTLED_CONFIDENCE = 0.85
MOST_TO_MEASURE = 1_000_000_000  # parameters; published noise is of models of 4 billion and more
EXPERTS = "the engine's experts"
Diagnose = Callable[..., Diagnosis]  # diagnose(setting, alternatives=...)


@dataclass(frozen=True)
class ProbeInputs:
    """The sampled rows, the model that scores them in `dtype`, and how they were sampled.

    `now` are the logprobs of that model, float64 [scored].
    """

    scorer: Scorer
    rows: Sequences
    request: Request
    setting: Setting
    dtype: str
    now: Floats

    @property
    def engine(self) -> Floats:
        """The engine's logprobs, float64 [scored]."""
        return self.rows.engine_logprobs[self.rows.scored]

    def predicted(self, cause: str, name: str, by: Scorer, rows: Sequences | None = None) -> Prediction:
        """Score the rows, or others of as many scored tokens, with a model."""
        given, temperature = self.rows if rows is None else rows, self.setting.temperature
        return Prediction(cause, name, 0.0, score_logprobs(by, given, temperature=temperature))


Probe = Callable[[ProbeInputs], list[Prediction]]
Change = Callable[[list[int]], list[int]]  # of the ids of a prompt


def run_probes(diagnose: Diagnose, inputs: ProbeInputs, replays: Replays) -> tuple[Diagnosis, Setting]:
    """Probe until the verdict is settled, with a checkpoint that was given in any case.

    Returns:
        The last diagnosis, and the setting with the noise floor of this model.
    """
    setting, rounding = inputs.setting, 0.0
    found = diagnose(setting)
    alternatives: list[Prediction] = []
    is_small = sum(p.numel() for p in inputs.scorer.model.parameters()) <= MOST_TO_MEASURE
    for probe in PROBES:
        # Whatever is said, the noise floor of this model is needed to weigh it.
        measures = found.verdict != "healthy" or (is_small and setting.noise.name != "float32")
        is_asked = probe is probe_checkpoints and inputs.request.previous and found.verdict == "healthy"
        if is_settled(found, setting) and not (probe is probe_dtype and measures) and not is_asked:
            continue
        added = probe(inputs)
        if not added:
            continue
        alternatives += added
        if probe is probe_dtype and setting.noise.name != "float32":
            setting = replace(setting, noise=noise_of_model(setting.noise, alternatives[0], replays))
            rounding = NOISE_MARGIN * float(np.std(alternatives[0].logprobs - replays.base))
        found = diagnose(setting, alternatives=alternatives)
    # Where float32 kernels agree, a healthy difference is small, and may still be a tensor's.
    size, is_exact = found.measurement.metrics["mean_abs"], setting.noise.name == "float32"
    if not is_settled(found, setting) or (is_exact and found.verdict == "healthy" and size > LEAST_TO_WEIGH):
        changed = find_changed_tensor(inputs.scorer, inputs.rows, setting.temperature, rounding)
        found = diagnose(setting, alternatives=alternatives, changed_tensor=changed)
    return found, setting


def is_settled(found: Diagnosis, setting: Setting) -> bool:
    """Return whether another probe could hardly change the verdict."""
    if found.verdict == "healthy":
        is_moved = any(cause.id == "R57" for cause in found.causes)
        return is_moved or found.measurement.metrics["mean_abs"] <= setting.noise.own
    return any(is_accusation(cause) and cause.confidence > SETTLED_CONFIDENCE for cause in found.causes)


def probe_dtype(inputs: ProbeInputs) -> list[Prediction]:
    other = "bfloat16" if inputs.dtype == "float32" else "float32"
    model = load_scorer(inputs.request.model, DTYPES[other], inputs.request.device)
    scored = inputs.predicted("R38", f"scoring in {other}", model)
    values = [(p, lambda old: old.bfloat16().to(old)) for p in inputs.scorer.model.parameters()]
    copied = Variant("R38", "a copy of the weights in bfloat16", list(values))
    with copied.applied():
        return [scored, inputs.predicted("R38", copied.name, inputs.scorer)]


def probe_checkpoints(inputs: ProbeInputs) -> list[Prediction]:
    """Score with the request's other checkpoints: stale weights (R24), those of the base (R32).

    Also with some of their tensors (R25), for the rows alone that they explain, with their keys and
    values of prompts (R29), and, of both, with the last update on the base: a chain of deltas that
    began at the wrong weights.
    """
    request, temperature = inputs.request, inputs.setting.temperature
    paths = {PREVIOUS: request.previous, BASE: request.base}
    loaded = {
        name: load_scorer(path, DTYPES[inputs.dtype], request.device)
        for name, path in paths.items()
        if path is not None
    }
    found: list[Prediction] = []
    for name, other in loaded.items():
        found += partial_alternatives(inputs, other, name)
        cause = "R24" if name == PREVIOUS else "R32" if is_adapter(inputs.scorer, other) else "R32.base"
        whole = inputs.predicted(cause, name, other)
        found.append(whole)
        found += stale_prefixes(inputs, other, name)
        if cause == "R24":
            found += changed_within_rows(inputs, other, whole)
        if cause == "R32":
            scales = adapter_scales(inputs.scorer, other)
            found += best_of(inputs.scorer, inputs.rows, temperature, list(scales))
    if request.previous is not None and request.base is not None and request.previous != request.base:
        before, first = (tensors_of(loaded[name].model) for name in (PREVIOUS, BASE))
        mine = tensors_of(inputs.scorer.model).items()
        values = [(p, partial(torch.add, other=first[name] - before[name])) for name, p in mine]
        found += best_of(inputs.scorer, inputs.rows, temperature, [Variant("R24.delta", DELTA, list(values))])
    return found


PREVIOUS, BASE = "the previous checkpoint", "the base model"
DELTA = "the base model with the last update"
ADAPTER_SCALES = (1 / 64, 1 / 16, 0.25, 0.5, 2.0, 4.0, 16.0)


def is_adapter(now: Scorer, base: Scorer) -> bool:
    """Return whether norms and embeddings are the base's, as with a merged adapter."""
    kept = dict(base.model.named_parameters())
    same = [
        name in kept and kept[name].shape == values.shape and torch.equal(values, kept[name])
        for name, values in now.model.named_parameters()
        if values.dim() == 1 or "embed" in name
    ]
    return bool(same) and all(same)


def adapter_scales(now: Scorer, base: Scorer) -> Iterator[Variant]:
    """Yield the model with another scale of its adapter, which is what it adds to the base."""
    theirs = dict(base.model.named_parameters())
    mine = [(values, theirs[name].data) for name, values in now.model.named_parameters()]

    def scaled(by: float) -> Variant:
        changes = [(values, partial(torch.lerp, first, weight=by)) for values, first in mine]
        return Variant("R32.scale", f"the adapter times {by:.3g}", list(changes))

    return scanned(scaled, ADAPTER_SCALES, 1.0)


CACHE_BLOCK = 8  # tokens, of which the blocks of engines are multiples
MOST_PREFIXES = 8  # of different lengths that are tried for a row


def stale_prefixes(inputs: ProbeInputs, other: Scorer, name: str) -> list[Prediction]:
    """Score after prompts whose first tokens have the keys and values of another checkpoint (R29).

    How many tokens an engine had in its cache differs by request: for each row, the number that
    fits best.
    """

    def tried(row: int, places: Ints) -> Iterator[Floats]:
        last = int(inputs.rows.scored[places[0]] - inputs.rows.cu_seqlens[row]) - 1
        for length in (*range(CACHE_BLOCK, last, max(CACHE_BLOCK, last // MOST_PREFIXES)), last):
            yield after_prefix(inputs, other, row, places, length)

    if inputs.rows.images is not None:
        return []
    named = f"the keys and values of {name} for the prompts"
    return best_by_row(inputs.rows, inputs.now, tried, "R29.rows", named)


def changed_within_rows(inputs: ProbeInputs, other: Scorer, before: Prediction) -> list[Prediction]:
    """Score with another checkpoint up to the token of each row that fits best, and the model after it.

    The keys and values of the tokens before it are kept, or computed again (R30).
    """
    rows, engine, now = inputs.rows, inputs.engine, inputs.now
    saved = bounded(engine - before.logprobs) - bounded(engine - now)

    def tried(row: int, places: Ints) -> Iterator[Floats]:
        nearest = np.argmin(np.concatenate([[0.0], np.cumsum(saved[places])]))
        for cut in {int(nearest), int(np.argmax(saved[places] > LEAST_TO_WEIGH))}:
            kept = int(rows.scored[places[min(cut, len(places) - 1)]] - rows.cu_seqlens[row]) - 1
            for rest in (now[places], after_prefix(inputs, other, row, places, kept)):
                yield np.concatenate([before.logprobs[places[:cut]], rest[cut:]])

    name = f"{before.name} up to a token of each row, and the model after it,"
    found = best_by_row(rows, now, tried, "R30.cut", name)
    whole = of_some_rows(engine, now, rows.row_of_token[rows.scored], [before])
    if not found or whole is None:
        return found
    fits_noise = residual_size(engine, whole.logprobs) < LEAST_CUT * residual_size(engine, found[0].logprobs)
    return [] if fits_noise else found  # whole rows of another checkpoint are the simpler cause


LEAST_CUT = 1.5  # residual of whole rows over that of rows with cuts
MOST_CUTS = 32  # lengths below that of the shortest bad prompt
COMMON_CUTS = tuple(2**k for k in range(4, 15))  # tokens


def cut_prompts(inputs: ProbeInputs) -> list[Prediction]:
    """Score with prompts that are cut to a number of tokens, where only longer prompts are bad (R16)."""
    rows = inputs.rows
    means = row_means(inputs.engine, inputs.now, rows.row_of_token[rows.scored])
    bad = np.flatnonzero(means > max(LEAST_TO_WEIGH, EXPLAINED * means.max()))
    shortest = int(prompt_lengths(rows)[bad].min()) if len(bad) else 0
    if shortest < 2 or rows.images is not None:
        return []
    near = range(max(shortest - MOST_CUTS, 1), shortest)
    worst = select_rows(rows, bad[np.argsort(-means[bad], kind="stable")][:ROWS_TO_TRY])
    engine = worst.engine_logprobs[worst.scored]

    def cut(of: Sequences, count: int, side: str) -> Prediction:
        kept = slice(count) if side == "first" else slice(-count, None)
        name = f"prompts cut to their {side} {count} tokens"
        return inputs.predicted("R16.cut", name, inputs.scorer, with_prompts(of, lambda ids: ids[kept]))

    counts = sorted(one for one in {*near, *COMMON_CUTS} if one < shortest)
    tried = ((one, side) for one in counts for side in ("first", "last"))
    best = min(tried, key=lambda of: float(bounded(engine - cut(worst, *of).logprobs).mean()))
    return [cut(rows, *best)]


def prompt_lengths(rows: Sequences) -> Ints:
    """Count the tokens of each row before the first sampled one, int64 [rows]."""
    return np.array([(np.cumsum(rows.sampled[rows.row(one)]) == 0).sum() for one in range(rows.num_rows)])


def with_prompts(rows: Sequences, change: Change) -> Sequences:
    """Give each row the prompt that a function makes of its own."""
    at, ids, is_prompt = [], [], []
    for row, length in enumerate(prompt_lengths(rows).tolist()):
        tokens = np.arange(*rows.cu_seqlens[row : row + 2])
        prompt = change(rows.input_ids[tokens[:length]].tolist()) if len(tokens) else []
        at.append(np.concatenate([np.repeat(tokens[:1], len(prompt)), tokens[length:]]))
        ids.append(np.array([*prompt, *rows.input_ids[tokens[length:]]], np.int64))
        is_prompt.append(np.arange(len(ids[-1])) < len(prompt))
    changed = rows.of_tokens(np.concatenate(at), np.cumsum([0, *map(len, at)]))
    sampled = changed.sampled & ~np.concatenate(is_prompt)
    return replace(changed, input_ids=np.concatenate(ids), sampled=sampled)


def after_prefix(inputs: ProbeInputs, other: Scorer, row: int, places: Ints, length: int) -> Floats:
    """Score a row after keys and values of another model for its first tokens; NaN of those."""
    ids = inputs.rows.input_ids[inputs.rows.row(row)]
    at = inputs.rows.scored[places] - inputs.rows.cu_seqlens[row]
    later, found = at > length, np.full(len(at), np.nan)
    cache, temperature = read_prefix(other, ids[:length]), inputs.setting.temperature
    found[later] = logprobs_after(inputs.scorer, cache, ids[length:], at[later] - length, temperature)
    return found


def partial_alternatives(inputs: ProbeInputs, previous: Scorer, of: str = PREVIOUS) -> list[Prediction]:
    """Score with those tensors of another checkpoint that explain the logprobs (R25)."""
    scorer, rows = inputs.scorer, inputs.rows
    values = rows.engine_logprobs.copy()
    values[rows.scored] = usable_or(inputs.engine, inputs.now)
    usable, temperature = replace(rows, engine_logprobs=values), inputs.setting.temperature
    stale = find_stale_tensors(scorer, previous, usable, temperature)
    found: list[Prediction] = []
    if scorer.head.layer.weight is scorer.model.get_input_embeddings().weight:  # an engine may have a copy
        old = replace(scorer, head=previous.head)
        found.append(inputs.predicted("R26.tied", f"the output layer of {of}", old))
    cause = "R25" if of == PREVIOUS else "R25.base"
    if stale is not None:
        with swapped(scorer, previous, stale.names):
            found.append(inputs.predicted(cause, stale.describe(), scorer))
    return found + best_of(scorer, rows, temperature, list(shards_of(scorer.model, previous.model, cause)))


def bos_alternatives(inputs: ProbeInputs) -> list[Prediction]:
    bos_token_id, rows = inputs.setting.bos_token_id, inputs.rows
    if bos_token_id is None:
        return []
    add, drop = (lambda ids: [bos_token_id, *ids]), (lambda ids: ids[1:])
    changes: dict[str, Change] = {"BOS that the record lacks": add}
    if (rows.input_ids[rows.cu_seqlens[:-1]] == bos_token_id).all():
        changes = {"double BOS": add, "missing BOS": drop}
    return with_other_prompts(inputs, "R15", changes)


def with_other_prompts(inputs: ProbeInputs, cause: str, changes: dict[str, Change]) -> list[Prediction]:
    """Score with each change of the prompts that changes one, and leaves every sampled token a predecessor."""
    rows = inputs.rows
    found = [(name, with_prompts(rows, change)) for name, change in changes.items()]
    return [
        inputs.predicted(cause, name, inputs.scorer, changed)
        for name, changed in found
        if len(changed.scored) == len(rows.scored) and not np.array_equal(changed.input_ids, rows.input_ids)
    ]


MESSAGE = "a message"  # in whose place the chat template is looked at
NO_THOUGHTS = "<think>\n\n</think>\n\n"


def template_alternatives(inputs: ProbeInputs) -> list[Prediction]:
    """Score with prompts in another rendering of the model's chat template (R16)."""
    if inputs.rows.images is not None:
        return []
    message = [{"role": "user", "content": MESSAGE}]
    try:
        tokenizer = load_tokenizer_at(inputs.request.model)
        whole, without = (
            str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=one))
            for one in (True, False)
        )
    except (ModelError, ValueError, TemplateError):  # no tokenizer, no template, or one of other messages
        return []
    encode: Callable[[str], list[int]] = partial(tokenizer.encode, add_special_tokens=False)
    before, _, after = whole.partition(MESSAGE)
    head, tail, begin, none = map(encode, (before, after, whole.removeprefix(without), NO_THOUGHTS))
    changes: dict[str, Change] = {
        "the chat template applied again": lambda ids: [*head, *ids, *tail],
        "no chat template": lambda ids: stripped(stripped(ids, tail, -1), head, 1),
        "the generation prompt added": lambda ids: [*ids, *begin],
        "no generation prompt": lambda ids: stripped(ids, begin, -1),
        "an empty block of thoughts added": lambda ids: [*ids, *none],
        "no system prompt": lambda ids: from_the_user(ids, head),
    }
    return with_other_prompts(inputs, "R16.template", changes)


def from_the_user(ids: list[int], head: list[int]) -> list[int]:
    """Leave out what comes before the first message of the user, which `head` opens where it is the first one."""
    shared = next((at for at, (one, other) in enumerate(zip(ids, head, strict=False)) if one != other), 0)
    opening = head[shared - 1 :]
    found = [at for at in range(shared, len(ids)) if ids[at : at + len(opening)] == opening]
    return [*head, *ids[found[0] + len(opening) :]] if shared and found else ids


def stripped(ids: list[int], part: list[int], side: int) -> list[int]:
    """Leave out a part that ids begin (side 1) or end (-1) with."""
    if not part or ids[::side][: len(part)] != part[::side]:
        return ids
    return ids[len(part) :] if side == 1 else ids[: -len(part)]


def noise_of_model(published: Noise, other_dtype: Prediction, replays: Replays) -> Noise:
    """Return the published noise, or more if this model's logprobs change more between dtypes.

    `own` is what this model shows: depth, width and vocabulary decide how far rounding moves it.
    """
    moves = other_dtype.logprobs - replays.base
    mean_abs, k3_mean = float(np.abs(moves).mean()), float(k3(moves).mean())
    repeats = published.own if np.isfinite(published.own) else 0.0  # of the engine, if it was asked again
    own = max(NOISE_MARGIN * mean_abs, repeats)
    if own <= published.mean_abs:
        return replace(published, own=own)
    source = f"{other_dtype.name} changes its logprobs by {mean_abs:.2g} on average"
    name, k3_most = f"{published.name}, on this model", max(published.k3, NOISE_MARGIN**2 * k3_mean)
    return Noise(name, own, k3_most, source, own)


EXACT_BELOW, EXACT_SHARE = 1e-5, 0.25  # of float32 engines; rounding to bfloat16 leaves 1 in 1,000
FEWEST_EXACT = 64  # tokens


def noise_of_tokens(published: Noise, engine: Floats, trainer: Floats) -> Noise:
    """Return the noise of float32 if the tokens themselves show it.

    A share of the tokens that agree to float32 is made by no coarser engine: then the others have
    a cause.
    """
    counted = np.isfinite(engine) & (trainer < -0.1)
    exact = np.abs(engine - trainer)[counted] < EXACT_BELOW
    if published.name == "float32" or exact.sum() < FEWEST_EXACT or exact.mean() < EXACT_SHARE:
        return published
    return replace(NOISE["float32"], source=f"{exact.mean():.0%} of the tokens agree to {EXACT_BELOW:g}")


def noise_of_engine(published: Noise, rescoring: Rescoring) -> Noise:
    variation = NOISE_MARGIN * rescoring.engine_repeat
    if not variation > published.mean_abs:
        return published
    source = f"two engine scorings of the same tokens differ by {rescoring.engine_repeat:.2g} on average"
    k3_most = max(published.k3, variation**2)
    return Noise(f"{published.name}, on this engine", variation, k3_most, source, variation)


def expert_alternatives(inputs: ProbeInputs) -> list[Prediction]:
    """Score with the engine's experts, and with its weights of them (R42).

    Nothing where they are not known or of another model, or rows are scored one at a time.
    """
    scorer, rows = inputs.scorer, inputs.rows
    if rows.experts is None or not scorer.packs_rows:
        return []
    try:
        routers = Routers(scorer.model)
        routers.sizes.check(rows.experts)
        replaying, top_k = replace(scorer, routers=routers), routers.sizes.top_k
        alternatives = []
        for name, width in ((EXPERTS, top_k), (f"{EXPERTS} and their weights", 2 * top_k)):
            if width <= rows.experts.shape[-1]:
                given = replace(rows, experts=rows.experts[..., :width])
                alternatives.append(inputs.predicted("R42", name, replaying, given))
    except (ModelError, ValueError):
        return []
    routers.replay(None, scorer.device)
    return alternatives


TOKENS_TO_TRY = 16  # of a completion
MOST_TOKENS = 500_000  # to score after the prompts of other rows


def prompt_alternatives(inputs: ProbeInputs) -> list[Prediction]:
    """Score bad rows after the prompts of other rows (R12)."""
    rows = inputs.rows
    turns = [np.diff(rows.sampled[rows.row(row)].astype(int)) for row in range(rows.num_rows)]
    every, num_tokens = list(range(rows.num_rows)), int(rows.cu_seqlens[-1])
    if rows.num_rows < 2 or any((changes < 0).any() for changes in turns):
        return []
    most = iter(range(MOST_TOKENS // num_tokens))

    def tried(row: int, places: Ints) -> Iterator[Floats]:
        if next(most, None) is None:
            return
        values = rows.engine_logprobs[rows.scored[places]][:TOKENS_TO_TRY]
        after = after_prompts(inputs, row, every, TOKENS_TO_TRY)
        best = int(np.argmin(bounded(values - after).mean(1)))
        if best != row:
            yield after_prompts(inputs, row, [best], None)[0]

    return best_by_row(rows, inputs.now, tried, "R12", "the prompts of other rows")


def after_prompts(inputs: ProbeInputs, row: int, prompts: list[int], count: int | None) -> Floats:
    rows = inputs.rows
    bounds = [np.arange(*rows.cu_seqlens[one : one + 2]) for one in range(rows.num_rows)]
    completion = bounds[row][rows.sampled[bounds[row]]][:count]
    joined = [np.concatenate([bounds[one][~rows.sampled[bounds[one]]], completion]) for one in prompts]
    images = None if rows.images is None else tuple(rows.images[one] for one in prompts)
    alone = Sequences(rows.input_ids, rows.cu_seqlens, rows.sampled, rows.engine_logprobs)
    packed = alone.of_tokens(np.concatenate(joined), np.cumsum([0, *map(len, joined)]), images=images)
    return inputs.predicted("", "", inputs.scorer, packed).logprobs.reshape(len(prompts), -1)


PROBES: tuple[Probe, ...] = (
    probe_dtype,
    expert_alternatives,
    bos_alternatives,
    template_alternatives,
    lambda i: image_alternatives(i.scorer, i.rows, i.setting.temperature, i.now),
    prompt_alternatives,
    cut_prompts,
    probe_checkpoints,
    lambda i: variant_alternatives(i.scorer, i.rows, i.setting.temperature),
)
