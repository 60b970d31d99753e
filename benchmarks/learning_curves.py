"""Train every method on one tiny task and draw its learning curve.

    python -m benchmarks.learning_curves [--seeds 3] [--only grpo,ppo] [--again]

Writes measurements/learning_curves.md, learning_curves.svg and learning_curves_presets.svg. Task
and options are those of `benchmarks/learning_methods.py`, which the tests train, too. Curves are
added to measurements/learning_curves.json one by one; existing ones are trained again only with
--again, so that the script may be interrupted.
"""

import contextlib
import datetime
import io
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from markupsafe import Markup

from areal_debug.report.charts import HEIGHT, WIDTH, shares
from benchmarks.harness import SomeOf, read_options
from benchmarks.learning_methods import METHODS, OTHER_PRESETS, Curve, Method, learn, teach

DOCS = Path(__file__).parents[1] / "docs" / "measurements"
CURVES = DOCS / "learning_curves.json"
COMMAND = "python -m benchmarks.learning_curves"
COLUMNS, TITLE_HEIGHT, GAP = 3, 44, 10
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #5c6778; } .title { font-size: 14px; font-weight: 600; fill: #1d2430; }
.paper { fill: #ffffff; } .axis { stroke: #8b95a5; } .even { stroke: #e3e5ea; stroke-dasharray: 3 4; }
.line { fill: none; stroke: #2f62c9; stroke-width: 1.6; stroke-linejoin: round; opacity: 0.8; } .spot { fill: #2f62c9; }
@media (prefers-color-scheme: dark) { text { fill: #9aa6b8; } .title { fill: #e5e9f0; } .paper { fill: #13161b; }
.axis { stroke: #6d788a; } .even { stroke: #2b313b; } .line { stroke: #7ea6f4; } .spot { fill: #7ea6f4; } }
"""

PAGE = """# Learning curves

A question names two numbers between 10 and 99 ("37 52"), and the larger is the answer. 1,024
questions are for training; 128 others are held out: their pairs do not occur in training.
The model is a Llama with 2 layers of width 64 and one character per token. SFT and the reward model
start from random weights; the others from a model that SFT has trained until it answers about three
questions in ten. Each curve is one seed of weights, order and sampling.

![five methods](learning_curves.svg)

{methods}

The presets of [algorithms.md](../algorithms.md) on the same questions, from the same model, with
one learning rate for all: this shows that each learns, not which learns best.

![presets](learning_curves_presets.svg)

{presets}

Made by `{command}` on one CPU thread
({dates}; {versions}), with the options of
`larger_supervised.yaml`, `larger_rl.yaml` and `learning_methods.py` in `benchmarks/`.
`tests/trainer/test_learning_curves.py` trains the same and checks that each improves by its margin.
All points are in [learning_curves.json](learning_curves.json).
"""

Trained = dict[str, Any]  # {"method", "seed", "curve", "cpu_s", "date", "versions"}, as in the JSON


def train(method: Method, seed: int, folder: Path) -> Trained:
    """Train one curve; return it with time, date and versions."""
    began = time.process_time()
    curve = quietly(learn, method, folder, seed)
    return {
        "method": method.name,
        "seed": seed,
        "curve": curve,
        "cpu_s": round(time.process_time() - began, 1),
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version()}
        | {n: version(n) for n in ("torch", "transformers")},
    }


def quietly(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function without its printed lines; return its result."""
    with contextlib.redirect_stdout(io.StringIO()):
        return function(*arguments)


def train_missing(methods: Sequence[Method], seeds: int, again: bool) -> None:
    """Train the curves that the JSON lacks, and write each to it."""
    kept = json.loads(CURVES.read_text()) if CURVES.exists() else []
    names = {method.name for method in methods}
    if again:
        kept = [trained for trained in kept if trained["method"] not in names]
    present = {(trained["method"], trained["seed"]) for trained in kept}
    for seed in range(1, seeds + 1):
        missing = [method for method in methods if (method.name, seed) not in present]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as name:
            quietly(teach, Path(name), seed)
            for method in missing:
                kept.append(train(method, seed, Path(name)))
                print(f"{method.title}, seed {seed}: {endpoints([kept[-1]['curve']])}", flush=True)
                CURVES.write_text(json.dumps(kept).replace('{"method"', '\n{"method"') + "\n")


def endpoints(curves: Sequence[Curve]) -> str:
    """Return first and last values, as ranges over the seeds."""
    first, last = ([curve[end][1] for curve in curves] for end in (0, -1))
    return f"{span(first)} → {span(last)}"


def span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low}–{high}"


def picture(methods: Sequence[Method], trained: Sequence[Trained]) -> str:
    """Return an SVG, without scripts or fonts, for light and dark pages: one panel per method."""
    panels = []
    for index, method in enumerate(methods):
        curves = curves_of(method, trained)
        x, y = (index % COLUMNS) * (WIDTH + GAP), (index // COLUMNS) * (HEIGHT + TITLE_HEIGHT + GAP)
        chart = shares(curves, "0", f"{curves[0][-1][0]} steps")
        panels.append(
            Markup(
                '<text class="title" x="{0}" y="{1}">{2}</text><text x="{0}" y="{3}">{4}: {5}</text>'
                '<svg x="{6}" y="{7}" width="{8}" height="{9}">{10}</svg>'
            ).format(
                *(x + GAP, y + 22, method.title, y + 40, method.measure, endpoints(curves)),
                *(x, y + TITLE_HEIGHT, WIDTH, HEIGHT, chart),
            )
        )
    rows = -(-len(methods) // COLUMNS)
    return on_paper("".join(panels), COLUMNS * (WIDTH + GAP), rows * (HEIGHT + TITLE_HEIGHT + GAP))


def on_paper(panels: str, width: int, height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<style>{STYLE}</style><rect class="paper" width="{width}" height="{height}"/>{panels}</svg>\n'
    )


def curves_of(method: Method, trained: Sequence[Trained]) -> list[Curve]:
    return [one["curve"] for one in trained if one["method"] == method.name]


def document(methods: Sequence[Method], presets: Sequence[Method], trained: Sequence[Trained]) -> str:
    """Return the page: the task, both pictures, and the numbers."""
    dates, made = sorted({one["date"] for one in trained}), trained[-1]["versions"]
    versions = ", ".join(f"{name} {number}" for name, number in made.items())
    return PAGE.format(
        methods="\n".join(table(methods, trained)),
        presets="\n".join(table(presets, trained)),
        command=COMMAND,
        dates=" to ".join(dict.fromkeys((dates[0], dates[-1]))),
        versions=versions,
    )


def table(methods: Sequence[Method], trained: Sequence[Trained]) -> list[str]:
    lines = [
        "| method | held-out measure | before → after | steps | seeds | CPU seconds |",
        "|---|---|---|---|---|---|",
    ]
    for method in methods:
        seconds = [one["cpu_s"] for one in trained if one["method"] == method.name]
        lines.append(
            f"| {method.title} | {method.measure} | {endpoints(curves_of(method, trained))} | {method.steps} "
            f"| {len(seconds)} | {statistics.median(seconds):.0f} |"
        )
    return lines


def draw(trained: Sequence[Trained]) -> dict[str, str]:
    """Return the documents by file name; a pure function of the curves."""
    methods, presets = ([m for m in some if curves_of(m, trained)] for some in (METHODS, OTHER_PRESETS))
    return {
        "learning_curves.svg": picture(methods, trained),
        "learning_curves_presets.svg": picture(presets, trained),
        "learning_curves.md": document(methods, presets, trained),
    }


def main() -> None:
    every = {method.name: method for method in (*METHODS, *OTHER_PRESETS)}
    options = read_options(__doc__, seeds=3, only=SomeOf(every), again=False)
    chosen = [every[name] for name in options.only]
    train_missing([method for method in chosen if method in METHODS], options.seeds, options.again)
    train_missing([method for method in chosen if method in OTHER_PRESETS], 1, options.again)
    trained = json.loads(CURVES.read_text())
    for file, text in draw(trained).items():
        (DOCS / file).write_text(text)
    if missing := [name for name, method in every.items() if not curves_of(method, trained)]:
        print(f"not drawn, since not trained yet: {', '.join(missing)}")


if __name__ == "__main__":
    main()
