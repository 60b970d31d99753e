"""Print a replay: what was set differently, its guarantee, one line per step, a verdict.

After a change of options, recorded and replayed statistics follow as curves and means; with
`--explain`, the samples of a step by their share of its gradient.
"""

import math
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_core.telemetry.loggers import summary_columns
from areal_debug.diff.report import describe, format_value, tables_of
from areal_debug.render import count, format_number, note, sparkline, styled
from areal_debug.report.links import view_command
from areal_debug.report.terminal import print_block
from recorder import Record
from recorder.difference import Difference
from replayer.check import RankDifference, ReplayReport, StepResult
from replayer.request import Request

SHOWN_OF_A_KIND = 2
EXPECTED = {
    "bitwise": "bit-identical numbers",
    "noise": "numbers within a few times this machine's noise floor",
    "statistical": "agreement over many steps, not of single steps",
    "changed": "different numbers, because something was set differently",
    "unrecorded": "nothing to compare with",
}

EXPLAIN_SHOWN = 10
EXPLAIN_COLUMNS = ("rank", "row", "prompt", "sample", "minibatch", "reward", "advantage", "tokens")

# Listed first; the rest follows by how much it changed.
FIRST_STATISTICS = (
    "ppo_actor/task_reward/avg",
    "ppo_actor/update/loss",
    "ppo_actor/update/grad_norm",
    "ppo_actor/update/entropy/avg",
    "ppo_actor/update/clip_ratio/avg",
    "ppo_actor/update/importance_weight/avg",
)
WHATIF_SHOWN = 16
CURVE_WIDTH = 24


def print_start(out: Console, report: ReplayReport) -> None:
    """Print what was set differently and which guarantee follows, before the first number."""
    header = report.set_differently
    assert header is not None
    for table in tables_of(header, ("what", "recorded", "now")):
        print_block(out, table)
        out.print()
    if report.guarantee.kind != "bitwise":
        out.print(styled("[bold]Expect[/bold] {}:", EXPECTED[report.guarantee.kind]))
        for reason in report.guarantee.reasons:
            out.print(styled("  {}", reason))
        out.print()


def print_step(out: Console, result: StepResult, in_detail: bool = False) -> None:
    """Print one line, and below it the first differences of each kind if `in_detail`."""
    status, style = status_of(result)
    numbers = "  ".join(compared_columns(result))
    missing = "; ".join(warning.partition(":")[0] for warning in result.warnings)
    line = styled(f"step {{:>4}}  [{style}]{{:<13}}[/{style}]  {{}}", result.step, status, numbers)
    out.print(styled("{}  [yellow]{}[/yellow]", line, missing) if missing else line)
    if not in_detail:
        return
    out.print(
        styled(
            "           [dim]{} of {} values differ; {} parameter checksums[/dim]",
            len(result.differences),
            result.num_compared,
            result.num_parameters,
        )
    )
    by_kind = {
        kind: [d for d in result.differences if d.kind == kind] for kind in ("loss", "stat", "parameter")
    }
    shown = [difference for same in by_kind.values() for difference in same[:SHOWN_OF_A_KIND]]
    for difference in shown:
        out.print(styled("           {}", describe_value(difference)))
    if len(result.differences) > len(shown):
        out.print(styled("           ... and {} more", len(result.differences) - len(shown)))


def status_of(result: StepResult) -> tuple[str, str]:
    """Return how a step compares with its record, and a style."""
    if result.identical:
        return "identical", "green"
    if not result.num_compared:
        return "not recorded", "dim"
    return ("same weights", "yellow") if result.same_weights else ("other weights", "bold")


def compared_columns(result: StepResult) -> list[str]:
    recorded = summary_columns(result.recorded)
    return [
        f"{column} {number}"
        + (f" (recorded {recorded[column]})" if recorded.get(column, number) != number else "")
        for column, number in summary_columns(result.replayed).items()
    ]


def describe_value(difference: RankDifference) -> str:
    recorded, replayed = format_value(difference.recorded), format_value(difference.replayed)
    rank = f" (rank {difference.rank})" if difference.kind == "loss" else ""
    return f"{difference.kind} {difference.where}{rank}: recorded {recorded}, replayed {replayed}"


