"""What a replay says: what was set differently, its guarantee, one line per step, a verdict.

After a change of options, recorded and replayed statistics follow as curves and means; with
`--explain`, the samples of a step by their share of its gradient.
"""

import math
import shlex
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_core.telemetry.loggers import GRAD_NORM, LOSS, summary_columns
from areal_debug.diff.report import describe, format_value, tables_of
from areal_debug.render import count, format_number, note, sparkline, styled
from areal_debug.replay.ranks import SUMMATIONS
from areal_debug.report.links import view_command
from areal_debug.report.model import Block, Facts, Finding, Level, Report, Row, Table, rows_of
from areal_debug.report.terminal import print_block, print_rows
from recorder import Record
from recorder.difference import Difference
from replayer.check import ReplayReport, StepResult
from replayer.crosscheck.layouts import NO_COUNT
from replayer.own_code import code_arguments
from replayer.request import Request

SHOWN_OF_A_KIND = 2
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

NOT_AS_GLOO = (
    "If the recorded number of ranks gives the bits, the emulation of gloo does not: record with "
    "debug.reduction=fixed, whose sums any divisor repeats."
)

EXPLAIN_SHOWN = 10
EXPLAIN_HEADINGS = (
    *("rank>", "row>", "prompt>", "sample>", "minibatch>", "reward>", "advantage>", "tokens>", "loss>"),
    *("of loss>", "of gradient>", "own norm>"),
)

