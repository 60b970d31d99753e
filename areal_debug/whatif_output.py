"""Print recorded against replayed statistics after a change: two curves and two means each."""

import math
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from areal_debug.render import escaped, format_number, sparkline
from replayer.check import ReplayReport

# Listed first; the rest follows by how much it changed.
FIRST = (
    "ppo_actor/task_reward/avg",
    "ppo_actor/update/loss",
    "ppo_actor/update/grad_norm",
    "ppo_actor/update/entropy/avg",
    "ppo_actor/update/clip_ratio/avg",
    "ppo_actor/update/importance_weight/avg",
)
SHOWN = 16
CURVE_WIDTH = 24


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
    """Return the statistics: those in `FIRST`, then the others by how much they changed."""
    names = {name for step in report.steps for name in step.recorded.keys() & step.replayed.keys()}
    curves = [curve(report, name) for name in names if not name.endswith(("__count", "/min", "/max"))]
    order = {name: position for position, name in enumerate(FIRST)}
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
        out.print(f"[bold]Nothing changed:[/bold] all {len(report.steps)} steps have the recorded bits.")
        return
    kinds = ", ".join(sorted({difference.kind for difference in first.differences}))
    out.print(
        f"[bold]Recorded against replayed[/bold] over {len(report.steps)} steps, which diverge in step {first.step} ({kinds}):"
    )
    out.print(table(moved[:SHOWN]))
    if len(moved) > SHOWN:
        out.print(f"... and {len(moved) - SHOWN} statistics that changed less; --json lists all of them")
    same = [c.name for c in curves if c.moved == 0]
    out.print(f"[dim]{len(same)} statistics did not change. The record was not modified.[/dim]")


def table(curves: list[Curve]) -> Table:
    """Make a table with two curves per statistic, on one scale, and their means."""
    found = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("statistic", "recorded", "replayed"):
        found.add_column(heading)
    for heading in ("mean recorded", "mean replayed", "change"):
        found.add_column(heading, justify="right")
    for item in curves:
        left, right = on_one_scale(item.recorded, item.replayed)
        means = [sum(values) / len(values) for values in (item.recorded, item.replayed)]
        found.add_row(
            escaped(item.name),
            f"[cyan]{left}[/cyan]",
            f"[magenta]{right}[/magenta]",
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
    """Return two sparklines with a common scale."""
    bars = sparkline([*left, *right], width=min(2 * CURVE_WIDTH, 2 * len(left)))
    return bars[: len(bars) // 2], bars[len(bars) // 2 :]
