"""Print an evaluation: a table of the models, the comparison with the first one, and notes."""

from collections.abc import Sequence

from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from areal_core.rollout.types import TOP_K_OFF
from areal_debug.eval.estimates import CONFIDENCE, RESAMPLES, Estimate
from areal_debug.eval.results import Change, Comparison, Report, Settings
from areal_debug.render import PIPED_WIDTH, console, format_number, styled
from areal_debug.report.links import view_command

STYLES = {"better": "green", "worse": "red", "no difference found": "dim"}
BINARY = 2  # distinct rewards of a reward that is solved or not
SHOWN_CHANGES = 5  # --json has all
SHOWN_CHARACTERS = 60  # of a prompt


def print_report(report: Report) -> None:
    """Print a verdict in one line, then both tables and notes."""
    out = console()
    settings = report.settings
    out.print(styled("[bold]{}[/bold]", headline(report)))
    out.print(styled("[dim]{}: {}[/dim]", report.run, describe(settings)))
    out.print()
    tables = [table_of_models(report, " ")]
    if report.comparisons:
        tables.append(table_of_comparisons(report, " "))
    if any(is_too_wide(table) for table in tables):
        tables = [make(report, "\n") for make in (table_of_models, table_of_comparisons)[: len(tables)]]
    out.print(tables[0])
    for table in tables[1:]:
        out.print()
        out.print(styled("against {}, prompt by prompt:", report.comparisons[0].baseline))
        out.print(table)
    out.print()
    for item in report.comparisons:
        for text in lines_of_changes(item):
            out.print(text)
    for text in notes_on(report):
        out.print(text)
    for model in report.models:
        out.print(styled("samples of {}: {}", model.name, model.file))
    if report.record is not None:
        out.print(styled("tokens and log-probs, a step per model: {}", view_command(report.record, 0)))


def is_too_wide(table: Table) -> bool:
    """Return whether a table does not fit the console."""
    out = console()
    return Measurement.get(out, out.options.update(width=PIPED_WIDTH), table).maximum > out.width


def lines_of_changes(item: Comparison) -> list[Text]:
    """Return a line for the prompts that became wrong, and one for those that became right."""
    found = {"right to wrong": item.became_wrong, "wrong to right": item.became_right}
    return [
        styled("{}, {} ({:,}): {}", item.name, words, len(changes), shown_changes(changes))
        for words, changes in found.items()
        if changes
    ]


def shown_changes(changes: Sequence[Change]) -> str:
    """Return the first changed prompts: numbers and the ends of texts."""
    shown = [
        f"{change.prompt_id} {change.prompt[-SHOWN_CHARACTERS:]!r}" for change in changes[:SHOWN_CHANGES]
    ]
    return "; ".join(shown) + ("; ..." if len(changes) > SHOWN_CHANGES else "")


def headline(report: Report) -> str:
    """Return the result in one line."""
    first = report.models[0]
    if not report.comparisons:
        reward = f"mean reward {number(first.mean_reward)}"
        score = [] if first.mean_score is None else [f"mean score {number(first.mean_score)}"]
        passes = [f"pass@{k} {percent(estimate)}" for k, estimate in first.pass_at.items()]
        return f"{first.name}: {', '.join([reward, *score, *passes])}"
    best = max(report.models, key=lambda model: model.mean_reward.value)
    verdicts = "; ".join(
        f"{item.name}: {item.verdict}" + (f", by score {item.score.verdict}" if item.score else "")
        for item in report.comparisons
    )
    return f"highest mean reward: {best.name}, {number(best.mean_reward)}. Against {first.name}: {verdicts}"


def describe(settings: Settings) -> str:
    """Return the rows and the sampling options in one line."""
    kind = {"valid": "validation", "train": "training"}[settings.rows]
    sampling = settings.sampling
    how = "greedy" if sampling["greedy"] else f"temperature {sampling['temperature']:g}"
    limits = [f"top_p {sampling['top_p']:g}"] if sampling["top_p"] < 1 else []
    limits += [f"top_k {sampling['top_k']}"] if sampling["top_k"] < TOP_K_OFF else []
    how = ", ".join([how, *limits, f"at most {sampling['max_new_tokens']:,} new tokens"])
    samples = f"{settings.n_samples} sample{'s' * (settings.n_samples != 1)} of each"
    return f"{settings.num_rows:,} {kind} prompts, {samples}, {how}"


