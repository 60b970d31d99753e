"""How facts look in a terminal: one voice for errors, numbers, differences and curves.

Rich drops colour by itself when output is piped or NO_COLOR is set.
"""

import functools
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

if TYPE_CHECKING:
    from recorder.difference import Difference

P = ParamSpec("P")
R = TypeVar("R")
BARS = "▁▂▃▄▅▆▇█"
PIPED_WIDTH = 200
HEX_FLOAT = re.compile(r"-?0x[01]\.[0-9a-f]+p[+-]\d+")


def console(stderr: bool = False) -> Console:
    """A console for standard output, or standard error; wide when piped, so that lines do not break."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream, width=None if stream.isatty() else PIPED_WIDTH, highlight=False, soft_wrap=True
    )


def fail(message: str, code: int = 2) -> NoReturn:
    """Ends the command with one sentence on standard error; 2 is misuse, 1 a problem found."""
    console(stderr=True).print(f"[red]Error:[/red] {escaped(message)}")
    raise SystemExit(code)


def escaped(text: str) -> str:
    """The text, safe to print where rich reads markup."""
    return text.replace("[", r"\[")


def errors_as_sentences(body: Callable[P, R]) -> Callable[P, R]:
    """Turns a user's mistake (ValueError, a missing or forbidden file) in a verb into a sentence and exit code.

    Damage is a problem found, code 1; everything else is misuse, code 2. Our own defects keep their traceback.
    """

    @functools.wraps(body)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        from recorder.errors import DamagedRecord

        try:
            return body(*args, **kwargs)
        except DamagedRecord as error:
            fail(str(error), code=1)
        except (
            ValueError,
            FileNotFoundError,
            PermissionError,
            NotADirectoryError,
            IsADirectoryError,
        ) as error:
            fail(str(error))

    return wrapped


def print_json(facts: Any) -> None:
    """Facts as JSON on standard output; non-finite floats, which JSON lacks, as `{"float": "nan"}`."""
    from recorder.sealed import plain

    click.echo(json.dumps(plain(facts), indent=2, allow_nan=False, default=str))


def format_number(value: float) -> str:
    """Six significant digits, integers in full with thousands separated."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def format_bytes(size_bytes: float) -> str:
    """`7.5 MB`, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"


def format_seconds(seconds: float) -> str:
    """`340 ms`, `12.3 s`, `4 min 05 s`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """One bar a value, lowest to highest over the range of the finite values; a blank where it is not finite.

    More values than `width` are averaged in `width` equal shares.
    """
    edges = (
        [len(values) * i // width for i in range(width + 1)]
        if len(values) > width
        else range(len(values) + 1)
    )
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, span = min(finite, default=0.0), (max(finite, default=0.0) - min(finite, default=0.0)) or 1.0
    return "".join(
        BARS[int((mean - low) / span * (len(BARS) - 1))] if math.isfinite(mean) else " " for mean in means
    )


def format_value(value: Any) -> str:
    """A recorded value: hex floats as decimals beside their bits, absent ones as such."""
    if value is None:
        return "absent"
    if isinstance(value, str) and HEX_FLOAT.fullmatch(value):
        return f"{float.fromhex(value):.9g} ({value})"
    return str(value)


def difference_table(
    title: str,
    differences: "Sequence[Difference]",
    limit: int = 20,
    headings: tuple[str, str, str] = ("what", "recorded", "now"),
) -> Table:
    """What differs, recorded beside replayed; at most `limit` rows and a line that counts the rest."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for item in differences[:limit]:
        table.add_row(
            escaped(item.where), escaped(format_value(item.recorded)), escaped(format_value(item.current))
        )
    if len(differences) > limit:
        table.add_row(f"... and {len(differences) - limit} more", "", "")
    return table


def with_progress(title: str, total: int, work: Callable[[Callable[[object], None]], R]) -> R:
    """What `work(tick)` returns, under a progress bar on standard error that `tick` moves and that is gone at the end."""
    with Progress(console=console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(title, total=total)
        return work(lambda _: progress.advance(task))