def print_verdict(out: Console, report: ReplayReport, request: Request) -> None:
    """Print whether the replay met its guarantee, where it diverged first, and what to do next."""
    count = len(report.steps)
    print_warnings(out, report)
    if report.result == "not comparable":
        out.print(
            styled(
                "[bold yellow]Nothing to compare:[/bold yellow] {} steps were trained on recorded rollouts.",
                count,
            )
        )
        out.print("`--output FOLDER` records what comes out, and that record replays bit by bit.")
        return
    if report.result == "identical":
        out.print(
            styled(
                "[bold green]Bit-identical:[/bold green] {} of {} steps: every loss, gradient norm, statistic "
                "and parameter checksum has the recorded bits.",
                count,
                count,
            )
        )
        return
    if report.verdict is None:
        out.print(styled("[bold yellow]Inconclusive:[/bold yellow] {}", difference_of(report)))
        out.print(
            "A difference is allowed here, see above. `areal-debug replay` measures this machine's noise floor and compares."
        )
    elif report.guarantee.kind in ("noise", "statistical"):
        print_distance(out, report)
    else:
        style = "yellow" if report.weights_diverge_at is None else "red"
        verdict, _, evidence = difference_of(report).partition(": ")
        out.print(styled(f"[bold {style}]{{}}:[/bold {style}] {{}}", verdict, evidence))
    print_first(out, report)
    if report.guarantee.kind in ("bitwise", "changed"):
        out.print(reason_of(report))
    for number, command in enumerate(next_commands(report, request)):
        out.print(styled("{:<13}{}", "" if number else "Next", command))


def difference_of(report: ReplayReport) -> str:
    """Return what differs from the record, whatever the guarantee: weights, or only numbers."""
    first = report.first_different
    assert first is not None
    num_different = sum(not result.identical for result in report.steps)
    kinds = ", ".join(sorted({difference.kind for difference in first.differences}))
    where = f"{num_different} of {len(report.steps)} steps have other numbers, the first is step {first.step} ({kinds})"
    if report.weights_diverge_at is not None:
        return f"Weights diverge at step {report.weights_diverge_at}: {where}."
    return f"Same weights, other numbers: {where}; after every step all {first.num_parameters} parameters have the recorded bits."


def print_first(out: Console, report: ReplayReport) -> None:
    """Print the first stage that differs, its place, and the pattern of its values."""
    first, step = report.first, report.first_different
    if first is None or step is None:
        return
    names = ("recorded", "replayed")
    out.print(styled("{:<13}step {}, stage {}: {}", "first", step.step, first.stage, describe(first, names)))
    if report.pattern is not None:
        out.print(styled("{:<13}{}", "pattern", report.pattern))


def print_warnings(out: Console, report: ReplayReport) -> None:
    """Print what the first step with a warning did not learn, and how many steps have one."""
    steps = [result for result in report.steps if result.warnings]
    if steps:
        out.print(
            styled(
                "[bold yellow]Warning:[/bold yellow] {} of {} steps learn less than the options say; in step {}: {}.",
                len(steps),
                len(report.steps),
                steps[0].step,
                "; ".join(steps[0].warnings),
            )
        )


def print_distance(out: Console, report: ReplayReport) -> None:
    verdict = report.verdict
    assert verdict is not None
    unit = "the noise floor" if report.guarantee.kind == "noise" else "the standard error over steps"
    word = {
        "within": styled("[bold green]Within {}:[/bold green]", unit),
        "unclear": styled("[bold yellow]Inconclusive:[/bold yellow]"),
        "different": styled("[bold red]Different:[/bold red]"),
    }[verdict.finding]
    out.print(styled("{} {}", word, difference_of(report)))
    if verdict.k is None:
        out.print("Too few values could be compared: replay more steps.")
        return
    at = f" in step {verdict.step}" if verdict.step is not None else ""
    out.print(styled("The largest difference is {:.3g} x {}: {}{}.", verdict.k, unit, verdict.where, at))
    if verdict.finding == "within":
        out.print(
            styled(
                "A defect smaller than that cannot be excluded; the guarantee is {}, not bitwise.",
                report.guarantee.kind,
            )
        )
    elif verdict.finding == "unclear":
        out.print(
            "This is above the noise floor and below what a defect usually causes: replay on the recorded machine."
        )


def reason_of(report: ReplayReport) -> str:
    header = report.set_differently
    if report.guarantee.kind == "changed" or (header is not None and (header.config or header.model)):
        return "The cause is what was set differently, see above."
    if code_difference(report, "commit") or code_difference(report, "dirty_sha256"):
        return "Only the trainer's code is not that of the record, see above."
    return "Nothing was set differently: check the hardware, and for kernels that are not deterministic."


