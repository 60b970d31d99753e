"""Recorded against replayed after something was changed: stat by stat as two curves, step by step as numbers."""

import math
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from areal_debug.render import escaped, format_number, sparkline
from replayer.check import ReplayReport

# What people look at first; the rest follows by how much it moved.
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
    """One statistic over the steps that both have. `moved` is the mean distance relative to the recorded size."""

    name: str
    recorded: tuple[float, ...]
    replayed: tuple[float, ...]

    @property
    def moved(self) -> float:
        """0 where both are equal."""
        pairs = list(zip(self.recorded, self.replayed, strict=True))
        apart = sum(abs(a - b) for a, b in pairs if math.isfinite(a - b))
        size = sum(abs(a) for a, _ in pairs if math.isfinite(a))
        return 0.0 if apart == 0 else apart / size if size else math.inf


def curves_of(report: ReplayReport) -> list[Curve]:
    """The statistics, those that people look at first in front, then by how much they moved."""
    names = {name for step in report.steps for name in step.recorded.keys() & step.replayed.keys()}
    curves = [curve(report, name) for name in names if not name.endswith(("__count", "/min", "/max"))]
    order = {name: position for position, name in enumerate(FIRST)}
    return sorted(curves, key=lambda c: (order[c.name] if c.name in order else len(order), -c.moved, c.name))


def curve(report: ReplayReport, name: str) -> Curve:
    """One statistic."""
    both = [step for step in report.steps if name in step.recorded and name in step.replayed]
    return Curve(name, tuple(s.recorded[name] for s in both), tuple(s.replayed[name] for s in both))


def print_comparison(out: Console, report: ReplayReport) -> None:
    """What was changed, and where recorded and replayed numbers went."""
    curves = curves_of(report)
    moved = [c for c in curves if c.moved > 0]
    first = report.first_different
    out.print()
    if first is None:
        out.print(f"[bold]Nothing moved:[/bold] all {len(report.steps)} steps have the recorded bits.")
        return
    kinds = ", ".join(sorted({difference.kind for difference in first.differences}))
    out.print(
        f"[bold]Recorded against replayed[/bold] over {len(report.steps)} steps, which part in step {first.step} ({kinds}):"
    )
    out.print(table(moved[:SHOWN]))
    if len(moved) > SHOWN:
        out.print(f"... and {len(moved) - SHOWN} statistics that moved less; --json has all of them")
    same = [c.name for c in curves if c.moved == 0]
    out.print(f"[dim]{len(same)} statistics did not move. The record was not touched.[/dim]")


def table(curves: list[Curve]) -> Table:
    """Two curves a statistic, on one scale, and their means."""
    found = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("statistic", "recorded", "replayed"):
        found.add_column(heading)
    for heading in ("mean recorded", "mean replayed", "moved"):
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
    """A percentage; beyond tenfold it says no more than that."""
    if math.isinf(moved):
        return "from 0"
    return "> 1000 %" if moved > 10 else f"{100 * moved:.3g} %"


def on_one_scale(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[str, str]:
    """Two lines of bars whose heights can be compared."""
    bars = sparkline([*left, *right], width=min(2 * CURVE_WIDTH, 2 * len(left)))
    return bars[: len(bars) // 2], bars[len(bars) // 2 :]