# Listed first; the rest follows by how much it changed.
FIRST_STATISTICS = (
    "ppo_actor/task_reward/avg",
    *LOSS,
    *GRAD_NORM,
    "dpo/reward_accuracy/avg",
    "rw/correct_ratio/avg",
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
    if report.own_code:
        print_rows(out, rows_of("own code", list(map(str, report.own_code))), "")
    for table in tables_of(header, ("what", "recorded", "now")):
        print_block(out, table)
        out.print()
    if report.guarantee.kind == "changed":
        changes = "; ".join(report.guarantee.reasons)
        out.print(styled("You changed {}, so the numbers will differ.\n", changes))
    elif report.guarantee.kind != "bitwise":
        out.print(styled("[bold]Expect[/bold] {}:", TEXTS["expected"][report.guarantee.kind]))
        print_rows(out, rows_of("because", report.guarantee.reasons), "  ")
        out.print()


def print_step(out: Console, result: StepResult, in_detail: bool = False) -> None:
    """Print one line, and below it the first differences of each kind if `in_detail`."""
    status, style = status_of(result)
    numbers = "  ".join(compared_columns(result))
    missing = "; ".join(warning.partition(":")[0] for warning in result.warnings)
    line = styled(f"step {{:>4}}  [{style}]{{:<23}}[/{style}]  {{}}", result.step, status, numbers)
    out.print(styled("{}  [yellow]{}[/yellow]", line, missing) if missing else line)
    if not in_detail:
        return
    differences = result.differences
    of_kinds = ([d for d in differences if d.kind == kind] for kind in ("loss", "stat", "parameter"))
    shown = [
        f"{d.kind} {d.where}{f' (rank {d.rank})' * (d.kind == 'loss')}: "
        f"recorded {format_value(d.recorded)}, replayed {format_value(d.replayed)}"
        for same in of_kinds
        for d in same[:SHOWN_OF_A_KIND]
    ]
    more = [f"... and {len(differences) - len(shown)} more"] * (len(differences) > len(shown))
    of = f"{len(differences)} of {result.num_compared} values differ"
    for text in (f"{of}; {result.num_parameters} parameter checksums", *shown, *more):
        out.print(styled("           {}", text))


def status_of(result: StepResult) -> tuple[str, str]:
    """Return how a step compares with its record, and a style."""
    if result.identical:
        return "identical", "green"
    if not result.num_compared:
        return "not recorded", "dim"
    return ("same weights", "yellow") if result.same_weights else ("weights differ after it", "bold")


def compared_columns(result: StepResult) -> list[str]:
    recorded = summary_columns(result.recorded)
    return [
        f"{column} {number}"
        + (f" (recorded {recorded[column]})" if recorded.get(column, number) != number else "")
        for column, number in summary_columns(result.replayed).items()
    ]


def report_of(report: ReplayReport, request: Request) -> Report:
    """Return whether the replay met its guarantee, where it diverged first, and what to do next."""
    rows = rows_of_warnings(report)
    if request.virtual:
        rows.append(
            Row("ranks", f"fewer processes, each recorded rank's share: {SUMMATIONS[request.virtual]}")
        )
        if request.virtual == "gloo" and report.result not in ("identical", "not comparable"):
            rows.append(Row("note", NOT_AS_GLOO))
    if report.result == "not comparable":
        rows.append(
            Row("next", "`--output FOLDER` records what comes out, and that record replays bit by bit.")
        )
    elif report.result != "identical":
        rows += rows_of_distance(report) + rows_of_first(report)
        if report.guarantee.kind in ("bitwise", "changed"):
            rows.append(Row("cause", reason_of(report)))
        rows += [row._replace(is_code=True) for row in rows_of("next", next_commands(report, request))]
    return Report(*verdict_of(report), [Facts(rows)])


def verdict_of(report: ReplayReport) -> tuple[str, str, Level]:
    num, verdict = len(report.steps), report.verdict
    is_noisy = report.guarantee.kind in ("noise", "statistical")
    if report.result == "not comparable":
        return "Nothing to compare", f"{count(num, 'step')} trained on recorded rollouts.", "unsure"
    if report.result == "identical":
        same = "every loss, gradient norm, statistic and parameter checksum has the recorded bits."
        return "Bit-identical", f"{num} of {count(num, 'step')}: {same}", "good"
    differs = difference_of(report)
    if verdict is None or (is_noisy and verdict.finding == "unclear"):
        return "Inconclusive", differs, "unsure"
    if is_noisy:
        is_within = verdict.finding == "within"
        return (f"Within {unit_of(report)}", differs, "good") if is_within else ("Different", differs, "bad")
    name, _, evidence = differs.partition(": ")
    return name, evidence, "unsure" if report.weights_diverge_at is None else "bad"


def difference_of(report: ReplayReport) -> str:
    """Return what differs from the record, whatever the guarantee: weights, or only numbers."""
    first = report.first_different
    assert first is not None
    num_different = sum(not result.identical for result in report.steps)
    kinds = ", ".join(sorted({difference.kind for difference in first.differences}))
    where = f"{num_different} of {len(report.steps)} steps have other numbers, the first is step {first.step} ({kinds})"
    if report.weights_diverge_at is not None:
        at, start = report.weights_diverge_at, report.started_at
        if start is not None and start < at == report.steps[0].step:
            ran = f"the replay began at step {start} and compares from step {at} on"
            return f"Weights diverge at step {at} or before: {ran}; {where}."
        return f"Weights diverge at step {at}: {where}."
    return f"Same weights, other numbers: {where}; after every step all {first.num_parameters} parameters have the recorded bits."


def rows_of_first(report: ReplayReport) -> list[Row]:
    """Return the first stage that differs, its place, and the pattern of its values."""
    first, step = report.first, report.first_different
    if first is None or step is None:
        return []
    place = f"step {step.step}, stage {first.stage}: {describe(first, ('recorded', 'replayed'))}"
    return [Row("first", place), *([Row("pattern", report.pattern)] if report.pattern is not None else [])]


def rows_of_warnings(report: ReplayReport) -> list[Row]:
    """Return what the first step with a warning did not learn, and how many steps have one."""
    steps = [result for result in report.steps if result.warnings]
    if not steps:
        return []
    many = f"{len(steps)} of {len(report.steps)} steps learn less than the options say"
    return [Row("warning", f"{many}; in step {steps[0].step}: {'; '.join(steps[0].warnings)}.", "unsure")]


def unit_of(report: ReplayReport) -> str:
    """Return what differences that are not of bits are measured in."""
    return "the noise floor" if report.guarantee.kind == "noise" else "the standard error over steps"


def rows_of_distance(report: ReplayReport) -> list[Row]:
    """Return the largest difference, and what follows from its size."""
    verdict, kind = report.verdict, report.guarantee.kind
    if verdict is None:
        how = "`areal-debug replay` measures this machine's noise floor and compares."
        return [Row("note", f"A difference is allowed here, see above. {how}")]
    if kind not in ("noise", "statistical"):
        return []
    if verdict.k is None:
        return [Row("note", "Too few values could be compared: replay more steps.")]
    at = f" in step {verdict.step}" if verdict.step is not None else ""
    notes = {
        "within": f"A defect smaller than that cannot be excluded; the guarantee is {kind}, not bitwise.",
        "unclear": "This is above the noise floor and below what a defect usually causes: replay on the "
        "recorded machine.",
    }
    rows = [Row("largest", f"{verdict.k:.3g} x {unit_of(report)}: {verdict.where}{at}.")]
    return rows + ([Row("note", notes[verdict.finding])] if verdict.finding in notes else [])


def reason_of(report: ReplayReport) -> str:
    header = report.set_differently
    if changed := [str(own) for own in report.own_code if own.changed]:
        return f"{'; '.join(changed)}."
    if report.guarantee.kind == "changed" or (header is not None and (header.config or header.model)):
        return "What was set differently, see above."
    if code_difference(report, "commit") or code_difference(report, "dirty_sha256"):
        return "Only the trainer's code is not that of the record, see above."
    return (
        "Not explained: config, model files, commit and uncommitted files, libraries, variables and device were "
        "compared, and none of them differs."
    )


def report_of_explanation(record: Record, found: dict[str, Any]) -> Report:
    """Return the samples of a step by gradient, and the text of the first one."""
    samples, step = found["samples"], found["step"]
    first, left_out = samples[0], len(samples) - EXPLAIN_SHOWN
    norms = ", ".join(format_number(norm) for norm in found["grad_norms"])
    rows = []
    if left_out > 0:
        rows.append(Row("left out", f"{left_out} with smaller gradients; --json has all of them"))
    place: tuple[Any, ...] = ()
    if found["broken_by"] is None:
        place = first["prompt_id"], first["sample_id"]
    if place and (text := record.step(step).text(first["rank"])) is not None:
        line = next(line for line in text if line["row"] == first["row"])
        rows += [Row(name, repr(line[name])) for name in ("prompt", "completion")]
    look = view_command(record.path, step, *place)
    shares = "Shares of a minibatch's gradient sum to 100 %; a negative share opposes it."
    rows += [Row("shares", shares, "dim"), Row("next", look, is_code=True)]
    differs = "The replay up to this step differs from the record: shares are those of the replay."
    return Report(
        f"Step {step}",
        f"{len(samples)} samples, gradient norm {norms} (by minibatch). {verdict_on(found)}",
        "",
        [explain_table(samples[:EXPLAIN_SHOWN]), Facts(rows)],
        [] if found["faithful"] else [differs],
    )


def report_of_anatomy(record: Record, found: dict[str, Any]) -> Report:
    """Return what is wrong with terms of a step's loss, and each part's share of its gradient."""
    faults = [remark for remark in found["remarks"] if remark["kind"] in ("dead", "outside")]
    findings: list[Block] = []
    for remark in found["remarks"]:
        title, level, todo = TEXTS["remarks"][remark["kind"]]
        at = ", ".join(map(str, remark["minibatches"]))
        rows = [Row("evidence", f"{remark['evidence']} (minibatch {at})"), Row("next", todo)]
        id = f"{remark['kind']}:{remark['part']}"
        findings.append(Finding(id, title.format(remark["part"]), level, rows))
    tables = [parts_table(found["parts"], kind, title) for kind, title in PART_KINDS.items()]
    explained = report_of_explanation(record, found)
    sentence = "; ".join(TEXTS["remarks"][r["kind"]][0].format(r["part"]) for r in faults) or (
        "every term with a loss has a gradient, and none acts outside of the mask"
    )
    absent = [Row("absent" if i == 0 else "", text) for i, text in enumerate(found["absent"])]
    return Report(
        f"Step {found['step']}",
        f"{sentence}. Gradient norm {', '.join(map(format_number, found['grad_norms']))} (by minibatch).",
        "bad" if faults else "good",
        [*findings, *(table for table in tables if table.rows), Facts(absent), *explained.blocks],
        explained.notes,
    )


def report_of_layouts(record: Record, found: dict[str, Any]) -> Report:
    """Return the numbers of a step that depend on its layout, with the factor between them."""
    rows, variants = [], found["variants"]
    for one in variants:
        place = ["" if one["minibatch"] is None else str(one["minibatch"]), one["layout"], one["what"]]
        rows.append([*place, format_number(one["expected"]), format_number(one["found"]), one["named"]])
    sentence = f"does not depend on its layout: its numbers are equal in {', '.join(found['layouts'])}."
    if variants:
        first = min(variants, key=lambda one: one["named"].startswith(NO_COUNT))
        sentence = f"depends on its layout: {first['what']}, {first['layout']}: {first['named']}."
    return Report(
        f"Step {found['step']}",
        sentence,
        "bad" if variants else "good",
        [Table(("minibatch>", "layout", "number", "whole>", "here>", "factor"), rows)] if rows else [],
        ["The replay up to this step differs from the record."] * (not found["faithful"]),
    )


EXAMINED = {"explain": report_of_explanation, "anatomy": report_of_anatomy, "layouts": report_of_layouts}
PART_KINDS = {"term": "Terms of the loss", "class": "Classes of token", "turn": "Turns"}


def parts_table(parts: list[dict[str, Any]], kind: str, title: str) -> Table:
    """Return the parts of one kind; a direction is the cosine to another part's gradient."""
    chosen = [part for part in parts if part["kind"] == kind]
    names = list(dict.fromkeys(part["name"] for part in chosen))
    rows = []
    for part in chosen:
        norm = f"{part['gradient_norm']:.3g}{' x' if math.isfinite(part['gradient_share']) else ''}"
        numbers = [str(part["num_tokens"]), percent(part["gradient_share"]), norm]
        loss = [format_number(part["value"])] if kind == "term" else []
        angles = [f"{part['cosines'][name]:.2f}" if name in part["cosines"] else "" for name in names]
        rows.append([part["name"], str(part["minibatch"]), *loss, *numbers, *angles])
    headings = (kind, "minibatch>", *(["loss>"] if kind == "term" else []), "tokens>", "of gradient>")
    return Table((*headings, "own norm>", *(f"to {name}>" for name in names)), rows, title)


def verdict_on(found: dict[str, Any]) -> str:
    """Name the sample with the largest gradient, and why others have none, or no finite one."""
    samples, update = found["samples"], found["broken_by"]
    first, num = samples[0], len(samples)
    place = f"(prompt {first['prompt_id']}, sample {first['sample_id']})"
    name = f"rank {first['rank']}, row {first['row']} {place}"
    if broken := sum(sample["stage"] is not None for sample in samples):
        many = f"{broken} of {num} samples have a value that is not finite, so the update is not taken"
        if update is not None:
            rate = f"learning rate {found['learning_rates'][update]:g}"
            whole = f"Up to minibatch {update} every sample is finite, after it none is ({broken} of {num})"
            return f"{whole}: its update broke the weights ({rate}). No single sample is to blame."
        return f"{many}; the earliest is in {name}: {first['why']}."
    zero = [sample for sample in samples if sample["gradient_norm"] == 0]
    reasons = "; ".join(f"{n} x {why}" for why, n in Counter(sample["why"] for sample in zero).most_common())
    if len(zero) == num:
        return f"Every sample's gradient is 0, so nothing is learned: {reasons}."
    gradient, loss = percent(first["gradient_share"]), percent(first["loss_share"])
    none = f" {len(zero)} of {num} samples have none: {reasons}." if zero else ""
    return f"The largest gradient is that of {name}: {gradient} of the minibatch's gradient, {loss} of its loss.{none}"


def percent(share: float) -> str:
    """Write a share; a dash if there is none."""
    return f"{100 * share:.3g} %" if math.isfinite(share) else "-"


def explain_table(samples: list[dict[str, Any]]) -> Table:
    rows = []
    for s in samples:
        names = (s["rank"], s["row"], s["prompt_id"], s["sample_id"], s["minibatch"])
        numbers = (s["reward"], s["advantage"], s["num_trained_tokens"], s["loss"])
        norm = f"{s['gradient_norm']:.3g}{' x' if math.isfinite(s['gradient_share']) else ''}"
        shares = (percent(s["loss_share"]), percent(s["gradient_share"]))
        rows.append([*map(str, names), *map(format_number, numbers), *shares, norm, s["why"]])
    return Table((*EXPLAIN_HEADINGS, "why" if any(s["why"] for s in samples) else ""), rows)


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
    curves = []
    for name in names:
        if not name.endswith(("__count", "/min", "/max")):
            both = [step for step in report.steps if name in step.recorded and name in step.replayed]
            values = zip(*((step.recorded[name], step.replayed[name]) for step in both), strict=True)
            curves.append(Curve(name, *values))
    order = {name: position for position, name in enumerate(FIRST_STATISTICS)}
    return sorted(curves, key=lambda c: (order[c.name] if c.name in order else len(order), -c.moved, c.name))


def report_of_comparison(report: ReplayReport) -> Report:
    """Return the statistics that changed, recorded and replayed."""
    if report.first_different is None:
        return Report("Nothing changed", f"all {len(report.steps)} steps have the recorded bits.", "")
    curves = curves_of(report)
    moved = [c for c in curves if c.moved > 0]
    same = f"{len(curves) - len(moved)} statistics did not change. The record was not modified."
    rows = [Row("unchanged", same, "dim")]
    if (left_out := len(moved) - WHATIF_SHOWN) > 0:
        rows.insert(0, Row("left out", f"{left_out} statistics that changed less; --json lists all of them"))
    headings = ("statistic", "recorded", "replayed", "mean recorded>", "mean replayed>", "change of means>")
    table = Table(headings, [whatif_cells(c) for c in moved[:WHATIF_SHOWN]])
    blocks: list[Block] = [Facts(rows_of_first(report) + rows_of_warnings(report)), table, Facts(rows)]
    compared = f"Recorded against replayed over {count(len(report.steps), 'step')}. {difference_of(report)}"
    verdict, _, evidence = compared.partition(": ")
    return Report(verdict, evidence, "", blocks)


def whatif_cells(item: Curve) -> list[str]:
    """Return a row of the table: curves on one scale, means, and their relative change."""
    means = [sum(values) / len(values) for values in (item.recorded, item.replayed)]
    bars = sparkline([*item.recorded, *item.replayed], width=2 * min(CURVE_WIDTH, len(item.recorded)))
    moved = (means[1] - means[0]) / abs(means[0]) if means[0] else math.inf
    change = "from 0" if means[0] == 0 else f"{100 * moved:+.3g} %" if moved <= 10 else "> 1000 %"
    half = len(bars) // 2
    return [item.name, bars[:half], bars[half:], *map(format_number, means), change]


def next_commands(report: ReplayReport, request: Request) -> list[str]:
    """Return the commands to run next, none if nothing is to be explained.

    They name the record as the request does, so they work in the folder in which it worked.
    """
    first, kind = report.first_different, report.guarantee.kind
    is_within = report.verdict is not None and report.verdict.finding == "within"
    if first is None or is_within or kind in ("changed", "unrecorded"):
        return []
    model = [] if request.model is None else ["--model", request.model]
    model += code_arguments([own.file for own in report.own_code])
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
