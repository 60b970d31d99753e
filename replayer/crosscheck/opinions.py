"""What a record says of each stage of a step, beside the functions that recompute it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np

from areal_core.config.vision_checks import model_type
from recorder.environment import folder_identity
from replayer.crosscheck import twin
from replayer.crosscheck.frameworks import FRAMEWORKS, CannotRun, Framework
from replayer.crosscheck.model_pass import ModelPass, load_pass
from replayer.crosscheck.options import KNOWN, OPEN, STAGES, Change, Explanation, Options, explain, sentence
from replayer.crosscheck.shape import is_of_others, shape_of
from replayer.crosscheck.step_rows import Floats, StepRows, Update
from replayer.crosscheck.their_configs import TABLES, Configured, options_of
from replayer.crosscheck.twin import UNIT, Bounded, Loss, LossInputs, exactly, mask_of
from replayer.errors import WrongModel

Recompute = Callable[[Options], Bounded]
SMALLEST = 2.0**-126
OF_PARTS = 1e-5  # that a sum of logged parts may be off
NEARER = 0.5  # of a difference, that an explanation may leave: one of larger bounds alone explains nothing
WHOLE = 0.02  # how uncertain a whole number may be
OF_SIZE = 1e-3  # of a known number of rows or tokens, how uncertain that may be
TYPICAL = 8.0  # worst-case bounds are so many times usual errors
SAME = 1 / 3  # of that distance, within which two log-probs are of the same weights
APART = 0.02  # nats a token between two passes of a trainer with the same weights: bfloat16 has less
SMALL_MODEL = 2 * 10**9  # bytes of weights that are loaded to see in which dtype a run computed
PARTS: dict[str, list[str]] = TABLES["parts"]
TEXTS: dict[str, str] = TABLES["texts"]
NO_GRADIENT = 1e-7  # norm of a gradient that is 0 but for the rounding of recorded log-probs
OURS = "ppo_actor/"


@dataclass(frozen=True)
class Observation:
    """Recorded values of a stage and how to recompute them.

    `recorded` is [N], [N, T] (then row i is row i of the step), or [] for a statistic; nan is not
    known.
    """

    stage: str
    name: str
    recorded: Floats
    recompute: Recompute

    def misfit(self, found: Bounded) -> Floats:
        """Divide differences by what rounding to float32 allows: above 1, it explains nothing."""
        allowed = found.error + UNIT * np.abs(self.recorded) + SMALLEST
        with np.errstate(invalid="ignore"):
            misfit = np.abs(self.recorded - found.value) / allowed
        # a recomputed nan or inf fits nothing
        return np.where(np.isnan(self.recorded), 0.0, np.where(np.isnan(misfit), np.inf, misfit))

    def distance(self, found: Bounded) -> float:
        """Return the largest difference."""
        return float(np.nanmax(np.abs(self.recorded - found.value), initial=0.0))


def observations_of(rows: StepRows, configured: Options) -> list[Observation]:
    """List what was recorded of the stages before the loss, in the order of computation."""
    found = [
        statistic(rows, "rewards", name, how, partial(logged_rewards, rows, name))
        for name, how in TABLES["rewards"].items()
        if name in rows.stats
    ]
    if (paid := twin.paid_rewards(rows, configured)) is not None:
        seen = np.where(np.isnan(paid), np.nan, rows.rewards)
        name, kinds = "rewards of overlong rows", {True: exactly(seen), False: exactly(paid)}
        found.append(Observation("rewards", name, seen, lambda o: kinds[o.overlong_paid is None]))
    if f"{OURS}n_valid_tokens" in rows.stats:
        count = np.asarray(rows.stats[f"{OURS}n_valid_tokens"])
        found.append(Observation("mask", "n_valid_tokens", count, lambda o: exactly(mask_of(rows, o).sum())))
    if "advantages" in rows.tensors:
        counted = where_counted(rows, rows.tensors["advantages"], configured)
        known = np.nan_to_num(counted).any(1, keepdims=True) & ~np.isnan(counted)
        is_counted = np.where(known, counted != 0, np.nan)
        name = "tokens with an advantage"
        found.append(Observation("mask", name, is_counted, lambda o: exactly(mask_of(rows, o))))
    recorded = rows.tensors
    if "kl_rewards" in recorded:
        found.append(Observation("kl", "kl_rewards", recorded["kl_rewards"], partial(twin.kl_rewards, rows)))
        if "total_rewards" in recorded:
            total = np.where(rows.mask, recorded["total_rewards"] - recorded["kl_rewards"], 0.0).sum(1)
            found.append(Observation("advantages", "normalised rewards", total, partial(terminal, rows)))
    if {"values", "returns"} <= recorded.keys():
        found += [
            Observation("values", name, np.asarray(rows.stats[name]), partial(twin.value_loss_of, rows))
            for name in TABLES["value_losses"]
            if name in rows.stats
        ]
    if "advantages" in recorded:
        given = np.where(np.isnan(rows.rewards)[:, None], np.nan, counted)
        return [*found, Observation("advantages", "advantages", given, partial(twin.advantages_of, rows))]
    return found + [
        statistic(rows, "advantages", name, how, lambda o: twin.advantages_of(rows, o).at(mask_of(rows, o)))
        for how in ("max", "min", "avg")
        if (name := f"{OURS}advantages/{how}") in rows.stats
    ]


def statistic(rows: StepRows, stage: str, name: str, how: str, values: Recompute) -> Observation:
    return Observation(stage, name, np.asarray(rows.stats[name]), lambda o: reduced(values(o), how))


def logged_rewards(rows: StepRows, name: str, options: Options) -> Bounded:
    """Return the rewards of all rows, or the sum of the terms that were logged beside their mean."""
    terms = [
        value for name, value in rows.stats.items() if name.startswith("rewards/") and "/std" not in name
    ]
    is_sum = name == "reward" and terms and options.reward_terms != Options.reward_terms
    return exactly([sum(terms)] if is_sum else rows.rewards)


def terminal(rows: StepRows, options: Options) -> Bounded:
    """Return the normalised reward of each row with a token that counts, 0 of others."""
    found, counts = twin.row_rewards(rows, options), mask_of(rows, options).any(1)
    size = np.abs(found.value) + np.abs(rows.tensors["kl_rewards"]).sum(1)
    return Bounded(np.where(counts, found.value, 0.0), found.error + 4 * UNIT * size)


def where_counted(rows: StepRows, values: Floats, configured: Options) -> Floats:
    """Return values with nan at tool tokens and in rows that do not count: some give a row one number."""
    tools = mask_of(rows, Options(mask="everything after the prompt")) & ~rows.mask
    return np.where(tools | ~mask_of(rows, configured).any(1, keepdims=True), np.nan, values)


def reduced(values: Bounded, how: str) -> Bounded:
    """Reduce values of all rows or tokens to a statistic."""
    if how == "avg":
        count = max(values.value.size, 1)
        size = np.abs(values.value).sum() / count
        error = values.error.sum() / count + (twin.sum_error(count) + 2 * UNIT) * size
        return Bounded(np.asarray(values.value.sum() / count), np.asarray(error))
    at = values.value.argmax() if how == "max" else values.value.argmin()
    return Bounded(np.asarray(values.value.flat[at]), np.asarray(values.error.max()))


SHOWN_ROWS = 50
UNKNOWN = "unknown: no option that is known here explains the recorded values"


@dataclass(frozen=True)
class RowDifference:
    """A row that differs, and its first token that does (None: a value of the row)."""

    rank: int
    row: int
    prompt_id: int
    sample_id: int
    token: int | None = None
    recorded: float | None = None
    recomputed: float | None = None


@dataclass(frozen=True)
class StageOpinion:
    """A stage: "equal", "differs" or "not checked", with the reason.

    Attributes:
        what: the recorded values that were compared, or that differ first.
        option: the explanation as a sentence; None if equal. `changes`: it is empty if unknown.
        others: further explanations, as small.
        rows: the first of `num_rows` rows that differ.
    """

    stage: str
    verdict: str
    what: str | None = None
    reason: str | None = None
    recorded: float | None = None
    recomputed: float | None = None
    allowed: float | None = None
    option: str | None = None
    changes: tuple[Change, ...] = ()
    others: tuple[tuple[Change, ...], ...] = ()
    rows: tuple[RowDifference, ...] = ()
    num_rows: int = 0

    @property
    def is_unexplained(self) -> bool:
        """Whether its recorded values are known to follow from no options."""
        return self.verdict == "not checked" or (self.verdict == "differs" and not self.changes)


@dataclass(frozen=True)
class Opinion:
    """All stages as one computation sees them."""

    name: str
    stages: tuple[StageOpinion, ...] = ()

    @property
    def first(self) -> StageOpinion | None:
        return next((stage for stage in self.stages if stage.verdict == "differs"), None)


@dataclass(frozen=True)
class Crosscheck:
    """The report. `notes` say what was taken to be so."""

    step: int
    opinions: tuple[Opinion, ...]
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> tuple[Opinion, StageOpinion] | None:
        """The opinion and stage of the first difference in the order of computation."""
        found = [(opinion, opinion.first) for opinion in self.opinions if opinion.first is not None]
        return min(found, key=lambda pair: STAGES.index(pair[1].stage), default=None)

    @property
    def verdict(self) -> str:
        """ "equal", "differs" or, if nothing could be checked, "not checked"."""
        if self.first is not None:
            return "differs"
        checked = any(stage.verdict == "equal" for opinion in self.opinions for stage in opinion.stages)
        return "equal" if checked else "not checked"

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON types."""
        by, stage = self.first or (None, None)
        return {
            "verdict": self.verdict,
            "first_stage": stage and stage.stage,
            "option": stage and stage.option,
            "rows": [asdict(row) for row in stage.rows] if stage else [],
            "num_rows": stage.num_rows if stage else 0,
            "by": by and by.name,
            "step": self.step,
            "opinions": [asdict(opinion) for opinion in self.opinions],
            "notes": list(self.notes),
        }


