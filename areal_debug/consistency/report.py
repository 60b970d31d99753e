"""What `areal-debug consistency` says: verdict, causes, numbers, curves, and the worst tokens."""

import math
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal_debug.render import count, format_number, sparkline
from areal_debug.report.charts import bars, dots
from areal_debug.report.links import view_command
from areal_debug.report.model import Block, Curve, Facts, Finding, Level, Picture, Report, Row, Table, tone_of
from consistency.case import Request
from consistency.check import Checked
from consistency.diagnose import is_accusation
from consistency.measure import ALIASES
from consistency.over_time import OverTime
from consistency.report import WorstToken, describe_worst
from recorder import open_record
from recorder.samples import token_texts

TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NUM_DOTS, NUM_WORST = 1500, 30
Decode = Callable[[list[int]], str] | None


def report_of(checked: Checked, request: Request, source: dict[str, Any]) -> Report:
    """Return the report; `source` describes what was compared with the model."""
    found, measured = checked.diagnosis, checked.diagnosis.measurement
    name = (
        found.causes[0].name
        if found.causes
        else "no known cause explains the difference beyond the noise floor"
    )
    summary = (
        f"{measured.num_tokens:,} tokens of {measured.num_sequences:,} sequences, mean |D| "
        f"{format_number(measured.metrics['mean_abs'])}, D = trainer - engine, scored in {checked.dtype} at "
        f"temperature {checked.setting.temperature:g}"
    )
    engines = (f"engine: {engine}" for engine in source.get("engines", ()))
    notes = [note for note in (left_out(checked), steps_left(source), *checked.notes, *engines) if note]
    blocks: list[Block] = [*findings(checked)]
    if found.missing:
        blocks.append(Facts([Row("", name) for name in found.missing], "For a more precise answer, add"))
    blocks += [*cross_checks(checked), numbers(checked), *curves(checked)]
    blocks += [*worst_tokens(checked, request, source), *all_numbers(checked)]
    return Report(found.verdict.capitalize(), f"{name}. {summary}", tone_of(found.verdict), blocks, notes)


def left_out(checked: Checked) -> str:
    """Describe how many tokens were not compared and why; empty if all were."""
    counts = vars(checked.diagnosis.measurement.excluded).items()
    listed = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in counts if number)
    return f"left out: {listed}" if listed else ""


def steps_left(source: dict[str, Any]) -> str:
    """Say that other recorded steps were not compared: an engine may have missed a later update."""
    steps = sorted(set(source.get("steps", ())))
    record = open_record(Path(source["record"])) if steps else None
    if record is None or len(steps) == len(record.steps):
        return ""
    how = "--replay-weights" if record.header.config_is_ours else "--model CHECKPOINT"
    some = f"step {steps[0]} of" if len(steps) == 1 else f"steps {', '.join(map(str, steps))} of"
    compared = f"only {some} {len(record.steps)} steps {'was' if len(steps) == 1 else 'were'} compared"
    return (
        f"{compared}: an engine that missed a later update is not seen; --step N {how} compares another step"
    )


def findings(checked: Checked) -> Iterator[Finding]:
    for cause in checked.diagnosis.causes:
        level: Level = "bad" if is_accusation(cause) else "unsure" if cause.fault else "good"
        rows = [Row("evidence", cause.evidence), Row("refuted if", cause.refute), Row("fix", cause.fix)]
        yield Finding(cause.id, cause.name, level, rows, f"confidence {cause.confidence:.0%}")


def cross_checks(checked: Checked) -> Iterator[Facts]:
    """Yield the trainer's own path, and second scorings of the same tokens."""
    if (trainer := checked.trainer_check) is not None:
        pairs = {
            "to the engine": trainer.engine_trainer,
            "to the model": trainer.trainer_model,
            "engine to model": trainer.engine_model,
        }
        title = f"trainer (from the record), mean |difference| over {count(trainer.num_tokens, 'token')}"
        yield Facts([Row(name, format_number(value)) for name, value in pairs.items()], title)
    if (rescoring := checked.rescoring) is not None:
        values = asdict(rescoring)
        rows = [
            Row(
                label,
                "not comparable at this temperature" if values[name] is None else format_number(values[name]),
            )
            for name, label in TEXTS["rescoring"].items()
        ]
        yield Facts(rows, f"rescored {count(rescoring.num_tokens, 'token')}, mean |difference|")


def numbers(checked: Checked) -> Table:
    metrics = checked.diagnosis.measurement.metrics
    cells = [(label, format_number(metrics[name])) for name, label in TEXTS["numbers"].items()]
    half = len(cells) // 2
    rows = [(*left, *right) for left, right in zip(cells[:half], cells[half:], strict=True)]
    return Table(("", ">", "", ">"), rows, only="terminal")


