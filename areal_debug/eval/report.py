"""Report of `areal-debug eval`: models, their comparison with the first, what may mislead."""

from collections.abc import Callable, Sequence

from areal_core.rollout.types import TOP_K_OFF
from areal_debug.eval.estimates import CONFIDENCE, MOST_RESAMPLED, RESAMPLES, Estimate
from areal_debug.eval.results import Change, Comparison, ModelResult, Report, Settings, Verdict
from areal_debug.eval.saved import AnyReport
from areal_debug.eval.supervised_rows import ACCURACY, RowComparison, RowReport
from areal_debug.render import count, format_number
from areal_debug.report import model as shown_as
from areal_debug.report.links import view_command
from areal_debug.report.model import Block, Cell, Facts, Level, Row, Table

LEVELS: dict[Verdict, Level] = {"better": "good", "worse": "bad", "no difference found": "dim"}
KINDS = {"valid": "validation", "train": "training"}
METHODS = {"sft": "fine-tuning", "dpo": "DPO", "rw": "reward model"}
BINARY = 2  # distinct rewards of a reward that is solved or not
SHOWN_CHANGES = 5  # --json has all
SHOWN_CHARACTERS = 60  # of a prompt
SHOWN_NUMBERS = 20


def report_of(report: AnyReport) -> shown_as.Report:
    """Return the report of an evaluation of samples, or of the rows of a supervised method."""
    return of_samples(report) if isinstance(report, Report) else of_rows(report)


def of_samples(report: Report) -> shown_as.Report:
    ks = report.models[0].pass_at
    scored = any(model.mean_score for model in report.models)
    score = ["mean score>"] if scored else []
    headings = ["model", "mean reward>", *score, *(f"pass@{k}>" for k in ks), "truncated>", "tokens>"]
    blocks: list[Block] = [Table(headings, [cells_of_model(model, scored) for model in report.models])]
    if report.comparisons:
        headings = ["model", "mean reward>", *(f"pass@{k}, points>" for k in ks), "better/worse/equal>", "p>"]
        headings += ["verdict", *(["mean score>", "p>", "by score"] if scored else [])]
        rows = [cells_of_comparison(item, scored) for item in report.comparisons]
        blocks.append(Table(headings, rows, f"against {report.comparisons[0].baseline}, prompt by prompt"))
        blocks.append(Facts(changed_rows(report.comparisons, shown_changes)))
    blocks.append(Facts(notes_on_samples(report)))
    rows_of_files = [Row("samples of", f"{model.name}: {model.file}") for model in report.models]
    if report.record is not None:
        command = view_command(report.record, 0)
        rows_of_files.append(Row("look", f"tokens and log-probs, a step per model: {command}"))
    note = f"{report.run}: {describe(report.settings)}"
    return shown_as.Report(*headline_of_samples(report), "", [*blocks, Facts(rows_of_files)], [note])


def of_rows(report: RowReport) -> shown_as.Report:
    settings, has_tokens = report.settings, not report.settings.has_pairs
    headings = ["model", *(f"{name}>" for name in report.models[0].measures), "rows>"]
    rows = [
        [
            model.name,
            *(measure(name, estimate) for name, estimate in model.measures.items()),
            f"{model.num_rows:,}",
            *([f"{model.num_tokens:,}"] if has_tokens else []),
        ]
        for model in report.models
    ]
    blocks: list[Block] = [Table([*headings, *(["tokens>"] if has_tokens else [])], rows)]
    if report.comparisons:
        names = report.comparisons[0].measures
        measures = [f"{name}, points>" if name == ACCURACY else f"{name}>" for name in names]
        headings = ["model", *measures, "better/worse/equal>", "p>", "verdict"]
        compared = [cells_of_rows(item) for item in report.comparisons]
        blocks.append(Table(headings, compared, f"against {report.comparisons[0].baseline}, row by row"))
        blocks.append(Facts(changed_rows(report.comparisons, shown_numbers)))
    blocks.append(Facts(notes_on_rows(report)))
    blocks.append(Facts([Row("rows of", f"{model.name}: {model.file}") for model in report.models]))
    unit = "pairs" if settings.has_pairs else "rows"
    what = f"{settings.num_rows:,} {KINDS[settings.rows]} {unit}, {METHODS[settings.method]}"
    return shown_as.Report(*headline_of_rows(report), "", blocks, [f"{report.run}: {what}"])