def table_of_models(report: Report, between: str) -> Table:
    """Make a table with a row per model; `between` is between a value and its interval."""
    ks = report.models[0].pass_at
    scored = any(model.mean_score for model in report.models)
    score = ("mean score",) if scored else ()
    table = plain_table("model", "mean reward", *score, *(f"pass@{k}" for k in ks), "truncated", "tokens")
    for model in report.models:
        table.add_row(
            styled("{}", model.name),
            number(model.mean_reward, between),
            *(["?" if model.mean_score is None else number(model.mean_score, between)] if scored else []),
            *(percent(estimate, between) for estimate in model.pass_at.values()),
            f"{100 * model.truncated:.0f} %",
            f"{model.mean_tokens:,.0f}",
        )
    return table


def table_of_comparisons(report: Report, between: str) -> Table:
    """Make a table with a row per model but the first; `between` as of `table_of_models`."""
    ks = report.comparisons[0].pass_at
    scored = any(item.score for item in report.comparisons)
    table = plain_table("model", "mean reward", *(f"pass@{k}, points" for k in ks), "better/worse/equal", "p")
    table.add_column("verdict")
    for heading in ("mean score", "p", "by score") if scored else ():
        table.add_column(heading)
    for item in report.comparisons:
        table.add_row(
            styled("{}", item.name),
            number(item.mean_reward, between, sign="+"),
            *(points(estimate, between) for estimate in item.pass_at.values()),
            f"{item.better:,}/{item.worse:,}/{item.equal:,}",
            chance(item.p_value),
            Text(item.verdict, STYLES[item.verdict]),
            *(cells_of_score(item, between) if scored else []),
        )
    return table


def cells_of_score(item: Comparison, between: str) -> list[str | Text]:
    """Return the difference of mean scores, its p-value and its verdict; `?` without scores."""
    if item.score is None:
        return ["?"] * 3
    verdict = Text(item.score.verdict, STYLES[item.score.verdict])
    return [number(item.score.mean, between, sign="+"), chance(item.score.p_value), verdict]


def plain_table(first: str, *others: str) -> Table:
    """Make a table without lines: the first column left, the others right."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def number(estimate: Estimate, between: str = " ", sign: str = "") -> str:
    """Return `0.412 [0.361, 0.463]`."""
    return with_limits(f"{estimate.value:{sign}.3f}", between, estimate, f"{sign}.3f")


def percent(estimate: Estimate, between: str = " ") -> str:
    """Return `41.2 % [36.1, 46.3]`."""
    return with_limits(f"{100 * estimate.value:.1f} %", between, estimate, ".1f", 100)


def points(estimate: Estimate, between: str) -> str:
    """Return a difference in percentage points, `+4.2 [-1.0, +9.4]`."""
    return with_limits(f"{100 * estimate.value:+.1f}", between, estimate, "+.1f", 100)


def with_limits(shown: str, between: str, estimate: Estimate, spec: str, unit: float = 1) -> str:
    if estimate.low is None or estimate.high is None:
        return shown
    return f"{shown}{between}[{unit * estimate.low:{spec}}, {unit * estimate.high:{spec}}]"


def chance(p_value: float) -> str:
    """Return the p-value; smaller ones than 0.001 are not exact."""
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def notes_on(report: Report) -> list[Text]:
    """Explain the numbers, and warn where they may mislead."""
    notes = [
        styled(
            "[dim]{:.0%} intervals: bootstrap over prompts, {:,} resamples (Wilson's where every prompt has 0 % or "
            "100 %). A sample solves its prompt if its reward is above {}.[/dim]",
            CONFIDENCE,
            RESAMPLES,
            format_number(report.solved_above),
        )
    ]
    if len(report.distinct_rewards) > BINARY:
        notes.append(
            styled(
                "[yellow]note[/yellow]: rewards have {:,} distinct values from {} to {}: --solved-above decides which of "
                "them pass@k counts as solved",
                len(report.distinct_rewards),
                format_number(report.distinct_rewards[0]),
                format_number(report.distinct_rewards[-1]),
            )
        )
    if report.settings.reward_model is not None:
        notes.append(
            styled("scores are of {}; the rewards do not contain them", report.settings.reward_model)
        )
    notes += [styled("[yellow]note[/yellow]: {}", text) for text in report.differing_settings]
    for model in report.models:
        if model.missing:
            notes.append(
                styled(
                    "[yellow]note[/yellow]: {:,} samples of {} are missing: the workflow left them out, or they failed",
                    model.missing,
                    model.name,
                )
            )
    return notes
