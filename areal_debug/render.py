"""Output to a terminal that all verbs share: errors, progress, numbers and curves.

Rich drops colour by itself when output is piped or NO_COLOR is set. With --quiet a report is its
first line, which is its verdict; with --verbose progress is printed to files, too, and errors with
tracebacks. Rank 0 writes its report into a file that the command which started the ranks names in
the environment.
"""

import functools
import itertools
import json
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, NoReturn, ParamSpec, TypeVar

import click
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.control import Control
from rich.segment import Segment
from rich.text import Text

from areal_core.safety.durable import sentence_of
from areal_core.safety.printable import printable, printable_block
from areal_debug.installation import install_hint
from areal_debug.streams import styled_stream
from areal_debug.waiting import PROGRESS_VARIABLE, doing, has_terminal, say, tick, waiting_line

P = ParamSpec("P")
R = TypeVar("R")
BARS = "▁▂▃▄▅▆▇█"
PIPED_WIDTH = 10_000  # wider than any table
FIELD = "\0"  # place of a field in a template
VERBOSITY = "areal_debug.verbosity"  # key in a context's meta: "quiet" or "verbose"

REPORT_FILE = "AREAL_DEBUG_REPORT"  # path of the file
QUIET = "AREAL_DEBUG_QUIET"  # if set, the ranks do not print their report
VERBOSE = "AREAL_DEBUG_VERBOSE"  # if set, the ranks print the details of each step


class FirstLine:
    """A text stream that passes on one line of what it receives: the first that is not blank."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.pending, self.is_written = stream, "", False

    def write(self, text: str) -> int:
        self.pending += text
        while not self.is_written and "\n" in self.pending:
            line, _, self.pending = self.pending.partition("\n")
            if line.strip():
                self.stream.write(f"{line}\n")
                self.is_written = True
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def verbosity() -> str:
    """Return "quiet" or "verbose" as the running verb was called, else "normal"."""
    context = click.get_current_context(silent=True)
    return "normal" if context is None else context.meta.get(VERBOSITY, "normal")


def is_quiet() -> bool:
    """Return whether the running verb was called with --quiet."""
    return verbosity() == "quiet"


def is_verbose() -> bool:
    """Return whether the running verb was called with --verbose."""
    return verbosity() == "verbose"


@dataclass(frozen=True)
class WordWrapped:
    """What a pipe gets, for a terminal: lines that are too wide are wrapped between words.

    Later lines begin below the last column of the first, where that is in its left half, and never
    at the edge: data cannot make a line of its own. A word that is wider than the terminal stays
    whole.
    """

    objects: tuple[Any, ...]
    separator: str = " "

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        is_text = all(isinstance(item, str | Text) for item in self.objects)
        texts = [console.render_str(item) if isinstance(item, str) else item for item in self.objects]
        whole = Text(self.separator).join(texts) if is_text else Group(*self.objects)
        for line in Segment.split_lines(console.render(whole, options.update(width=PIPED_WIDTH))):
            yield from wrapped_line(line, options.max_width)


def wrapped_line(line: Sequence[Segment], width: int) -> Iterator[Segment]:
    text = "".join(segment.text for segment in line).rstrip()
    columns = [match.end() for match in re.finditer(r"^ +|\S {2,}", text) if match.end() <= width // 2]
    indent = max([2, *columns[-1:]])
    cuts, start, room = [], 0, width
    for word in re.finditer(r"\S+", text):
        if cell_len(text[start : word.end()]) > room and word.start() > max(start, indent):
            cuts.append(word.start())
            start, room = word.start(), width - indent
    cells = [cell_len(text[:cut]) for cut in [*cuts, len(text)]]
    for number, part in enumerate(Segment.divide(line, cells)):
        if number:
            yield Segment(" " * indent)
        content = list(Segment.simplify(part))
        ended = "".join(segment.text for segment in content).rstrip()
        yield from Segment.adjust_line_length(content, cell_len(ended))
        yield Segment.line()


class PlainConsole(Console):
    """A console that takes text as data: no markup, no emoji names, control codes shown."""

    def print(self, *objects: Any, sep: str = " ", end: str = "\n", **settings: Any) -> None:
        is_report = bool(objects) and end == "\n" and not isinstance(objects[0], Control)
        if is_report and self.file.isatty() and not isinstance(self.file, FirstLine):
            objects = (WordWrapped(objects, sep),)
        super().print(*objects, sep=sep, end=end, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(printable_block(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable_block(text), style, control)


def console(stderr: bool = False, **settings: Any) -> Console:
    """Make a console for standard output or error; wide when piped, so that lines do not break."""
    stream: Any = styled_stream(sys.stderr if stderr else sys.stdout)
    width = None if stream.isatty() else PIPED_WIDTH
    if is_quiet() and not stderr:  # one for all consoles of the verb: a report may use several
        stream = click.get_current_context().meta.setdefault("areal_debug.first_line", FirstLine(stream))
    # as of the command lines of BSD: colours where output is no terminal; NO_COLOR takes precedence
    is_forced = os.environ.get("CLICOLOR_FORCE", "0") not in ("", "0") and not os.environ.get("NO_COLOR")
    settings = {
        "width": width,
        "force_terminal": is_forced or None,
        "highlight": False,
        "markup": False,
        "emoji": False,
    } | settings
    return PlainConsole(file=stream, soft_wrap=True, **settings)


def styled(template: str, *data: object) -> Text:
    """Return a template with rich's markup, and in its fields data as it is, on one line.

    Args:
        template: a constant of ours, with fields as of `str.format`, by position: `{}`, `{:,}`.
        data: a value a field; a `Text` keeps its style.
    """
    values, pieces, fields = iter(data), [], []
    for literal, name, spec, conversion in Formatter().parse(template):
        pieces.append(literal)
        if name is not None:
            pieces.append(FIELD)
            fields.append(field_text(next(values), spec or "", conversion))
    marked = Text.from_markup("".join(pieces), emoji=False)
    places = [place for place, character in enumerate(marked.plain) if character == FIELD]
    result = Text()
    for piece in marked.divide([edge for place in places for edge in (place, place + 1)]):
        if piece.plain != FIELD:
            result.append_text(piece)
            continue
        text = fields.pop(0)
        for span in piece.spans:
            text.stylize_before(span.style)
        result.append_text(text)
    return result


def field_text(value: object, spec: str, conversion: str | None) -> Text:
    if isinstance(value, Text):
        return value.copy()
    return one_line(format(repr(value) if conversion == "r" else value, spec))


def one_line(text: str, style: str = "") -> Text:
    return Text(printable(text, len(text)), style)


def note(text: str) -> None:
    """Print progress on standard error; nothing with --quiet."""
    if not is_quiet():
        console(stderr=True).print(text, style="dim")


def announce(text: str) -> None:
    """Say on a terminal what begins, before slow imports; a log gets what came of it."""
    shown = printable(text, len(text))
    say(shown)
    if sys.stderr.isatty() and not has_terminal() and not hides_progress():
        note(shown)


def fail(message: str, code: int = 2) -> NoReturn:
    """End the command with one sentence on standard error; 2 is misuse, 1 a problem found.

    Further lines, of a list of problems, are indented: none can look like one of the verb's own.
    """
    from areal_core.safety.secrets import masker  # an URL of a message may have credentials

    shown = printable_block(masker().text(message).replace("\n", "\n  "))
    console(stderr=True).print(styled("[red]Error:[/red] ").append(shown))
    raise SystemExit(code)


def print_log_end(log: Path, num_lines: int = 15) -> None:
    if log.is_file():
        from areal_core.safety.secrets import masker

        lines = log.read_text(errors="replace").splitlines()[-num_lines:]
        console(stderr=True).print(masker().text("\n".join(lines)))


@contextmanager
def hidden_output() -> Iterator[None]:
    """Drop standard output; the log files of ranks keep theirs."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def refuse_existing(output: Path | None, force: bool) -> None:
    """Raise ValueError if `output` is a file or a folder with content, unless `force` is set."""
    if output is None or force or not output.exists():
        return
    if not output.is_dir() or any(output.iterdir()):
        raise ValueError(f"{output} exists already: give --force to replace it, or another path")


