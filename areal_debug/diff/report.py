"""What two records, or a record and its replays, say of each other: for `why --all | --layers |
--commits`. The words for one difference serve `why`, `replay` and the pytest plugin, too.
"""

import re
import shlex
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_debug.record.decode import load_decoder
from areal_debug.render import count, format_number
from areal_debug.report.links import view_command
from areal_debug.report.model import Block, Facts, Report, Row, Table, rows_of

if TYPE_CHECKING:
    from recorder import Record
    from recorder.difference import Difference
    from replayer.check import HeaderComparison
    from replayer.commits.bisect import BisectReport
    from replayer.commits.first_step import FirstStep
    from replayer.commits.layers import LayersReport
    from replayer.compare.stages import StageDifference
    from replayer.diff import DiffReport, Excerpt

HEX_FLOAT = re.compile(r"-?0x[01]\.[0-9a-f]+p[+-]\d+")
SHOWN_OF_A_STAGE, SHOWN_CHANGES = 3, 5
REFUTED_BY = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def report_of_diff(left: "Record", right: "Record", report: "DiffReport", show_all: bool) -> Report:
    """Return the first difference and its cause, the stages of its step, and the settings."""
    rows = rows_of_rest(left, right, report)
    tables = tables_of(report.set_differently, ("what", "A", "B"))
    if report.first is None or report.verdict is None:
        return Report("Same", sentence_of(report), "good", [*tables, Facts(rows)])
    rows.append(Row("refuted if", REFUTED_BY[report.verdict.cause]))
    stages = Facts(rows_of_stages(report, show_all), f"Stages of step {report.step}")
    blocks: list[Block] = [Facts(rows_of_place(left, right, report)), stages, *tables, Facts(rows)]
    return Report("Different", sentence_of(report), "bad", blocks, notes_of(report))


def sentence_of(report: "DiffReport") -> str:
    """Return whether the records are the same; if not, where they diverge first."""
    if report.first is None:
        what = "all that is known of both is" if report.not_known else "all"
        how = " by their recorded checksums" if report.by_checksums else ""
        return f"{count(report.num_compared, 'step')} compared{how}, {what} bit-identical."
    place = f"the records diverge first in step {report.step}, stage {report.first.stage}"
    return f"{place}. {report.num_compared} of {report.num_shared} common steps compared"


def notes_of(report: "DiffReport") -> list[str]:
    return [] if report.unrelated is None else [f"unrelated runs: {report.unrelated}"]


def rows_of_place(left: "Record", right: "Record", report: "DiffReport") -> list[Row]:
    """Return the cause of the first difference, its place and values, and where to look at it."""
    first, step, verdict = report.first, report.step, report.verdict
    if first is None or step is None or verdict is None:
        return []
    rows = [Row("cause", f"{verdict.cause}: {verdict.why}"), Row("first", describe(first))]
    if (place := first.place) is not None:
        at = (step, place.prompt_id, place.sample_id, place.token)
        rows.append(Row("look", view_command(left.path, *at, compare=right.path), is_code=True))
    return rows + rows_of_text(excerpts_of(left, right, step, first))


def excerpts_of(
    left: "Record", right: "Record", step: int, difference: "StageDifference"
) -> "tuple[Excerpt, Excerpt] | None":
    """Return the text around a difference in A and in B, None if it is not at a token of both."""
    from replayer.diff import read_excerpts

    def load_decode() -> Callable[[list[int]], str]:
        return load_decoder(left) or (lambda ids: " ".join(map(str, ids)))

    return read_excerpts(left, right, step, difference, load_decode)


def rows_of_text(sides: "tuple[Excerpt, Excerpt] | None") -> list[Row]:
    """Return the text around a difference in A and in B, its token between brackets."""
    rows: list[Row] = []
    for name, side in zip("AB", sides or (), strict=False):
        before, token, after = (repr(part)[1:-1] for part in (side.before, side.token, side.after))
        rows.append(Row("" if rows else "text", f"{name}  {before}[{token}]{after}", is_code=True))
    return rows


def describe(difference: "StageDifference", sides: tuple[str, str] = ("in A", "in B")) -> str:
    """Describe one difference: name, location, both values, and how many elements differ."""
    words = [difference.name]
    if difference.minibatch is not None:
        words.append(f"minibatch {difference.minibatch}")
    if (place := difference.place) is not None:
        words.append(
            f"rank {place.rank}, row {place.row} (prompt {place.prompt_id}, sample {place.sample_id})"
        )
        if place.token is not None:
            words.append(f"token {place.token}")
    values = f"{show(difference.left)} {sides[0]}, {show(difference.right)} {sides[1]}"
    text, largest = f"{', '.join(words)}: {values}", difference.largest
    if difference.num_compared <= 1:
        return text
    by = "" if largest is None else f", by at most {format_number(largest)}"
    return f"{text}; {difference.num_different:,} of {difference.num_compared:,} differ{by}"


def show(value: object) -> str:
    """Format a value of a difference: floats with the digits that float32 has."""
    return f"{value:.9g}" if isinstance(value, float) else format_value(value)


def format_value(value: Any) -> str:
    """Format a recorded value: hex floats as decimals with their bits, None as "absent"."""
    if isinstance(value, str) and HEX_FLOAT.fullmatch(value):
        return f"{float.fromhex(value):.9g} ({value})"
    return "absent" if value is None else str(value)