@dataclass
class Comparison:
    """One opinion on one step; `framework` is None for the twin."""

    rows: StepRows
    configured: Configured
    framework: Framework | None
    model: ModelPass | None
    no_model: str
    found: list[StageOpinion] = field(default_factory=list)

    def __post_init__(self) -> None:
        options = self.configured.options
        is_own = self.framework is None or self.framework.name.lower() == self.configured.trainer
        self.base = options if self.framework is None or is_own else self.framework.view(options)
        self.balance = next((v for name, v in self.rows.stats.items() if name in PARTS["balance"]), 0.0)
        self.explained = options  # inputs that were not recorded follow the record's own options
        self.source = self.configured.source if self.framework is None else f"{self.framework.name} has"

    def run(self) -> Opinion:
        """Compare all stages."""
        observed = observations_of(self.rows, self.configured.options)
        for stage in STAGES:
            own = [one for one in observed if one.stage == stage]
            compare = {"loss": self.compare_loss, "gradient": self.compare_gradient}.get(stage)
            try:
                if compare is not None:
                    compare()
                elif own or stage != "values":  # most runs have no critic
                    self.compare(own, stage)
            except CannotRun as error:
                self.skip(stage, str(error))
        name = TWIN
        if self.framework is not None:
            name = f"{self.framework.name} {version(self.framework.name.lower())}"
        return Opinion(name, tuple(self.found))

    def skip(self, stage: str, reason: str | None) -> None:
        """Add a stage that is not checked."""
        self.found.append(StageOpinion(stage, "not checked", reason=reason))

    def compare(self, observed: list[Observation], stage: str) -> None:
        """Compare the observations of a stage before the loss."""
        if reason := self.why_not(stage, observed):
            self.skip(stage, reason)
            return
        stages = self.open_stages(stage)
        if self.framework is not None and stage == "advantages":
            observed = [one for one in observed if one.name == "advantages"]
            theirs = self.framework.advantages(self.rows, self.base)
            values = [Bounded(theirs, twin.advantages_of(self.rows, self.base).error)]
        else:
            values = [one.recompute(self.base) for one in observed]
        misfits, reason = misfits_of(observed, values), None
        unknown = int(np.isnan(self.rows.rewards).sum()) if stage == "advantages" else 0
        is_open = stage == "advantages" and self.framework is None
        either = OPEN | dict(self.configured.either)  # what no configuration says
        for name, variant in either.items() if is_open else ():
            other = replace(self.base, **{name: variant})
            if max(misfits) > 1 and max(again := self.misfits(observed, other)) <= 1:
                self.base, misfits, reason = other, again, f"{KNOWN[name].phrase}: {variant}"
        as_zero = replace(self.base, normalised=KNOWN["normalised"].values[-1])
        if unknown and max(misfits) > 1 < max(self.misfits(observed, as_zero)):
            self.skip(stage, f"{unknown} of {len(self.rows.rewards)} rewards are unknown")
            return
        if max(misfits) <= 1:
            names = ", ".join(one.name for one in observed)
            self.found.append(StageOpinion(stage, "equal", names, reason))
            return
        at = next(at for at, misfit in enumerate(misfits) if misfit > 1)
        one, value = observed[at], values[at]
        shape = shape_of(self.rows, one.recorded, value.value, one.misfit(value) > 1)
        is_number = (one.recorded.ndim == 0 and len(observed) == 1) or stage == "rewards"
        is_paired = not is_number and "values of" not in (shape or "")
        bases = [self.base, *(replace(self.base, **{n: v}) for n, v in self.configured.either.items())]
        each = [*((base, False) for base in bases if len(bases) > 1), (self.base, is_paired)]
        tried = (self.search(observed, at, value, stages, pairs=pairs, base=base) for base, pairs in each)
        found = next((one for one in tried if one.changes), Explanation())
        self.differs(stage, one.name, found, shape, **where(self.rows, one, value))

    def misfits(self, observed: list[Observation], options: Options) -> list[float]:
        """Return the largest misfit of each observation under options."""
        return misfits_of(observed, [one.recompute(options) for one in observed])

    def search(
        self, observed: list[Observation], at: int, value: Bounded, stages: Sequence[str], **how: Any
    ) -> Explanation:
        """Explain observations, of which the one `at` has another value."""

        def misfit(options: Options) -> float:
            again = [one.recompute(options) for one in observed]
            is_near = observed[at].distance(again[at]) <= NEARER * observed[at].distance(value)
            return max(misfits_of(observed, again)) if is_near else inf

        usual: dict[str, Any] = {"counts": self.configured.counts.values(), "base": self.base}
        return explain(preferred=self.configured.options, stages=stages, misfit=misfit, **usual | how)

    def why_not(self, stage: str, observed: list[Observation]) -> str | None:
        rows, options = self.rows, self.base
        if self.framework is not None and stage not in ("advantages", "loss", "gradient"):
            return "the twin checks it: it has no code of its own for the record's values"
        if reason := self.configured.unchecked.get(stage):
            return reason
        if not observed or (self.framework is not None and "advantages" not in rows.tensors):
            return str(TABLES["lacks"][stage])
        if stage != "rewards" and (missing := self.missing()):
            return missing
        if stage in ("rewards", "advantages") and (lacks := int((~np.isfinite(rows.rewards)).sum())):
            is_not = "unknown" if "rewards" in rows.unknown else "not finite"
            is_apart = stage == "advantages" and self.framework is None and is_not == "unknown"
            if not is_apart or np.isinf(rows.rewards).any() or lacks == len(rows.rewards):
                return f"{lacks} of {len(rows.rewards)} rewards are {is_not}"
        if stage in ("rewards", "mask", "values"):
            return None
        if stage == "advantages":
            if self.configured.has_critic and "values" not in rows.tensors:
                return "the record has no values of the critic"
            if "prompt_id" in rows.unknown and "group" in (options.mean, options.std):
                return "it is unknown which rows belong to one prompt"
        recorded = stage == "advantages" and "kl_rewards" in rows.tensors and options.kl_place == "advantages"
        if options.kl_reward_coef and "ref_logp" not in rows.tensors and not recorded:
            return "the record has no log-probs of the reference, which the KL in the reward needs"
        return None

    def missing(self) -> str | None:
        """Return what no stage but the rewards can be checked without, if some rows lack it."""
        if "loss_mask" in self.rows.unknown:
            return "the loss mask of some rows is unknown"
        by_reason = self.base.mask == "without truncated rows" or self.base.truncated != Options.truncated
        if by_reason and "finish_reason" in self.rows.unknown:
            return "it is unknown which rows were truncated"
        return None

    def open_stages(self, stage: str) -> list[str]:
        """Return the stages whose options may explain a difference: its own, and unchecked ones."""
        checked = {opinion.stage for opinion in self.found if opinion.verdict != "not checked"}
        before = [one for one in STAGES[: STAGES.index(stage)] if one != "values"]  # of the critic alone
        # raw rewards are checked, shaped ones are not recorded
        return [one for one in before if one == "rewards" or one not in checked] + [stage]

    def differs(
        self, stage: str, what: str, found: Explanation, shape: str | None = None, **location: Any
    ) -> None:
        """Add a stage that differs, with its explanation if there is one."""
        open_stages = self.open_stages(stage)
        first = found.changes
        of_changes = [KNOWN[change.option].stage for change in first]
        named = min((one for one in of_changes if one in open_stages), key=STAGES.index, default=stage)
        if named != stage:
            self.found = [opinion for opinion in self.found if opinion.stage != named]
            follows = f"follows from {named}"
            self.found.append(StageOpinion(stage, "differs", what, option=follows, changes=first))
        unknown = UNKNOWN if shape is None else f"{UNKNOWN}: {shape}"
        counts = {**self.configured.counts, "the number of rows": len(self.rows.lengths)}
        option = sentence(first, found.others, self.source, counts, self.rows.sizes) if first else unknown
        location |= {"option": option, "changes": first, "others": found.others}
        self.found.append(StageOpinion(named, "differs", what, **location))
        self.found.sort(key=lambda opinion: STAGES.index(opinion.stage))
        changed = {change.option: change.recorded for change in first}
        self.base = replace(self.base, **changed)  # later stages are not accused of the same
        if self.framework is None:
            self.explained = replace(self.explained, **changed)

    def compare_loss(self) -> None:
        self.updates, reasons = self.known_updates()
        if self.differs_by_parts() or self.differs_by_old():
            return
        compared = [update for update in self.updates if update.loss is not None and isfinite(update.loss)]
        if not compared:
            reason = "the record has no finite loss" if self.updates else "; ".join(reasons)
            self.skip("loss", reason)
            return
        # a mask that explains the advantages may be the loss's, too, or not
        masks = dict.fromkeys((self.base.mask, self.configured.options.mask))
        bases = [replace(self.base, mask=mask) for mask in masks]
        bases += [replace(self.base, **{name: value}) for name, value in self.configured.either.items()]
        tried = [[bounded(self.loss(update, base)) for update in compared] for base in bases]
        observed = [self.of_loss(update) for update in compared]
        fits = [misfits_of(observed, values) for values in tried]
        best = fits.index(min(fits, key=max))
        self.base = bases[best]
        what = f"loss of {self.named(compared)}"
        if self.base.kl_coef and not all(update.with_kl for update in compared):
            reasons.append("the recorded loss is without the KL, which is not checked")
        if max(fits[best]) <= 1:
            self.found.append(StageOpinion("loss", "equal", what, reason="; ".join(reasons) or None))
            return

        stages = [*dict.fromkeys(("mask", *self.open_stages("loss")))]
        at = next(at for at, fit in enumerate(fits[best]) if fit > 1)
        value = tried[best][at]
        found = self.search(observed, at, value, stages, pairs=len(compared) > 1)
        if not found.changes and len(compared) == 1:
            found = self.by_divisor(compared[0], self.loss(compared[0], self.base)) or found
        self.differs("loss", observed[at].name, found, **where(self.rows, observed[at], value))

    def of_loss(self, update: Update) -> Observation:
        name, recorded = f"loss of {self.named([update])}", np.asarray(update.loss)
        return Observation("loss", name, recorded, lambda options: bounded(self.twin_loss(update, options)))

    def differs_by_parts(self) -> bool:
        """Compare the logged loss with its logged parts, and add a difference that a weight explains."""
        stats = self.rows.stats
        logged = {part: [stats[name] for name in names if name in stats] for part, names in PARTS.items()}
        needed = {"kl": self.base.kl_coef, "entropy": self.base.entropy_coef, "total": 1.0, "policy": 1.0}
        lacks = any(weight and not logged[part] for part, weight in needed.items())
        if self.framework is not None or lacks:
            return False
        total, policy, kl, entropy, _ = (next(iter(logged[part]), 0.0) for part in PARTS)
        allowed = np.asarray(OF_PARTS * (abs(total) + abs(policy)))

        def added(options: Options) -> Bounded:
            terms = options.kl_coef * kl - options.entropy_coef * entropy
            return Bounded(np.asarray(policy + terms), allowed)

        observed = Observation("loss", "the loss and its logged parts", np.asarray(total), added)
        if observed.misfit(value := added(self.base)) <= 1:
            return False
        found = self.search([observed], 0, value, ["loss"], pairs=False)
        if found.changes:
            self.differs("loss", observed.name, found, **where(self.rows, observed, value))
        return bool(found.changes)

    def differs_by_old(self) -> bool:
        """Add a difference of old log-probs from those of the only update, which starts from the same weights."""
        tensors, mask = self.rows.tensors, self.rows.mask
        is_one = self.base.old_logprobs == "trainer" and len(self.updates) == len(self.rows.updates) == 1
        has_both = {"current_logp", "prox_logp"} <= tensors.keys() and not self.rows.noise
        if self.framework is not None or not is_one or not has_both:
            return False
        current, old = (np.where(mask, tensors[name], np.nan) for name in ("current_logp", "prox_logp"))
        apart, of_engine = (float(np.nanmean(np.abs(current - x))) for x in (old, tensors["logprobs"]))
        is_others = apart > APART and is_of_others(mask, old, current, APART)
        if not is_others and (apart <= APART or of_engine >= SAME * apart):
            return False
        others = "rows" if is_others else TEXTS["of the engine"]
        observed = Observation("loss", "old log-probs", old, lambda _: exactly(current))
        place = where(self.rows, observed, Bounded(current, np.full(current.shape, APART)))
        text = TEXTS["other log-probs"].format(apart, others)
        self.found.append(StageOpinion("loss", "differs", observed.name, option=text, **place))
        return True

    def by_divisor(self, update: Update, own: Loss) -> Explanation | None:
        """Explain a loss by another whole number that divides it; None if it would be one by chance."""
        count = twin.divisor_of(self.inputs(update, self.base), self.base)
        if not count or not update.loss or not own.value:
            return None
        implied = count * own.value / update.loss
        error = abs(implied * own.error / own.value) / TYPICAL
        near = [size for size in self.rows.sizes.values() if abs(implied - size) <= error <= OF_SIZE * size]
        divisor = near[0] if near else round(implied)
        is_certain = bool(near) or error <= WHOLE
        if not is_certain and self.model is not None and update.grad_norm is not None:
            norm = self.norm(update, own, self.base)  # is divided by the same
            gap = abs(update.grad_norm * implied / count - norm.value)
            is_certain = error < 0.5 and bool(gap <= norm.error + error * norm.value)
        is_whole = is_certain and abs(implied - divisor) <= error + UNIT * divisor
        if not is_whole or divisor < 1 or divisor == count:
            return None
        return Explanation((Change("divisor", count, divisor),))

    def named(self, some: Sequence[Update]) -> str:
        """Number optimizer steps: "optimizer steps 1, 2, 3"."""
        numbers = [str(at) for at, one in enumerate(self.rows.updates) if any(one is each for each in some)]
        return f"optimizer step{'s' * (len(some) > 1)} {', '.join(numbers)}"

    def known_updates(self) -> tuple[list[Update], list[str]]:
        rows, options = self.rows, self.base
        if reason := self.configured.unchecked.get("loss") or self.missing():
            return [], [reason]
        if options.objective != "policy":
            is_lacking = options.pair_reference != "nothing" and options.objective == "preference"
            is_lacking = is_lacking and "ref_logp" not in rows.tensors
            reasons = ["the record has no log-probs of the reference"] if is_lacking else []
            reasons += [self.no_model] if self.current() is None else []
            return ([] if reasons else list(rows.updates)), reasons
        with_entropy = any(update.with_kl for update in rows.updates) and options.entropy_coef
        if with_entropy and "entropy" not in rows.tensors:
            return [], ["the record has no entropies of its tokens, which the loss needs"]
        if self.balance and options.balance_coef is None:
            return [], ["the weight of the balancing loss of experts is not known, which is in the loss"]
        if "advantages" not in rows.tensors:
            doubted = next((one for one in self.found if one.stage == "advantages"), None)
            if doubted is not None and doubted.is_unexplained:
                return [], ["the advantages of the step are not known"]
        elif np.isnan(rows.tensors["advantages"][rows.mask]).any():
            return [], ["the advantages of some rows are unknown"]
        of_engine = options.correction is not None or options.old_logprobs == "rollout"
        if of_engine and np.isnan(rows.tensors["logprobs"][rows.mask]).any():
            return [], ["the sampling log-probs of some tokens are unknown"]
        if options.kl_coef and "ref_logp" not in rows.tensors:
            return [], ["the record has no log-probs of the reference, which the KL in the loss needs"]
        known = [update for update in rows.updates if update.same_weights]
        reasons = []
        if others := [update for update in rows.updates if not update.same_weights]:
            start = "starts" if len(others) == 1 else "start"
            reasons = [f"{self.named(others)} {start} from weights that only a replay has"]
        if self.current() is None:
            return [], [self.no_model]
        if options.old_logprobs == "trainer" and "prox_logp" not in rows.tensors and not rows.noise:
            return [], ["the record has no log-probs of the trainer before the step"]
        return known, reasons

    def current(self) -> Floats | None:
        """Return the log-probs that the optimizer steps start from, if they are known or cancel."""
        if (current := self.rows.tensors.get("current_logp")) is not None:
            return current
        is_one = self.base.old_logprobs == "current" and self.base.objective == "policy"
        if is_one and self.base.kl_coef == 0.0:
            return np.zeros(self.rows.mask.shape)
        return None

    def inputs(self, update: Update, options: Options) -> LossInputs:
        """Return what the loss of an optimizer step needs under some options."""
        rows = self.rows
        current = self.current()
        assert current is not None
        if self.model is not None and options.labels_ahead > 1:
            current = self.model.logprobs(rows, options.labels_ahead)[0]
        if options.objective != "policy":
            advantages = exactly(np.ones(rows.mask.shape))
        elif "advantages" in rows.tensors:
            # a row's one advantage is that of tokens outside of the mask, too, where records have 0
            recorded = rows.tensors["advantages"]
            last = rows.mask.shape[1] - 1 - rows.mask[:, ::-1].argmax(1)
            one = recorded[np.arange(len(last)), last][:, None]
            is_one = ((recorded == one) | ~rows.mask).all(1, keepdims=True)
            advantages = exactly(np.where(is_one & ~rows.mask, one, recorded))
        else:
            stages = self.open_stages("loss")
            chosen = {n: getattr(options, n) for n, known in KNOWN.items() if known.stage in stages}
            advantages = twin.advantages_of(rows, replace(self.explained, **chosen))
        return twin.loss_inputs(rows, options, update, advantages, current)

    def loss(self, update: Update, options: Options) -> Loss:
        """Compute the loss of an optimizer step as this opinion does. Raises CannotRun."""
        found = self.twin_loss(update, options)
        if self.framework is None:
            return found
        options = options if update.with_kl else replace(options, kl_coef=0.0, entropy_coef=0.0)
        value, gradient = self.framework.loss(self.inputs(update, options), options)
        return replace(found, value=value, gradient=gradient)

    def twin_loss(self, update: Update, options: Options) -> Loss:
        found = twin.loss_of(self.inputs(update, options), options)
        if update.with_kl:
            balance = (options.balance_coef or 0.0) * self.balance
            return replace(found, value=found.value + balance, error=found.error + OF_PARTS * abs(balance))
        options = replace(options, kl_coef=0.0, entropy_coef=0.0)
        return replace(twin.loss_of(self.inputs(update, options), options), gradient=found.gradient)

    def compare_gradient(self) -> None:
        compared = [one for one in self.updates if one.grad_norm is not None and isfinite(one.grad_norm)]
        loss = next(one for one in self.found if one.stage == "loss")
        reason = self.configured.unchecked.get("gradient")
        if self.base.entropy_coef or (self.base.balance_coef and self.balance):
            reason = "the gradient of the entropy or of experts' balance is not recomputed"
        elif self.model is None:
            reason = self.no_model
        elif not compared or loss.verdict == "not checked":
            reason = loss.reason or "the record has no finite gradient norm"
        if reason is not None:
            self.skip("gradient", reason)
            return
        for update in compared:
            name, recorded = f"gradient norm of {self.named([update])}", np.asarray(update.grad_norm)
            own = self.loss(update, self.base)
            observed = Observation("gradient", name, recorded, cache(partial(self.norm_under, update, own)))
            if observed.misfit(value := self.norm(update, own, self.base)) > 1:
                each = (("gradient",), ("loss", "gradient"))  # a pass of the model for each option, once
                tried = (self.search([observed], 0, value, of, pairs=False, counts=()) for of in each)
                found = next((one for one in tried if one.changes), Explanation())
                self.differs("gradient", name, found, **where(self.rows, observed, value))
                return
        self.found.append(StageOpinion("gradient", "equal", f"gradient norm of {self.named(compared)}"))

    def norm(self, update: Update, loss: Loss, options: Options) -> Bounded:
        """Return the gradient norm of a loss, as it is reported, and the noise of float32."""
        assert self.model is not None
        parts = twin.micro_batch_of(self.inputs(update, options).ranks, options.micro_batches)
        kept = (parts == parts[-1]) | (not options.gradient_of.endswith("the last micro-batch"))
        gradient = loss.gradient * options.gradient_scale * kept[:, None]
        norm, noise = self.model.norm(self.rows, update, gradient, parts, options)
        reported = min(norm, options.max_norm) if options.norm == "after" else norm
        # where all terms cancel, the rounding of the recorded log-probs is left
        return Bounded(np.asarray(reported), np.asarray(noise + NO_GRADIENT))

    def norm_under(self, update: Update, own: Loss, options: Options) -> Bounded:
        """Return the norm under other options; infinite where nothing changes, or the loss is no longer the recorded one."""
        loss = self.twin_loss(update, options)
        how = options.norm, options.gradient_scale, options.gradient_of, options.shards
        is_whole = how == (Options.norm, Options.gradient_scale, Options.gradient_of, Options.shards)
        same = is_whole and bool((loss.gradient == own.gradient).all())
        if same or (update.loss is not None and self.of_loss(update).misfit(bounded(loss)) > 1):
            return Bounded(np.asarray(inf), np.zeros(()))
        return self.norm(update, loss, options)