def curves(checked: Checked) -> Iterator[Block]:
    """Yield the histogram of D, engine against trainer, and mean |D| by each column of groups."""
    table, measured = checked.diagnosis.table, checked.diagnosis.measurement
    edges = [edge for edge, _ in measured.histogram]
    counts = [math.log1p(number) for _, number in measured.histogram]
    reach = format_number(-edges[0])
    lines = [Row("tokens by D (log)", f"{sparkline(counts)}  {format_number(edges[0])} to {reach}")]
    pictures = [Picture(bars(counts, format_number(edges[0]), reach), "tokens by D (logarithmic count)")]
    every = max(1, len(table.engine) // NUM_DOTS)
    trainer, engine = table.trainer[::every].tolist(), table.engine[::every].tolist()
    caption = "logprob of the engine against that of the trainer; equal on the line"
    pictures.append(Picture(dots(trainer, engine, format_number(min(*trainer, *engine))), caption))
    for column, (label, is_printed) in TEXTS["curves"].items():
        groups = measured.by.get(column, ())
        if len(groups) > 1:
            sizes = [group.mean_abs for group in groups]
            first, last = str(groups[0].key), str(groups[-1].key)
            ends = f"{first} to {last}; {min(sizes):.2g} to {max(sizes):.2g}"
            caption = f"mean |D| by {label}; largest {format_number(max(sizes))}"
            pictures.append(Picture(bars(sizes, first, last), caption))
            if is_printed:
                lines.append(Row(f"|D| by {label.partition(',')[0]}", f"{sparkline(sizes)}  {ends}"))
    yield Facts(lines, "Where they differ (D = trainer - engine, in nats)")
    yield from pictures


def worst_tokens(checked: Checked, request: Request, source: dict[str, Any]) -> Iterator[Block]:
    """Yield the tokens with the largest |D|: ten on a terminal, more on a page."""
    worst, decode = describe_worst(checked, count=NUM_WORST), load_decode(request.model)
    looks = look_at(source, worst)
    headings = ("sequence>", "position>", "engine>", "trainer>", "rank>", "preceding text", "token")
    rows = [worst_cells(token, decode) for token in worst]
    few = [(*row, top_of(token.top[:3], decode)) for row, token in zip(rows[:10], worst, strict=False)]
    yield Table((*headings, "trainer's top tokens"), few, "Worst tokens", only="terminal")
    all_rows = [
        (*row, top_of(token.engine_top, decode), top_of(token.top, decode), *([look] if looks else []))
        for row, token, look in zip(rows, worst, looks or [""] * len(worst), strict=True)
    ]
    more = ("engine's top tokens", "trainer's top tokens", *(["look"] if looks else []))
    yield Table((*headings, *more), all_rows, "Worst tokens", only="page")
    if looks:
        yield Facts([Row("look", looks[0], is_code=True)])


def worst_cells(token: WorstToken, decode: Decode) -> tuple[str, ...]:
    numbers = (f"{token.engine:.4g}", f"{token.trainer:.4g}", str(token.rank))
    before = text_of(list(token.before), decode)[-32:]
    return (str(token.sequence), str(token.position), *numbers, before, text_of([token.token_id], decode))


def top_of(top: Sequence[tuple[int, float]], decode: Decode) -> str:
    return ", ".join(f"{text_of([i], decode)} {logprob:.2f}" for i, logprob in top)


def all_numbers(checked: Checked) -> Iterator[Table]:
    measured = checked.diagnosis.measurement
    rows = [
        (name, format_number(value), "; ".join(ALIASES.get(name, ())))
        for name, value in measured.metrics.items()
    ]
    headings = ("name", "value>", "name in other frameworks")
    yield Table(headings, rows, "All numbers", only="page")


def look_at(source: dict[str, Any], worst: Sequence[WorstToken]) -> list[str]:
    """Return the commands that show these tokens in the record; none for a live engine."""
    if "record" not in source or not worst:
        return []
    record, rows = open_record(source["record"]), list[tuple[int, int | None, int | None]]()
    for number in source["steps"]:
        step = record.step(number)
        for rank in step.ranks:
            arrays, known = step.batch(rank, ["prompt_id", "sample_id"]), step.known(rank, "prompt_id")
            names = zip(arrays["prompt_id"].tolist(), arrays["sample_id"].tolist(), known, strict=True)
            rows += [
                (number, prompt, sample) if is_known else (number, None, None)
                for prompt, sample, is_known in names
            ]
    found = [(*rows[token.sequence], token.position) for token in worst]
    return [
        view_command(source["record"], step, prompt, sample, None if prompt is None else position)
        for step, prompt, sample, position in found
    ]


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


def report_over_time(found: OverTime) -> Report:
    """Return the verdict of a run's steps, the causes, and the numbers of each regression."""
    names = [cause.name for cause in found.causes]
    gaps = [one.gap for one in found.steps]
    sentence = names[0] if names else "the gap between engine and trainer follows nothing"
    blocks: list[Block] = [
        Curve("mean |D|", gaps, [one.step for one in found.steps], ends=f"{gaps[0]:.2g} to {gaps[-1]:.2g}")
    ]
    for cause in found.causes:
        rows = [
            Row("evidence", cause.evidence),
            Row("refuted if", cause.refute, "dim"),
            Row("fix", cause.fix),
        ]
        blocks.append(
            Finding(cause.id, cause.name, "bad" if cause.fault else "unsure", rows, f"{cause.confidence:.0%}")
        )
    cells = [
        [r.against, f"{r.slope:.3g}", f"{r.t:.1f}", f"{r.explained:.0%}", str(r.num)]
        for r in found.regressions
    ]
    blocks.append(Table(("mean |D| against", "slope>", "t>", "explained>", "values>"), cells))
    blocks.append(Facts([Row("unobserved", text, "dim") for text in found.unobserved]))
    return Report(found.verdict.capitalize(), sentence, tone_of(found.verdict), blocks)
