"""Report of `areal-debug eval`: models, their comparison with the first, what may mislead."""

from collections.abc import Sequence

from areal_core.rollout.types import TOP_K_OFF
from areal_debug.eval.estimates import CONFIDENCE, MOST_RESAMPLED, RESAMPLES, Estimate
from areal_debug.eval.results import (
    LOSS,
    SAMPLES,
    SCORE,
    Change,
    Comparison,
    ModelResult,
    Report,
    Settings,
    Test,
    Verdict,
    is_share,
)
from areal_debug.render import count, format_number
from areal_debug.report import model as shown_as
from areal_debug.report.links import view_command
from areal_debug.report.model import Block, Cell, Facts, Level, Row, Table

LEVELS: dict[Verdict, Level] = {"better": "good", "worse": "bad", "no difference found": "dim"}
KINDS = {"valid": "validation", "train": "training"}
METHODS = {"sft": "fine-tuning", "dpo": "DPO", "rw": "reward model"}
BINARY = 2  # distinct rewards of a reward that is solved or not
SHOWN_CHANGES = 5  # prompts; --json has all
SHOWN_CHARACTERS = 60  # of a prompt
SHOWN_NUMBERS = 20  # of pairs
# Columns of a model's facts, beside its measures.
FACTS = {"truncated": "truncated>", "mean_tokens": "tokens>", "num_tokens": "tokens>"}
MISLEADING = {
    "missing": "samples that {1} lacks: {0:,}. The workflow left them out, or they failed",
    "repeated": "prompts of {1} with the text of an earlier one: {0:,}. They are counted as independent, so intervals "
    "and p-values are too small",
    "num_ties": "pairs of {1} with a margin of 0: {0:,}. The accuracy counts them as wrong: a model equal to its "
    "reference, or a score head that is not trained",
}


def report_of(report: Report) -> shown_as.Report:
    settings, first = report.settings, report.models[0]
    names = list(dict.fromkeys(name for model in report.models for name in model.measures))
    columns = [FACTS[name] for name in first.facts if name in FACTS]
    of_rows = [] if settings.method == SAMPLES else ["rows>"]
    headings = ["model", *(f"{name}>" for name in names), *of_rows, *columns]
    blocks: list[Block] = [
        Table(headings, [cells_of_model(of, names, bool(of_rows)) for of in report.models])
    ]
    if report.comparisons:
        blocks.append(table_of_comparisons(report))
        blocks.append(Facts(changed_rows(report)))
    blocks.append(Facts(notes_on(report)))
    what = "samples" if settings.method == SAMPLES else "rows"
    rows = [Row(f"{what} of", f"{model.name}: {model.file}") for model in report.models]
    if report.record is not None:
        command = view_command(report.record, 0)
        rows.append(Row("look", f"tokens and log-probs, a step per model: {command}"))
    note = f"{report.run}: {describe(settings)}"
    return shown_as.Report(*headline(report), "", [*blocks, Facts(rows)], [note])


def headline(report: Report) -> tuple[str, str]:
    """Return the result in one line."""
    first, decides = report.models[0], report.settings.decides
    if not report.comparisons:
        return first.name, ", ".join(f"{name} {shown(name, e)}" for name, e in first.measures.items())
    lowest = decides == LOSS
    best = (min if lowest else max)(report.models, key=lambda model: model.measures[decides].value)
    verdicts = "; ".join(
        f"{item.name}: {item.verdict}" + (f", by score {item.by_score.verdict}" if item.by_score else "")
        for item in report.comparisons
    )
    return f"{'lowest' if lowest else 'highest'} {decides}", (
        f"{best.name}, {shown(decides, best.measures[decides])}. Against {first.name}: {verdicts}"
    )


def describe(settings: Settings) -> str:
    """Return the rows and the sampling options in one line."""
    rows = f"{settings.num_rows:,} {KINDS[settings.rows]} {settings.unit}s"
    if settings.method != SAMPLES:
        return f"{rows}, {METHODS[settings.method]}"
    sampling = settings.sampling
    how = "greedy" if sampling["greedy"] else f"temperature {sampling['temperature']:g}"
    limits = [f"top_p {sampling['top_p']:g}"] if sampling["top_p"] < 1 else []
    limits += [f"top_k {sampling['top_k']}"] if sampling["top_k"] < TOP_K_OFF else []
    how = ", ".join([how, *limits, f"at most {sampling['max_new_tokens']:,} new tokens"])
    return f"{rows}, {count(settings.n_samples, 'sample')} of each, {how}"


def cells_of_model(model: ModelResult, names: Sequence[str], shows_rows: bool) -> list[str]:
    measures = (shown(name, model.measures[name]) if name in model.measures else "?" for name in names)
    facts = [
        f"{100 * value:.0f} %" if name == "truncated" else f"{value:,.0f}"
        for name, value in model.facts.items()
        if name in FACTS
    ]
    return [model.name, *measures, *([f"{model.num_rows:,}"] if shows_rows else []), *facts]