def misfits_of(observed: Sequence[Observation], values: Sequence[Bounded]) -> list[float]:
    """Return the largest misfit of each observation."""
    return [float(one.misfit(value).max()) for one, value in zip(observed, values, strict=True)]


def bounded(loss: Loss) -> Bounded:
    return Bounded(np.asarray(loss.value), np.asarray(loss.error + 3 * UNIT * abs(loss.value)))


def where(rows: StepRows, observation: Observation, found: Bounded) -> dict[str, Any]:
    """Return the rows that differ, and the first values."""
    wrong = observation.misfit(found) > 1
    recorded, value = observation.recorded, found.value
    first = {place[0]: tuple(place) for place in np.argwhere(wrong)[::-1].tolist() if place}  # of each row
    listed = []
    for row, at in sorted(first.items())[:SHOWN_ROWS]:
        values = [at[1] + 1 if at[1:] else None, float(recorded[at]), float(value[at])]
        listed.append(RowDifference(*rows.place[row].tolist(), *values))
    at = tuple(np.argwhere(wrong)[0])
    return {
        "rows": tuple(listed),
        "num_rows": len(first),
        "recorded": float(recorded[at]),
        "recomputed": float(value[at]),
        "allowed": float(found.error[at] + UNIT * abs(recorded[at])),
    }