def headline_of_samples(report: Report) -> tuple[str, str]:
    """Return the result in one line."""
    first = report.models[0]
    if not report.comparisons:
        reward = f"mean reward {number(first.mean_reward)}"
        score = [] if first.mean_score is None else [f"mean score {number(first.mean_score)}"]
        passes = [f"pass@{k} {percent(estimate)}" for k, estimate in first.pass_at.items()]
        return first.name, ", ".join([reward, *score, *passes])
    best = max(report.models, key=lambda model: model.mean_reward.value)
    verdicts = "; ".join(
        f"{item.name}: {item.verdict}" + (f", by score {item.score.verdict}" if item.score else "")
        for item in report.comparisons
    )
    return "highest mean reward", (
        f"{best.name}, {number(best.mean_reward)}. Against {first.name}: {verdicts}"
    )


def headline_of_rows(report: RowReport) -> tuple[str, str]:
    first = report.models[0]
    if not report.comparisons:
        return first.name, ", ".join(f"{name} {measure(name, e)}" for name, e in first.measures.items())
    best = min(report.models, key=lambda model: model.measures["loss"].value)
    verdicts = "; ".join(f"{item.name}: {item.verdict}" for item in report.comparisons)
    return "lowest loss", f"{best.name}, {number(best.measures['loss'])}. Against {first.name}: {verdicts}"


def describe(settings: Settings) -> str:
    """Return the rows and the sampling options in one line."""
    sampling = settings.sampling
    how = "greedy" if sampling["greedy"] else f"temperature {sampling['temperature']:g}"
    limits = [f"top_p {sampling['top_p']:g}"] if sampling["top_p"] < 1 else []
    limits += [f"top_k {sampling['top_k']}"] if sampling["top_k"] < TOP_K_OFF else []
    how = ", ".join([how, *limits, f"at most {sampling['max_new_tokens']:,} new tokens"])
    samples = f"{count(settings.n_samples, 'sample')} of each"
    return f"{settings.num_rows:,} {KINDS[settings.rows]} prompts, {samples}, {how}"


def cells_of_model(model: ModelResult, scored: bool) -> list[str]:
    return [
        model.name,
        number(model.mean_reward),
        *(["?" if model.mean_score is None else number(model.mean_score)] if scored else []),
        *map(percent, model.pass_at.values()),
        f"{100 * model.truncated:.0f} %",
        f"{model.mean_tokens:,.0f}",
    ]


def cells_of_comparison(item: Comparison, scored: bool) -> list[str | Cell]:
    of_score: list[str | Cell] = ["?"] * 3 if scored else []
    if scored and item.score is not None:
        mean, p_value = number(item.score.mean, "+"), chance(item.score.p_value)
        of_score = [mean, p_value, Cell(item.score.verdict, LEVELS[item.score.verdict])]
    passes = map(points, item.pass_at.values())
    return [item.name, number(item.mean_reward, "+"), *passes, *cells_of_test(item), *of_score]


def cells_of_rows(item: RowComparison) -> list[str | Cell]:
    measures = (points(e) if name == ACCURACY else number(e, "+") for name, e in item.measures.items())
    return [item.name, *measures, *cells_of_test(item)]


def cells_of_test(item: Comparison | RowComparison) -> list[str | Cell]:
    counts = f"{item.better:,}/{item.worse:,}/{item.equal:,}"
    return [counts, chance(item.p_value), Cell(item.verdict, LEVELS[item.verdict])]