def rows_of_stages(report: "DiffReport", show_all: bool) -> list[Row]:
    from replayer.compare.stages import STAGES

    rows = []
    for stage in STAGES:
        found = [describe(difference) for difference in report.differences if difference.stage == stage]
        if not found:
            is_same = stage not in report.not_compared
            rows.append(Row(stage, "same" if is_same else "not recorded", "good" if is_same else ""))
        shown = found if show_all else found[:SHOWN_OF_A_STAGE]
        rows += rows_of(stage, [f"differs  {text}" for text in shown], "bad")
        if len(found) > len(shown):
            rows.append(Row("", f"... and {len(found) - len(shown)} more: --all lists them"))
    return rows


def tables_of(found: "HeaderComparison", headings: tuple[str, str, str]) -> list[Table]:
    """Return a table each of options, environment and model files that differ."""
    titles = {
        "Set differently in the config": found.config,
        "Different environment": found.environment,
        "Different model files": found.model,
    }
    return [difference_table(title, items, headings) for title, items in titles.items() if items]


def difference_table(
    title: str, differences: "Sequence[Difference]", headings: tuple[str, str, str], limit: int = 20
) -> Table:
    """Return a table of two values each: `limit` rows, and a count of the rest."""
    rows = [[d.where, format_value(d.recorded), format_value(d.current)] for d in differences[:limit]]
    more = f"... and {len(differences) - limit} more" if len(differences) > limit else ""
    return Table(headings, rows, title, more)


def rows_of_rest(left: "Record", right: "Record", report: "DiffReport") -> list[Row]:
    """Return what was not compared: values that are not known, stages, steps of one side."""
    is_ours = not (left.header.trainer or right.header.trainer)
    hint = "; debug.dump_scope=full records all stages" if is_ours else ""
    lacks = f"not recorded on both sides: {', '.join(report.not_compared)}{hint}"
    return [
        *([Row("not known", f"so not compared: {'; '.join(report.not_known)}")] if report.not_known else []),
        *([Row("not recorded", lacks)] if report.not_compared else []),
        *(
            Row(f"only in {name}", f"{count(len(steps), 'step')} from {steps[0]} to {steps[-1]}")
            for name, steps in (("A", report.only_left), ("B", report.only_right))
            if steps
        ),
    ]


def report_of_first_step(
    found: "FirstStep",
    left: "Record",
    right: "Record",
    diff: "DiffReport | None",
    traced: "LayersReport | None",
) -> Report:
    """Return the step after which the weights diverge, its first difference, its first layer."""
    read = f"{found.num_read} of {found.num_steps:,} steps read, no step was replayed"
    if found.step is None:
        return Report(f"The weights never differ up to step {found.last_same}. {read}", "", "good")
    before = f"they were the same after step {found.last_same}"
    if found.last_same is None:
        before = "it is the first step that both records have"
    rows, notes = [], []
    if diff is not None:
        notes = [f"{'Same' if diff.same else 'Different'}: {sentence_of(diff)}", *notes_of(diff)]
        every = ["areal-debug", "why", str(left.path), str(right.path), "--all", "--step", str(found.step)]
        rows = [*rows_of_place(left, right, diff), Row("all stages", shlex.join(every), is_code=True)]
    rows += [] if traced is None else rows_of_layers(traced)
    verdict = f"The weights differ after step {found.step}; {before}. {read}"
    return Report(verdict, "", "bad", [Facts(rows)], notes)


def rows_of_layers(report: "LayersReport") -> list[Row]:
    """Return the first layer that differs when the step is replayed."""
    rows = [
        Row("note", f"{side} ran with the current code: its own commit cannot be used here", "unsure")
        for side in report.with_current_code
    ]
    if report.name is None:
        same = f"all {report.num_calls} layer calls agree when step {report.step} is replayed here from both records"
        return [
            *rows,
            Row("layers", f"{same}: not explained by a layer: the cause is outside of the model"),
        ]
    why = "its input differs already" if report.input_differs else "its input is the same"
    call = f"{report.name} (call {report.index:,} of {report.num_calls:,}, rank {report.rank})"
    rows.append(Row("layers", f"the first call that differs is {call}; {why}"))
    return rows + ([Row("", f"{report.kind}, {report.file}:{report.line}")] if report.file else [])


def report_of_culprit(report: "BisectReport") -> Report:
    """Return the commit that changed the numbers, or those of which it is one, and its changes."""
    found, num = report.culprits[-1], len(report.culprits)
    verdict, sentence = f"{found.hash[:10]} changed the numbers", found.subject
    commits = [f"{found.author}, {found.date}"]
    if num > 1:
        verdict = f"One of {num} commits changed the numbers; those before the last could not be replayed"
        sentence, commits = "", [f"{commit.hash[:10]}  {commit.subject}" for commit in report.culprits]
    changes = [
        [change.where, *("recorded" if v is None else format_value(v) for v in (change.good, change.bad))]
        for change in report.changes[:SHOWN_CHANGES]
    ]
    rest = [
        *rows_of("files", report.files.splitlines()),
        Row("searched", f"{report.num_replays} replays for {report.num_commits} commits"),
        Row("next", f"git show {found.hash[:10]}", is_code=True),
    ]
    title = f"First in step {report.step}, {len(report.changes)} values ('recorded' as in the record)"
    blocks: list[Block] = [Facts(rows_of("commit", commits)), Table(("value", "good", "bad"), changes, title)]
    return Report(verdict, sentence, "bad", [*blocks, Facts(rest)])