def print_explanation(out: Console, record: Record, found: dict[str, Any]) -> None:
    """Print the verdict, a table, and the text of the sample with the largest gradient."""
    samples, step = found["samples"], found["step"]
    first = samples[0]
    norms = ", ".join(format_number(norm) for norm in found["grad_norms"])
    out.print(
        styled(
            "[bold]Step {}[/bold]: {} samples, gradient norm {} (by minibatch). {}",
            step,
            len(samples),
            norms,
            verdict_on(samples),
        )
    )
    if not found["faithful"]:
        out.print(
            styled(
                "[yellow]The replay up to this step differs from the record: shares are those of the replay.[/yellow]"
            )
        )
    out.print(explain_table(samples[:EXPLAIN_SHOWN]))
    if len(samples) > EXPLAIN_SHOWN:
        out.print(
            styled("... and {} with smaller gradients; --json has all of them", len(samples) - EXPLAIN_SHOWN)
        )
    print_text(out, record, step, first)
    out.print(
        styled(
            "[dim]Shares of a minibatch's gradient sum to 100 %; a negative share opposes it. Next: {}[/dim]",
            view_command(record.path, step, first["prompt_id"], first["sample_id"]),
        )
    )


def verdict_on(samples: list[dict[str, Any]]) -> Text:
    """Name the sample with the largest gradient, and why others have none, or no finite one."""
    first = samples[0]
    name = styled(
        "[bold]rank {}, row {}[/bold] (prompt {}, sample {})",
        first["rank"],
        first["row"],
        first["prompt_id"],
        first["sample_id"],
    )
    num_broken = sum(sample["stage"] is not None for sample in samples)
    if num_broken:
        return styled(
            "{} of {} samples have a value that is not finite, so the update is not taken; the earliest is in {}: {}.",
            num_broken,
            len(samples),
            name,
            first["why"],
        )
    zero = [sample for sample in samples if sample["gradient_norm"] == 0]
    counted = Counter(sample["why"] for sample in zero).most_common()
    reasons = "; ".join(f"{count} x {why}" for why, count in counted)
    if len(zero) == len(samples):
        return styled("Every sample's gradient is 0, so nothing is learned: {}.", reasons)
    shares = f"{percent(first['gradient_share'])} of the minibatch's gradient, {percent(first['loss_share'])} of its loss"
    largest = styled("The largest gradient is that of {}: {}.", name, shares)
    if not zero:
        return largest
    return styled("{} {} of {} samples have none: {}.", largest, len(zero), len(samples), reasons)


def percent(share: float) -> str:
    """Write a share; a dash if there is none."""
    return f"{100 * share:.3g} %" if math.isfinite(share) else "-"


def explain_table(samples: list[dict[str, Any]]) -> Table:
    found = Table(box=None, pad_edge=False, header_style="dim")
    for heading in (*EXPLAIN_COLUMNS, "loss", "of loss", "of gradient", "own norm"):
        found.add_column(heading, justify="right")
    found.add_column("why" if any(s["why"] for s in samples) else "")
    for s in samples:
        names = (s["rank"], s["row"], s["prompt_id"], s["sample_id"], s["minibatch"])
        numbers = (s["reward"], s["advantage"], s["num_trained_tokens"], s["loss"])
        found.add_row(
            *(str(name) for name in names),
            *(format_number(number) for number in numbers),
            percent(s["loss_share"]),
            percent(s["gradient_share"]),
            f"{s['gradient_norm']:.3g}{' x' if math.isfinite(s['gradient_share']) else ''}",
            styled("{}", s["why"]),
        )
    return found


def print_text(out: Console, record: Record, step: int, sample: dict[str, Any]) -> None:
    text = record.step(step).text(sample["rank"])
    if text is None:
        return
    line = next(line for line in text if line["row"] == sample["row"])
    out.print()
    for name in ("prompt", "completion"):
        out.print(styled("[bold]{}[/bold]  {}", name, repr(line[name])))
    out.print()


@dataclass(frozen=True)
class Curve:
    """One statistic over the common steps.

    `moved` is the mean distance relative to the recorded size.
    """

    name: str
    recorded: tuple[float, ...]
    replayed: tuple[float, ...]

    @property
    def moved(self) -> float:
        """Relative mean distance; 0 if both curves are equal."""
        pairs = list(zip(self.recorded, self.replayed, strict=True))
        distance = sum(abs(a - b) for a, b in pairs if math.isfinite(a - b))
        size = sum(abs(a) for a, _ in pairs if math.isfinite(a))
        return 0.0 if distance == 0 else distance / size if size else math.inf


def curves_of(report: ReplayReport) -> list[Curve]:
    """Return the statistics: `FIRST_STATISTICS`, then the others by how much they changed."""
    names = {name for step in report.steps for name in step.recorded.keys() & step.replayed.keys()}
    curves = [curve(report, name) for name in names if not name.endswith(("__count", "/min", "/max"))]
    order = {name: position for position, name in enumerate(FIRST_STATISTICS)}
    return sorted(curves, key=lambda c: (order[c.name] if c.name in order else len(order), -c.moved, c.name))