def errors_as_sentences(body: Callable[P, R]) -> Callable[P, R]:
    """Decorate a verb: it shows its progress, and an error that a user can cause ends it with one
    sentence and an exit code.

    Damage is a problem found, code 1; any other ValueError, and what the system refuses (a missing
    file, a full disk), is misuse, code 2. Our own defects keep their traceback; with --verbose
    misuse has one, too.
    """

    @functools.wraps(body)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with shown_progress():
                return body(*args, **kwargs)
        except ModuleNotFoundError as error:
            if (hint := install_hint(error)) is None:
                raise
            fail(hint)
        except Exception as error:
            from recorder.errors import DamagedRecord  # imports NumPy: 0.15 s of each verb's start

            if not isinstance(error, ValueError | OSError | DamagedRecord):
                raise
            if is_verbose():
                traceback.print_exc()
            sentence = sentence_of(error) if isinstance(error, OSError) else str(error)
            fail(sentence, code=1 if isinstance(error, DamagedRecord) else 2)

    return wrapped


def end_if_damaged(left_out: Iterable[str], code: int = 1) -> None:
    """Name on standard error what was left out, if anything was, and end with the code."""
    problems = list(left_out)
    for problem in problems:
        console(stderr=True).print(styled("[red]Left out:[/red] {}", problem))
    if problems and code:
        raise SystemExit(code)


def print_json(facts: Any) -> None:
    """Print facts as JSON on standard output.

    Non-finite floats, which JSON lacks, are printed as `{"float": "nan"}`.
    """
    from recorder.documents import plain

    click.echo(json.dumps(plain(facts), indent=2, allow_nan=False, default=str))


def format_number(value: float) -> str:
    """Six significant digits, integers in full with thousands separated."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`, `2 batches`."""
    ending = "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{number:,} {noun}{ending * (number != 1)}"


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
    """Draw one bar a value, over the range of the finite values; a blank if it is not finite.

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


def with_progress(title: str, total: int, work: Callable[[Callable[[object], None]], R]) -> R:
    """Return `work(tick)`, and show on a terminal meanwhile how often `tick` was called."""
    started_at = time.monotonic()
    with doing(title, total):
        result = work(lambda _: tick())
    if is_verbose():
        note(f"{title}: {total} in {format_seconds(time.monotonic() - started_at)}")
    return result


def hides_progress() -> bool:
    """Return whether the running verb shows no progress: --quiet, --json, or it is no verb."""
    context = click.get_current_context(silent=True)
    return context is None or is_quiet() or bool(context.params.get("as_json"))


@contextmanager
def shown_progress() -> Iterator[None]:
    if hides_progress() and PROGRESS_VARIABLE not in os.environ:
        yield
        return
    with waiting_line(click.get_current_context().command_path.partition(" ")[2]):
        yield


def write_report(report: dict[str, Any]) -> None:
    if REPORT_FILE in os.environ:
        Path(os.environ[REPORT_FILE]).write_text(json.dumps(report))


def read_report(file: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(file.read_text())
    return report