TWIN = "float64"
OPINIONS = (TWIN, *FRAMEWORKS)


def parse_opinions(text: str) -> tuple[str, ...]:
    """Parse names divided by commas. Raises ValueError for an unknown one."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    if not names or any(name not in OPINIONS for name in names):
        raise ValueError(f"--with {text} names nobody who recomputes: choose from {', '.join(OPINIONS)}")
    return names


def crosscheck(rows: StepRows, opinions: Sequence[str], model: str | None = None) -> Crosscheck:
    """Recompute a step with each of the `opinions`.

    Args:
        model: folder of the weights that the step starts from; by default that of the recorded run,
            for the step that starts from it.

    Raises:
        ValueError: the record has no configuration that is read here, or the model is another one.
        ModuleNotFoundError: a framework is not installed.
    """
    frameworks = [FRAMEWORKS[name]() for name in opinions if name != TWIN]
    configured = options_of(rows.origin)
    loaded, no_model = find_model(rows, configured, model)
    if loaded is not None and "current_logp" not in rows.tensors:
        current, noise = loaded.logprobs(rows)
        if not rows.origin.is_shown:
            gap = float(np.nanmean(np.abs(current - rows.tensors["prox_logp"])[rows.mask]))
            if gap > noise:
                raise WrongModel(TEXTS["other weights"].format(model, rows.step, gap, noise))
        rows = replace(rows, tensors=rows.tensors | {"current_logp": current}, noise=noise)
    ours = Comparison(rows, configured, None, loaded, no_model)
    own, notes = ours.run(), []
    stage = next(stage for stage in own.stages if stage.stage == "advantages")
    if "advantages" not in rows.tensors and not stage.is_unexplained and frameworks:
        found = twin.advantages_of(rows, ours.explained).value.astype(np.float32).astype(np.float64)
        rows = replace(rows, tensors=rows.tensors | {"advantages": found})
        notes.append("the record has statistics of its advantages; those of the twin agree and are used here")
    others = [Comparison(rows, configured, framework, loaded, no_model).run() for framework in frameworks]
    listed: list[Opinion] = [own, *others] if TWIN in opinions else others
    return Crosscheck(rows.step, tuple(listed), tuple(notes))


def find_model(rows: StepRows, configured: Configured, given: str | None) -> tuple[ModelPass | None, str]:
    """Load the weights that a step starts from; None with the reason if they are not at hand.

    Raises WrongModel if the folder for a step that starts from the run's model is another one.
    """
    origin = rows.origin
    actor = origin.config["actor"] if configured.trainer is None else {}
    if actor.get("use_lora"):
        return None, "an adapter was trained, which is not recomputed here"
    if model_type(given or str(origin.model_path), "vision_config") is not None:
        return None, "a vision model was trained, which is not recomputed here"
    path = given or (origin.model_path if origin.starts_from_model else None)
    own = rows.tensors.get("current_logp", rows.tensors.get("prox_logp") if origin.has_own_logprobs else None)
    size_bytes = sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) if path else 0
    is_shown = configured.dtype is None and own is not None and 0 < size_bytes < SMALL_MODEL
    unlike = TEXTS["no log-probs"].format(configured.dtype or "an unknown dtype")
    if configured.dtype != "float32" and not is_shown:
        return None, unlike
    if not path or not os.path.isdir(path):
        if given:
            raise WrongModel(f"{given} is not a folder on this machine: give one with a model to --model")
        goto = f"`areal-debug goto {origin.path} --step {rows.step} -o FOLDER` writes them"
        other = "or record the current log-probs" if configured.trainer else goto
        return None, f"the weights that the step starts from are not at hand: give --model FOLDER; {other}"
    if not (origin.is_shown or origin.has_own_logprobs or "current_logp" in rows.tensors):
        return None, f"nothing in the record shows that {given} has the weights that the step starts from"
    if origin.starts_from_model:
        files = folder_identity(path)["files"]
        if names := [name for name, identity in origin.model_files.items() if files.get(name) != identity]:
            raise WrongModel(TEXTS["other files"].format(path, ", ".join(names[:3])))
    try:
        loaded = load_pass(path, configured.temperature, replays_experts=rows.experts is not None)
    except (OSError, ValueError) as error:
        if given:
            raise
        return None, f"{path} could not be loaded: {str(error).splitlines()[0]}"
    if rows.input_ids.max() >= (size := loaded.models[0][0].get_input_embeddings().num_embeddings):
        return None, f"the record has token {rows.input_ids.max()}, and {path} has {size} tokens"
    if own is not None and (is_shown or "current_logp" in rows.tensors):
        current, noise = loaded.logprobs(rows)
        if not (np.abs(current - own)[rows.mask] <= noise).all():  # not from these weights, or not in float32
            return None, unlike if is_shown else f"{path} does not give the recorded current log-probs"
    return loaded, ""