def curve(report: ReplayReport, name: str) -> Curve:
    """Collect one statistic over the steps that have it on both sides."""
    both = [step for step in report.steps if name in step.recorded and name in step.replayed]
    return Curve(name, tuple(s.recorded[name] for s in both), tuple(s.replayed[name] for s in both))


def print_comparison(out: Console, report: ReplayReport) -> None:
    """Print a table of the statistics that changed."""
    curves = curves_of(report)
    moved = [c for c in curves if c.moved > 0]
    first = report.first_different
    out.print()
    if first is None:
        out.print(
            styled("[bold]Nothing changed:[/bold] all {} steps have the recorded bits.", len(report.steps))
        )
        return
    out.print(
        styled(
            "[bold]Recorded against replayed[/bold] over {} steps. {}",
            len(report.steps),
            difference_of(report),
        )
    )
    print_first(out, report)
    print_warnings(out, report)
    out.print(whatif_table(moved[:WHATIF_SHOWN]))
    if len(moved) > WHATIF_SHOWN:
        out.print(
            styled(
                "... and {} statistics that changed less; --json lists all of them", len(moved) - WHATIF_SHOWN
            )
        )
    same = [c.name for c in curves if c.moved == 0]
    out.print(styled("[dim]{} statistics did not change. The record was not modified.[/dim]", len(same)))


def whatif_table(curves: list[Curve]) -> Table:
    found = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("statistic", "recorded", "replayed"):
        found.add_column(heading)
    for heading in ("mean recorded", "mean replayed", "change"):
        found.add_column(heading, justify="right")
    for item in curves:
        left, right = on_one_scale(item.recorded, item.replayed)
        means = [sum(values) / len(values) for values in (item.recorded, item.replayed)]
        found.add_row(
            styled("{}", item.name),
            styled("[cyan]{}[/cyan]", left),
            styled("[magenta]{}[/magenta]", right),
            *(format_number(mean) for mean in means),
            moved_text(item.moved),
        )
    return found


def moved_text(moved: float) -> str:
    """Format the change as a percentage, at most "> 1000 %"."""
    if math.isinf(moved):
        return "from 0"
    return "> 1000 %" if moved > 10 else f"{100 * moved:.3g} %"


def on_one_scale(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[str, str]:
    bars = sparkline([*left, *right], width=min(2 * CURVE_WIDTH, 2 * len(left)))
    return bars[: len(bars) // 2], bars[len(bars) // 2 :]


def next_commands(report: ReplayReport, request: Request) -> list[str]:
    """Return the commands to run next, none if nothing is to be explained.

    They name the record as the request does, so they work in the folder in which it worked.
    """
    first, kind = report.first_different, report.guarantee.kind
    is_within = report.verdict is not None and report.verdict.finding == "within"
    if first is None or is_within or kind in ("changed", "unrecorded"):
        return []
    model = [] if request.model is None else ["--model", request.model]
    replayed = [] if request.record_to is None else [request.record_to]
    commands = [["areal-debug", "why", request.record, *replayed, *model]]
    if request.record_to is not None:
        where = ["--all", "--step", str(first.step)]
        commands.append(["areal-debug", "why", request.record, request.record_to, *where])
    commit, changes = (code_difference(report, name) for name in ("commit", "dirty_sha256"))
    if commit is not None and commit.recorded and commit.current:
        revisions = ["--commits", f"{commit.recorded[:12]}..{commit.current[:12]}"]
        steps = ["--to-step", str(first.step)]
        commands.append(["areal-debug", "why", request.record, *revisions, *steps, *model])
    elif commit is None and changes is not None:
        commands.append(["git", "diff", "HEAD"])
    at = first.step if report.weights_diverge_at is None else report.weights_diverge_at
    commands.append(["areal-debug", "goto", request.record, "--step", str(at), *model, "--shell"])
    return [shlex.join(command) for command in commands]


def code_difference(report: ReplayReport, name: str) -> Difference | None:
    """Return a member of the trainer's code that differs between the record and this machine."""
    found = () if report.set_differently is None else report.set_differently.environment
    return next((item for item in found if item.where == f"code.{name}"), None)


def note_cut(record: Record) -> None:
    """Print what a record was cut from, if it was."""
    from replayer.carried import read_cut

    if (found := read_cut(record)) is None:
        return
    rows = "" if found.kept is None else f", {len(found.kept)} of its {count(found.num_rows, 'row')}"
    symptom = "" if found.symptom is None else f", cut for: {found.symptom}"
    note(f"step {found.step} of {found.source}{rows}{symptom} (there {numbers_of(found.numbers)})")
    if found.error is not None:
        note(f"expected: {found.error}")


def numbers_of(numbers: Mapping[str, float]) -> str:
    """Format loss and gradient norm."""
    return ", ".join(f"{name} {format_number(value)}" for name, value in numbers.items()) or "not recorded"
