"""Print checks and the verdict of `areal-debug certify`. Imports no torch."""

from collections.abc import Sequence

from rich.console import Console

from areal_debug.render import format_number, format_seconds, is_quiet, styled
from consistency.exact import PROVEN, REFUTED, Certificate, Check

HEADING = f"{'check':<26} {'tokens':>9} {'different':>9} {'max |D|':>9} {'cached':>9}  sampled in"


def print_check(out: Console, check: Check) -> None:
    """Print one row of the table."""
    if check.not_run is not None:
        out.print(styled("{} {}", f"{check.name:<26}", f"not run: {check.not_run}"))
        return
    cached = "-" if check.cached_tokens is None else f"{check.cached_tokens:,}"
    seconds = format_seconds(check.seconds) if check.seconds else "-"
    numbers = (
        f"{check.num_tokens:>9,} {check.num_different:>9,} {format_number(check.max_abs):>9} {cached:>9}"
    )
    out.print(styled("{} {}  {}", f"{check.name:<26}", numbers, seconds))


def print_certificate(out: Console, certificate: Certificate, worse: Sequence[str] | None) -> None:
    """Print the verdict, the first difference, and what is worse than in a saved certificate."""
    software = certificate.engine["software"]
    if certificate.verdict == PROVEN:
        out.print(
            styled(
                "[bold green]Proven:[/bold green] {} tokens of the {}, max |D| = 0: every log-prob equals the "
                "trainer's in every bit.",
                f"{certificate.num_tokens:,}",
                software,
            )
        )
    elif certificate.verdict == REFUTED:
        out.print(
            styled(
                "[bold red]Refuted:[/bold red] {} of {} tokens of the {} differ from the trainer's, by up to {} nats.",
                f"{certificate.num_different:,}",
                f"{certificate.num_tokens:,}",
                software,
                format_number(certificate.max_abs),
            )
        )
    else:
        out.print(
            styled(
                "[bold yellow]Undecided:[/bold yellow] {} tokens of the {} equal the trainer's, and a check did "
                "not run.",
                f"{certificate.num_tokens:,}",
                software,
            )
        )
    if not is_quiet():
        print_first(out, certificate)
    if worse is not None:
        out.print("; ".join(worse) if worse else "Not worse than the given certificate.")


def print_first(out: Console, certificate: Certificate) -> None:
    """Print the first token that differs, with both values."""
    for check in certificate.checks:
        if (first := check.first) is not None:
            out.print(
                styled(
                    "First difference, in {}: completion {}, token {} (id {}): engine {} ({}), trainer {} ({})",
                    repr(check.name),
                    first.row,
                    first.position,
                    first.token,
                    f"{first.engine:.9g}",
                    first.engine.hex(),
                    f"{first.trainer:.9g}",
                    first.trainer.hex(),
                )
            )
            return
