"""Print a supervised evaluation: a table of the models, the comparison, and notes."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from areal_debug.eval.estimates import CONFIDENCE, RESAMPLES, Estimate
from areal_debug.eval.render import STYLES, chance, is_too_wide, number, percent, plain_table, points
from areal_debug.eval.supervised_rows import ACCURACY, RowComparison, RowReport
from areal_debug.render import console, styled

METHODS = {"sft": "fine-tuning", "dpo": "DPO", "rw": "reward model"}
SHOWN_NUMBERS = 20  # --json has all


def print_row_report(report: RowReport) -> None:
    """Print a verdict in one line, then both tables and notes."""
    out = console()
    settings = report.settings
    out.print(styled("[bold]{}[/bold]", headline(report)))
    kind = {"valid": "validation", "train": "training"}[settings.rows]
    unit = "pairs" if settings.has_pairs else "rows"
    out.print(
        styled(
            "[dim]{}: {:,} {} {}, {}[/dim]",
            report.run,
            settings.num_rows,
            kind,
            unit,
            METHODS[settings.method],
        )
    )
    out.print()
    tables = [table_of_models(report, " "), table_of_comparisons(report, " ")]
    if any(is_too_wide(table) for table in tables):
        tables = [table_of_models(report, "\n"), table_of_comparisons(report, "\n")]
    out.print(tables[0])
    if report.comparisons:
        out.print()
        out.print(styled("against {}, row by row:", report.comparisons[0].baseline))
        out.print(tables[1])
    out.print()
    for text in notes_on(report):
        out.print(text)
    for model in report.models:
        out.print(styled("rows of {}: {}", model.name, model.file))


def headline(report: RowReport) -> str:
    """Return the result in one line."""
    first = report.models[0]
    if not report.comparisons:
        shown = [f"{name} {measure(name, estimate, ' ')}" for name, estimate in first.measures.items()]
        return f"{first.name}: {', '.join(shown)}"
    best = min(report.models, key=lambda model: model.measures["loss"].value)
    verdicts = "; ".join(f"{item.name}: {item.verdict}" for item in report.comparisons)
    loss = number(best.measures["loss"])
    return f"lowest loss: {best.name}, {loss}. Against {first.name}: {verdicts}"


def measure(name: str, estimate: Estimate, between: str) -> str:
    """Return a mean with its interval: an accuracy in percent, others as numbers."""
    return percent(estimate, between) if name == ACCURACY else number(estimate, between)


def table_of_models(report: RowReport, between: str) -> Table:
    """Make a table with a row per model; `between` is between a value and its interval."""
    has_tokens = not report.settings.has_pairs
    table = plain_table("model", *report.models[0].measures, "rows", *(["tokens"] if has_tokens else []))
    for model in report.models:
        table.add_row(
            styled("{}", model.name),
            *(measure(name, estimate, between) for name, estimate in model.measures.items()),
            f"{model.num_rows:,}",
            *([f"{model.num_tokens:,}"] if has_tokens else []),
        )
    return table


def table_of_comparisons(report: RowReport, between: str) -> Table:
    """Make a table with a row per model but the first; `between` as of `table_of_models`."""
    names = report.comparisons[0].measures if report.comparisons else ()
    headings = [f"{name}, points" if name == ACCURACY else name for name in names]
    table = plain_table("model", *headings, "better/worse/equal", "p")
    table.add_column("verdict")
    for item in report.comparisons:
        table.add_row(
            styled("{}", item.name),
            *(
                points(estimate, between) if name == ACCURACY else number(estimate, between, sign="+")
                for name, estimate in item.measures.items()
            ),
            f"{item.better:,}/{item.worse:,}/{item.equal:,}",
            chance(item.p_value),
            Text(item.verdict, STYLES[item.verdict]),
        )
    return table


def notes_on(report: RowReport) -> list[Text]:
    """Explain the numbers, and warn where they may mislead."""
    notes = [text for item in report.comparisons for text in lines_of_changes(item)]
    notes.append(
        styled(
            "[dim]{:.0%} intervals: bootstrap over rows, {:,} resamples. The verdict is of the loss.[/dim]",
            CONFIDENCE,
            RESAMPLES,
        )
    )
    for model in report.models:
        if model.num_ties:
            notes.append(
                styled(
                    "[yellow]note[/yellow]: {:,} pairs of {} have a margin of 0, which the accuracy counts as wrong: a model "
                    "equal to its reference, or a score head that is not trained",
                    model.num_ties,
                    model.name,
                )
            )
    return notes


def lines_of_changes(item: RowComparison) -> list[Text]:
    """Return a line for the pairs that became wrong, and one for those that became right."""
    found = {"right to wrong": item.became_wrong, "wrong to right": item.became_right}
    return [
        styled("{}, {} ({:,} pairs): {}", item.name, words, len(numbers), shown(numbers))
        for words, numbers in found.items()
        if numbers
    ]


def shown(numbers: Sequence[int]) -> str:
    """Return the first numbers of rows."""
    return ", ".join(map(str, numbers[:SHOWN_NUMBERS])) + (", ..." if len(numbers) > SHOWN_NUMBERS else "")