def table_of_comparisons(report: Report) -> Table:
    """Return the differences from the first model; those of scores stand behind the verdict."""
    items, unit = report.comparisons, report.settings.unit
    names = list(dict.fromkeys(name for item in items for name in item.measures if name != SCORE))
    measures = [f"{name}, points>" if is_share(name) else f"{name}>" for name in names]
    headings = ["model", *measures, "better/worse/equal>", "p>", "verdict"]
    scored = any(item.by_score for item in items)
    headings += [f"{SCORE}>", "p>", "by score"] if scored else []
    by = "row" if unit == "pair" else unit
    title = f"against {items[0].baseline}, {by} by {by}"
    return Table(headings, [cells_of_comparison(item, names, scored) for item in items], title)


def cells_of_comparison(item: Comparison, names: Sequence[str], scored: bool) -> list[str | Cell]:
    measures = [shown(name, item.measures[name], "+") if name in item.measures else "?" for name in names]
    counts = f"{item.better:,}/{item.worse:,}/{item.equal:,}"
    by_score: list[str | Cell] = ["?"] * 3 if scored else []
    if item.by_score is not None:
        by_score = [shown(SCORE, item.measures[SCORE], "+"), *cells_of_test(item.by_score)]
    return [item.name, *measures, counts, *cells_of_test(item), *by_score]


def cells_of_test(item: Comparison | Test) -> list[str | Cell]:
    return [chance(item.p_value), Cell(item.verdict, LEVELS[item.verdict])]


def changed_rows(report: Report) -> list[Row]:
    """Return a row for what became wrong in each comparison, and one for what became right."""
    found = []
    for item in report.comparisons:
        kinds = {"right to wrong": item.became_wrong, "wrong to right": item.became_right}
        found += [
            Row(words, f"{item.name} ({len(changes):,}): {shown_changes(changes, report.settings)}")
            for words, changes in kinds.items()
            if changes
        ]
    return found


def shown_changes(changes: Sequence[Change], settings: Settings) -> str:
    """Return the first changed prompts, numbers and the ends of texts; of pairs only numbers."""
    if settings.method == SAMPLES:
        first = [f"{of.number} {of.text[-SHOWN_CHARACTERS:]!r}" for of in changes[:SHOWN_CHANGES]]
        return "; ".join(first + (["..."] if len(changes) > SHOWN_CHANGES else []))
    numbers = [str(of.number) for of in changes[:SHOWN_NUMBERS]]
    return ", ".join(numbers + (["..."] if len(changes) > SHOWN_NUMBERS else []))


def shown(name: str, estimate: Estimate, sign: str = "") -> str:
    """Return a mean with its interval: `0.412 [0.361, 0.463]`, a share `41.2 % [36.1, 46.3]`.

    With the sign "+" a difference; of shares in percentage points, `+4.2 [-1.0, +9.4]`.
    """
    unit, spec = (100, f"{sign}.1f") if is_share(name) else (1, f"{sign}.3f")
    text = f"{unit * estimate.value:{spec}}" + " %" * (is_share(name) and not sign)
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} [{unit * estimate.low:{spec}}, {unit * estimate.high:{spec}}]"


def chance(p_value: float) -> str:
    """Return the p-value; smaller ones than 0.001 are not exact."""
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def notes_on(report: Report) -> list[Row]:
    """Explain the numbers, and warn where they may mislead."""
    settings, rewards = report.settings, report.distinct_rewards
    if settings.method == SAMPLES:
        how = (
            f"bootstrap over prompts, {RESAMPLES:,} resamples (normal above "
            f"{MOST_RESAMPLED:,} different values, Wilson's where every prompt has 0 % or 100 %). A sample solves its prompt if its "
            f"reward is above {format_number(report.solved_above)}."
        )
    else:
        how = f"bootstrap over rows, {RESAMPLES:,} resamples. The verdict is of the loss."
    notes = [Row("intervals", f"{CONFIDENCE:.0%} intervals: {how}", "dim")]
    if len(rewards) > BINARY:
        text = (
            f"rewards have {len(rewards):,} distinct values from {format_number(rewards[0])} to "
            f"{format_number(rewards[-1])}: --solved-above decides which of them pass@k counts as solved"
        )
        notes.append(Row("note", text, "unsure"))
    if settings.reward_model is not None:
        notes.append(Row("scores", f"scores are of {settings.reward_model}; the rewards do not contain them"))
    notes += [Row("note", text, "unsure") for text in report.differing_settings]
    return notes + [
        Row("note", text.format(int(model.facts[name]), model.name), "unsure")
        for model in report.models
        for name, text in MISLEADING.items()
        if model.facts.get(name)
    ]
