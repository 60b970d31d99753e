"""Print a log-prob consistency check: verdict, causes, numbers, curves, and the worst tokens."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_debug.render import format_number, sparkline, styled
from areal_debug.report.links import view_command
from consistency.case import Request
from consistency.causes import Finding
from consistency.check import Checked
from consistency.diagnose import Diagnosis
from consistency.measure import Measurement
from consistency.report import Gate, WorstToken, describe_worst
from consistency.rescoring import Rescoring, TrainerCheck
from recorder import open_record
from recorder.samples import token_texts

NUMBERS = (
    ("mean_abs", "mean |D|"),
    ("p50_abs", "median |D|"),
    ("p95_abs", "95 %"),
    ("p99_abs", "99 %"),
    ("max_abs", "largest"),
    ("mean", "mean D"),
    ("t_clustered", "t, clustered by sequence"),
    ("k1", "k1"),
    ("k3", "k3"),
    ("ratio_mean", "mean ratio"),
    ("ess_token", "effective samples"),
    ("share_above_ln2", "share |D| > ln 2"),
    ("logprob_pearson", "correlation"),
    ("surprisal_correlation", "corr. D, surprisal"),
)
RESCORING_LABELS = (
    ("decode", "engine when sampling, engine scoring (A - B)"),
    ("prefill", "engine scoring, model (B - C)"),
    ("engine_repeat", "engine scoring, repeated"),
    ("model_repeat", "model, repeated"),
    ("model_alone", "model, batch of one"),
)
STYLES = {"healthy": "green", "mismatch": "red", "unknown": "yellow"}
Decode = Callable[[list[int]], str] | None


def print_report(
    out: Console, checked: Checked, gates: tuple[Gate, ...], request: Request, context: dict[str, Any]
) -> None:
    """Print the complete report; `context` describes what was compared with the model."""
    print_verdict(out, checked)
    for engine in context.get("engines", ()):
        out.print(styled("engine: {}", engine))
    if "answers" in context:
        print_answers(out, **context["answers"])
    for finding in checked.diagnosis.causes:
        print_finding(out, finding)
    if checked.diagnosis.missing:
        out.print("For a more precise answer, add:")
        for name in checked.diagnosis.missing:
            out.print(styled("  {}", name))
        out.print()
    for gate in gates:
        word = styled("[green]passed[/green]") if gate.holds else styled("[red]failed[/red]")
        out.print(styled("gate {} <= {:g}: {} {}", gate.metric, gate.limit, format_number(gate.value), word))
    if checked.trainer_check is not None:
        print_trainer_check(out, checked.trainer_check)
    if checked.rescoring is not None:
        print_rescoring(out, checked.rescoring)
    print_numbers(out, checked.diagnosis.measurement)
    print_curves(out, checked.diagnosis)
    worst = describe_worst(checked)
    print_worst(out, worst, load_decode(request.model))
    if worst and (commands := look_at(context, worst[:1])):
        out.print(styled("look  {}", commands[0]))


def look_at(context: dict[str, Any], worst: Sequence[WorstToken]) -> list[str]:
    """Return the commands that show these tokens in the record; none for a live engine."""
    if "record" not in context or not worst:
        return []
    record, rows = open_record(context["record"]), list[tuple[int, int | None, int | None]]()
    for number in context["steps"]:
        step = record.step(number)
        for rank in range(step.manifest.num_ranks):
            arrays, known = step.batch(rank, ["prompt_id", "sample_id"]), step.known(rank, "prompt_id")
            names = zip(arrays["prompt_id"].tolist(), arrays["sample_id"].tolist(), known, strict=True)
            rows += [
                (number, prompt, sample) if is_known else (number, None, None)
                for prompt, sample, is_known in names
            ]
    found = [(*rows[token.sequence], token.position) for token in worst]
    return [
        view_command(context["record"], step, prompt, sample, None if prompt is None else position)
        for step, prompt, sample, position in found
    ]


def print_verdict(out: Console, checked: Checked) -> None:
    """Print one line, then the tokens left out and the notes."""
    verdict = checked.diagnosis.verdict
    headline, summary = summary_of(checked)
    out.print(styled(f"[bold {STYLES[verdict]}]{{}}:[/] {{}}. {{}}", verdict.capitalize(), headline, summary))
    for text in (left_out(checked), *checked.notes):
        if text:
            out.print(styled("[yellow]{}[/yellow]", text))
    out.print()


def summary_of(checked: Checked) -> tuple[str, str]:
    """Return the headline (the first cause) and what was compared."""
    found, measured = checked.diagnosis, checked.diagnosis.measurement
    headline = (
        found.causes[0].name
        if found.causes
        else "engine and model differ by more than the noise floor, and no known cause explains it"
    )
    summary = (
        f"{measured.num_tokens:,} tokens of {measured.num_sequences:,} sequences, mean |D| {format_number(measured.metrics['mean_abs'])}, "
        f"D = trainer - engine, scored in {checked.dtype} at temperature {checked.setting.temperature:g}"
    )
    return headline, summary


def left_out(checked: Checked) -> str:
    """Describe how many tokens were not compared and why; empty if all were."""
    counts = {n.replace("_", " "): count for n, count in vars(checked.diagnosis.measurement.excluded).items()}
    listed = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)
    return f"left out: {listed}" if listed else ""


def print_finding(out: Console, finding: Finding) -> None:
    out.print(
        styled(
            "[bold]{}  {}[/bold]  [dim]confidence {:.0%}[/dim]", finding.id, finding.name, finding.confidence
        )
    )
    for heading, text in (
        ("evidence", finding.evidence),
        ("refuted if", finding.refute),
        ("fix", finding.fix),
    ):
        out.print(styled("  {:<10}  {}", heading, text))
    out.print()


def print_answers(
    out: Console,
    num_prompts: int,
    engine_right: int,
    model_right: int,
    identical: int,
    diverges_after: float | None,
) -> None:
    """Print how many greedy answers are correct, and where completions diverge.

    Comparing answers alone shows no more than this.
    """
    diverged = "" if diverges_after is None else f", the others diverge after {diverges_after:g} (median)"
    out.print(
        styled(
            "greedy answers: engine {} of {} correct, model {}; {} completions have identical tokens{}",
            engine_right,
            num_prompts,
            model_right,
            identical,
            diverged,
        )
    )


def print_trainer_check(out: Console, check: TrainerCheck) -> None:
    out.print(
        styled(
            "trainer ({}), mean |difference| over {:,} tokens: to the engine {}, to the model {}; engine to model {}",
            check.source,
            check.num_tokens,
            format_number(check.engine_trainer),
            format_number(check.trainer_model),
            format_number(check.engine_model),
        )
    )
    out.print()


def print_rescoring(out: Console, rescoring: Rescoring) -> None:
    out.print(styled("rescored {:,} tokens, mean |difference|:", rescoring.num_tokens))
    for label, value in rescoring_rows(rescoring):
        out.print(styled("  {:<46}{}", label, value))
    out.print()


def rescoring_rows(rescoring: Rescoring) -> list[tuple[str, str]]:
    """Return label and number of each comparison."""
    return [
        (label, "not comparable at this temperature" if value is None else format_number(value))
        for name, label in RESCORING_LABELS
        for value in [getattr(rescoring, name)]
    ]


def print_numbers(out: Console, measured: Measurement) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    half = len(NUMBERS) // 2
    for left, right in zip(NUMBERS[:half], NUMBERS[half:], strict=True):
        cells = [
            cell
            for name, label in (left, right)
            for cell in (label, format_number(measured.metrics[name]), "   ")
        ]
        table.add_row(*cells)
    out.print(table)
    out.print()


def print_curves(out: Console, found: Diagnosis) -> None:
    """Print the histogram of D, and mean |D| by position, turn, surprisal and version."""
    bars = found.measurement.histogram
    reach = abs(bars[0][0])
    out.print(
        styled(
            "{:<28}{}  [dim]{:.3g} to {:.3g}[/dim]",
            "tokens by D (log)",
            sparkline([math.log1p(count) for _, count in bars]),
            -reach,
            reach,
        )
    )
    curves = (
        ("response_position", "position in response"),
        ("turn", "turn"),
        ("surprisal_decile", "decile of surprisal"),
        ("version", "version"),
    )
    for column, label in curves:
        if column not in found.measurement.by or len(groups := found.measurement.by[column]) < 2:
            continue
        values = [group.mean_abs for group in groups]
        out.print(
            styled(
                "{:<28}{}  [dim]{} to {}; {:.2g} to {:.2g}[/dim]",
                "|D| by " + label,
                sparkline(values),
                groups[0].key,
                groups[-1].key,
                min(values),
                max(values),
            )
        )
    out.print()


def print_worst(out: Console, worst: tuple[WorstToken, ...], decode: Decode) -> None:
    table = Table(title="Worst tokens", title_justify="left", box=None, pad_edge=False, header_style="dim")
    for heading in (
        "sequence",
        "position",
        "engine",
        "trainer",
        "rank",
        "preceding text",
        "token",
        "trainer's top tokens",
    ):
        table.add_column(heading, overflow="fold")
    for token in worst:
        top = ", ".join(f"{text_of([i], decode)} {logprob:.2f}" for i, logprob in token.top[:3])
        table.add_row(
            str(token.sequence),
            str(token.position),
            f"{token.engine:.4g}",
            f"{token.trainer:.4g}",
            str(token.rank),
            styled("{}", text_of(list(token.before), decode)[-32:]),
            styled("{}", text_of([token.token_id], decode)),
            styled("{}", top),
        )
    out.print(table)


def text_of(ids: list[int], decode: Decode) -> str:
    """Return the ids as text with line breaks escaped, or the ids if there is no tokenizer."""
    return repr("".join(token_texts(ids, decode)))[1:-1]


def load_decode(model: str) -> Decode:
    """Load the decoder of the model's own tokenizer; None if its folder has none."""
    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