def changed_rows(
    comparisons: Sequence[Comparison | RowComparison], shown: Callable[[Sequence[object]], str]
) -> list[Row]:
    """Return a row for what became wrong in each comparison, and one for what became right."""
    found = []
    for item in comparisons:
        kinds = {"right to wrong": item.became_wrong, "wrong to right": item.became_right}
        found += [
            Row(words, f"{item.name} ({len(changes):,}): {shown(changes)}")
            for words, changes in kinds.items()
            if changes
        ]
    return found


def shown_changes(changes: Sequence[object]) -> str:
    """Return the first changed prompts: numbers and the ends of texts."""
    first = [change for change in changes[:SHOWN_CHANGES] if isinstance(change, Change)]
    shown = [f"{change.prompt_id} {change.prompt[-SHOWN_CHARACTERS:]!r}" for change in first]
    return "; ".join(shown) + ("; ..." if len(changes) > SHOWN_CHANGES else "")


def shown_numbers(numbers: Sequence[object]) -> str:
    return ", ".join(map(str, numbers[:SHOWN_NUMBERS])) + (", ..." if len(numbers) > SHOWN_NUMBERS else "")


def measure(name: str, estimate: Estimate) -> str:
    """Return a mean with its interval: an accuracy in percent, others as numbers."""
    return percent(estimate) if name == ACCURACY else number(estimate)


def number(estimate: Estimate, sign: str = "") -> str:
    """Return `0.412 [0.361, 0.463]`."""
    return with_limits(f"{estimate.value:{sign}.3f}", estimate, f"{sign}.3f")


def percent(estimate: Estimate) -> str:
    """Return `41.2 % [36.1, 46.3]`."""
    return with_limits(f"{100 * estimate.value:.1f} %", estimate, ".1f", 100)


def points(estimate: Estimate) -> str:
    """Return a difference in percentage points, `+4.2 [-1.0, +9.4]`."""
    return with_limits(f"{100 * estimate.value:+.1f}", estimate, "+.1f", 100)


def with_limits(shown: str, estimate: Estimate, spec: str, unit: float = 1) -> str:
    if estimate.low is None or estimate.high is None:
        return shown
    return f"{shown} [{unit * estimate.low:{spec}}, {unit * estimate.high:{spec}}]"


def chance(p_value: float) -> str:
    """Return the p-value; smaller ones than 0.001 are not exact."""
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def notes_on_samples(report: Report) -> list[Row]:
    """Explain the numbers, and warn where they may mislead."""
    how = (
        f"{CONFIDENCE:.0%} intervals: bootstrap over prompts, {RESAMPLES:,} resamples (normal above "
        f"{MOST_RESAMPLED:,} different values, Wilson's where every prompt has 0 % or 100 %). A sample solves its prompt if its "
        f"reward is above {format_number(report.solved_above)}."
    )
    notes = [Row("intervals", how, "dim")]
    rewards = report.distinct_rewards
    if len(rewards) > BINARY:
        text = (
            f"rewards have {len(rewards):,} distinct values from {format_number(rewards[0])} to "
            f"{format_number(rewards[-1])}: --solved-above decides which of them pass@k counts as solved"
        )
        notes.append(Row("note", text, "unsure"))
    if report.settings.reward_model is not None:
        text = f"scores are of {report.settings.reward_model}; the rewards do not contain them"
        notes.append(Row("scores", text))
    notes += [Row("note", text, "unsure") for text in report.differing_settings]
    return notes + [
        Row(
            "note",
            f"{model.missing:,} samples of {model.name} are missing: the workflow left them out, or they failed",
            "unsure",
        )
        for model in report.models
        if model.missing
    ]


def notes_on_rows(report: RowReport) -> list[Row]:
    how = f"{CONFIDENCE:.0%} intervals: bootstrap over rows, {RESAMPLES:,} resamples. The verdict is of the loss."
    return [Row("intervals", how, "dim")] + [
        Row(
            "note",
            f"{model.num_ties:,} pairs of {model.name} have a margin of 0, which the accuracy counts as wrong: a "
            "model equal to its reference, or a score head that is not trained",
            "unsure",
        )
        for model in report.models
        if model.num_ties
    ]
