"""Charts for pages: SVG without scripts.

Their colours are classes of the page's style sheet (`bar`, `dot`, `line`, `axis`, `even`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from areal_core.safety.printable import printable

WIDTH, HEIGHT, MARGIN = 360, 170, 24
ACROSS, DOWN = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
GROUND = HEIGHT - MARGIN
LEFT = 64  # margin of a chart with labels of its values
TIMELINE_WIDTH = 1000


def bars(values: Sequence[float], first: str, last: str) -> Markup:
    """Draw bars from 0 to the largest value, with a label at either end."""
    top = max(values) or 1.0
    step = ACROSS / len(values)
    drawn = [
        f'<rect class="bar" x="{MARGIN + i * step:.1f}" y="{GROUND - DOWN * value / top:.1f}" '
        f'width="{max(step - 1, 0.6):.1f}" height="{DOWN * value / top:.1f}"/>'
        for i, value in enumerate(values)
    ]
    return framed("".join(drawn), first, last)


def dots(x: Sequence[float], y: Sequence[float], first: str) -> Markup:
    """Draw points that are below 0 on both axes, and the diagonal; `first` labels the low end."""
    low = min(*x, *y, -1e-6)
    points = [
        f'<circle class="dot" cx="{MARGIN + ACROSS * (1 - a / low):.1f}" cy="{MARGIN + DOWN * b / low:.1f}" r="1.6"/>'
        for a, b in zip(x, y, strict=True)
    ]
    even = f'<line class="even" x1="{MARGIN}" y1="{GROUND}" x2="{WIDTH - MARGIN}" y2="{MARGIN}"/>'
    return framed(even + "".join(points), first, "0")


def line(
    x: Sequence[float],
    y: Sequence[float],
    first: str,
    last: str,
    ends: tuple[str, str],
    marked: Sequence[int] = (),
) -> Markup:
    """Draw a curve between its lowest and its highest value.

    Args:
        first, last: labels of the ends of the horizontal axis.
        ends: labels of the lowest and the highest value.
        marked: points that get a dot.
    """
    low, high = min(y), max(y)
    reach_x, reach_y = (x[-1] - x[0]) or 1.0, (high - low) or 1.0
    points = [
        (LEFT + (WIDTH - LEFT - MARGIN) * (a - x[0]) / reach_x, GROUND - DOWN * (b - low) / reach_y)
        for a, b in zip(x, y, strict=True)
    ]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    spots = "".join(
        f'<circle class="spot" cx="{points[i][0]:.1f}" cy="{points[i][1]:.1f}" r="3"/>' for i in marked
    )
    labels = Markup(
        '<text x="{0}" y="{1}" text-anchor="end">{3}</text><text x="{0}" y="{2}" text-anchor="end">{4}</text>'
    )
    grid = f'<line class="axis" x1="{LEFT}" y1="{MARGIN}" x2="{WIDTH - MARGIN}" y2="{MARGIN}"/>'
    texts = labels.format(LEFT - 6, GROUND + 4, MARGIN + 4, *map(printable, ends))
    return framed(f'{grid}{texts}<polyline class="line" points="{path}"/>{spots}', first, last, left=LEFT)


def shares(curves: Sequence[Sequence[tuple[float, float]]], first: str, last: str) -> Markup:
    """Draw curves of (x, share) from 0 to 1, with a line at 0.5 and a dot at the end of each."""
    end = max(curve[-1][0] for curve in curves)
    drawn = [
        f'<line class="even" x1="{MARGIN}" y1="{GROUND - DOWN / 2}" x2="{WIDTH - MARGIN}" y2="{GROUND - DOWN / 2}"/>'
    ]
    for curve in curves:
        points = [(MARGIN + ACROSS * x / end, GROUND - DOWN * share) for x, share in curve]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        drawn.append(f'<polyline class="line" points="{path}"/>')
        drawn.append(f'<circle class="spot" cx="{points[-1][0]:.1f}" cy="{points[-1][1]:.1f}" r="3"/>')
    ticks = [(1.0, "1"), (0.5, "½"), (0.0, "0")]
    labels = [
        f'<text x="{MARGIN - 6}" y="{GROUND - DOWN * share + 4}" text-anchor="end">{label}</text>'
        for share, label in ticks
    ]
    return framed("".join(drawn + labels), first, last)


def framed(
    inside: str, first: str, last: str, *, width: int = WIDTH, left: int = MARGIN, right: int = MARGIN
) -> Markup:
    """Add a base line and two labels to a picture; `inside` is trusted, labels are escaped.

    `left` and `right` are the margins of the base line.
    """
    return Markup(
        '<svg viewBox="0 0 {0} {1}" role="img" aria-label="{7} to {8}">{2}'
        '<line class="axis" x1="{3}" y1="{4}" x2="{5}" y2="{4}"/>'
        '<text x="{3}" y="{6}">{7}</text><text x="{5}" y="{6}" text-anchor="end">{8}</text></svg>'
    ).format(
        width,
        HEIGHT,
        Markup(inside),
        left,
        GROUND,
        width - right,
        HEIGHT - 8,
        printable(first),
        printable(last),
    )


@dataclass(frozen=True)
class Span:
    """A time from `start` to `end` in the colour of the class `kind`; a hover shows `name`."""

    kind: str
    start: float
    end: float
    name: str


def timeline(name: str, spans: Iterable[Span], start: float, end: float) -> Markup:
    """Draw spans on one line from `start` to `end`; later ones are above earlier ones."""
    scale = TIMELINE_WIDTH / ((end - start) or 1.0)
    drawn = [
        Markup(
            '<rect class="{}" x="{:.2f}" y="0" width="{:.2f}" height="20"><title>{}</title></rect>'
        ).format(
            span.kind,
            (span.start - start) * scale,
            max(0.5, (span.end - span.start) * scale),
            printable(span.name),
        )
        for span in spans
    ]
    return Markup(
        '<svg viewBox="0 0 {} 20" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(TIMELINE_WIDTH, printable(name), Markup("").join(drawn))


def stacked(
    columns: Sequence[tuple[str, Sequence[float]]], kinds: Sequence[str], first: str, last: str
) -> Markup:
    """Draw columns of (name, one value a kind), stacked; the class of a value is its kind."""
    top = max(sum(values) for _, values in columns) or 1.0
    step = TIMELINE_WIDTH / len(columns)
    drawn = []
    for place, (name, values) in enumerate(columns):
        below, rects = float(GROUND), []
        for kind, value in zip(kinds, values, strict=True):
            height = DOWN * value / top
            below -= height
            rects.append(
                f'<rect class="{kind}" x="{place * step:.2f}" y="{below:.2f}" '
                f'width="{max(0.4, step - min(1.0, step / 4)):.2f}" height="{height:.2f}"/>'
            )
        drawn.append(Markup("<g><title>{}</title>{}</g>").format(printable(name), Markup("".join(rects))))
    return framed(Markup("").join(drawn), first, last, width=TIMELINE_WIDTH, left=0, right=0)
