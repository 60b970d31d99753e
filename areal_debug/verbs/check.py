"""`areal-debug check`: that a run is deterministic, or that a model trains on its own log-probs."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_debug.cli import Verb, VerbGroup, json_option, nproc_option
from areal_debug.render import (
    announce,
    count,
    fail,
    format_number,
    format_seconds,
    is_quiet,
    print_log_end,
    read_report,
)
from areal_debug.report.model import Block, Cell, Facts, Level, Report, Row, Table, rows_of

if TYPE_CHECKING:
    from replayer.preflight.repeats import ParameterNoise, PreflightReport

MODULES = ("replayer.preflight.real_steps", "transformers.models.llama.modeling_llama")
STEPS, RUNS = 2, 2
DTYPES = ("bfloat16", "float32", "float16")
THOROUGH_STEPS, THOROUGH_RUNS = 4, 8
LEVELS: dict[str, Level] = {"ok": "good", "note": "unsure", "problem": "bad"}
SHOWN = 12
NOISE_HEADINGS = (
    *("parameter", "weights that differ>", "largest weight diff>", "largest gradient diff>", "relative>"),
)


@click.group(
    cls=VerbGroup,
    example="areal-debug check run --config my.yaml\nareal-debug check model Qwen/Qwen2.5-0.5B-Instruct",
)
def command() -> None:
    """Check before a run starts that it is deterministic, and that its model can be trained."""


@command.command(
    cls=Verb,
    context_settings={"ignore_unknown_options": True},
    short_help="Check that a run is deterministic before it starts",
    example="areal-debug check run --config my.yaml",
)
@click.option("--config", "config_file", type=click.Path(), required=True, help="YAML file of the run.")
@click.option("--script", type=click.Path(path_type=Path), hidden=True)  # was read before 0.3
@nproc_option
@click.option(
    "--thorough",
    is_flag=True,
    help=f"{THOROUGH_RUNS} runs of {THOROUGH_STEPS} steps, instead of {RUNS} runs of {STEPS}.",
)
@click.option("--runs", type=click.IntRange(2), help="Number of runs, each in new processes.")
@click.option("--steps", type=click.IntRange(1), help="Number of steps of a run.")
@click.option("--as-is", is_flag=True, help="Use this shell's environment, not the one that `train` sets.")
@json_option
@click.argument("inputs", nargs=-1, type=click.UNPROCESSED, metavar="[RECORD] [OPTION=VALUE]...")
def run(
    config_file: str,
    script: Path | None,
    nproc: int | None,
    thorough: bool,
    runs: int | None,
    steps: int | None,
    as_is: bool,
    as_json: bool,
    inputs: tuple[str, ...],
) -> None:
    """Check the settings that can change bits, repeat real steps of the configured run in other
    processes, and compare every bit.

    RECORD, of an earlier run, adds a check of the order of its rows. OPTION=VALUE changes an option
    of the config: actor.path=model.

    Exit code 0: no problem, equal bits. 1: a problem, or different bits; then with the noise floor
    per parameter.
    """
    from areal_debug.report.terminal import answer
    from recorder import open_record
    from replayer.preflight.settings import order_of_record

    records = [text for text in inputs if "=" not in text]
    if len(records) > 1:
        raise ValueError(f"expected one RECORD and overrides OPTION=VALUE, got {' '.join(records)}")
    arguments = ["--config", config_file, *(text for text in inputs if "=" in text)]
    num_ranks = nproc or ranks_of(arguments)
    of_record = tuple(order_of_record(open_record(record)) for record in records)
    repeats = Repeats(
        arguments,
        num_ranks,
        steps or (THOROUGH_STEPS if thorough else STEPS),
        runs or (THOROUGH_RUNS if thorough else RUNS),
        as_is,
    )
    announce(
        f"running {count(repeats.num_steps, 'step')} {repeats.num_runs} times on {count(num_ranks, 'rank')}"
    )
    with tempfile.TemporaryDirectory() as folder:
        report = repeat_steps(Path(folder), repeats)
    report = replace(report, findings=report.findings + of_record)
    answer(report.to_dict(), determinism_report(report), as_json)


def ranks_of(arguments: list[str]) -> int:
    """Return the number of the trainer's ranks by the config's allocation. Raises ConfigError."""
    from areal_core.config import PPOConfig, load_expr_config

    train = load_expr_config(arguments, PPOConfig)[0].allocation.train
    if train is None:
        raise ValueError("the allocation has no training part, so there is no step to run")
    return train.world_size


@dataclass(frozen=True)
class Repeats:
    """How to repeat the steps: on how many ranks, how often, and in which environment."""

    arguments: list[str]
    num_ranks: int
    num_steps: int
    num_runs: int
    as_is: bool

    def run(self, folder: Path, keep: Sequence[str] = ()) -> Path:
        """Run the steps once, by a new interpreter; their output goes to the folder.

        The ranks of one run are its forks. Those of two runs have other layouts of memory.
        """
        from areal_core.environment import DETERMINISTIC
        from areal_core.launch.warm import warm_ranks
        from areal_debug.replay.ranks import task

        folder.mkdir()
        arguments = {"num_steps": self.num_steps, "keep": list(keep), "config": self.arguments}
        asked = task("preflight", folder=str(folder), **arguments)
        log = folder / "ranks.log"
        with warm_ranks({} if self.as_is else DETERMINISTIC, MODULES) as ranks:
            code = ranks.run(asked, self.num_ranks, {}, log, echo=not is_quiet())
        if code != 0:
            if is_quiet():
                print_log_end(log)
            fail(
                f"the step could not be run: the ranks ended with exit code {code}; their output is above",
                code,
            )
        return folder


def repeat_steps(folder: Path, repeats: Repeats) -> "PreflightReport":
    """Repeat the steps in separate processes and compare.

    If bits differ, two more repeats keep the values, to measure the noise floor.
    """
    from replayer.preflight.repeats import PreflightReport, compare_repeats, measure_noise, read_repeat

    first, *runs = [repeats.run(folder / f"run-{number}") for number in range(repeats.num_runs)]
    compared = [compare_repeats(first, run) for run in runs]
    differing = next((comparison for comparison in compared if not comparison.identical), None)
    noise: tuple[ParameterNoise, ...] = ()
    if differing is not None and (names := [difference.where for difference in differing.parameters]):
        shorter = replace(repeats, num_steps=differing.step + 1)
        noise = measure_noise(*(shorter.run(folder / name, names) for name in ("left", "right")))
    return PreflightReport(
        read_repeat(first)[1],
        (differing or compared[0]).num_compared,
        () if differing is None else differing.differences,
        noise,
        repeats.num_steps,
        repeats.num_runs,
        None if differing is None else differing.step,
    )


def determinism_report(report: "PreflightReport") -> Report:
    """Return the verdict, the findings, and the noise floor if bits differ."""
    runs = f"{report.num_runs} runs of {count(report.num_steps, 'step')}"
    problems, notes = len(report.problems), []
    if report.identical and not problems:
        verdict, sentence = "Deterministic", f"{runs} are bit-identical."
        missed = 100 * 0.5 ** (report.num_runs - 1)
        notes = [f"A difference in every second run would have been missed in {missed:.2g} %."]
    elif report.identical:
        found = f"{count(problems, 'problem')} below can make others differ."
        verdict, sentence = "Not safe", f"{runs} are bit-identical, but {found}"
    else:
        values = f"{len(report.differences)} of {report.num_compared} values"
        verdict, sentence = "Not deterministic", f"of {runs}, step {report.step} differs in {values}."
    rows = [
        (Cell(finding.status, LEVELS[finding.status]), finding.check, finding.seen, finding.next_step)
        for finding in report.findings
    ]
    blocks: list[Block] = [Table(("", "", "", ""), rows)]
    if report.noise:
        more = len(report.noise) - SHOWN
        left_out = f"... and {more} parameters with less noise; --json lists all of them" if more > 0 else ""
        title = "Noise floor of this machine in one step"
        blocks.append(Table(NOISE_HEADINGS, [*map(noise_cells, report.noise[:SHOWN])], title, left_out))
    is_good = report.identical and not problems
    return Report(verdict, sentence, "good" if is_good else "bad", blocks, notes)


def noise_cells(noise: "ParameterNoise") -> list[str]:
    return [
        noise.name,
        f"{noise.num_different:,} of {noise.num_elements:,}",
        format_number(noise.weight),
        format_number(noise.gradient),
        f"{100 * noise.gradient_share:.2g} %",
    ]


@command.command(
    cls=Verb,
    short_help="Check that training computes a model's own log-probs",
    example="areal-debug check model Qwen/Qwen2.5-0.5B-Instruct --dtype float32",
)
@click.argument("model", type=click.Path())
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="bfloat16",
    show_default=True,
    help="Dtype of the computation.",
)
@click.option(
    "--allocation",
    default="fsdp:d1",
    show_default=True,
    help="Ranks of this machine that share the model: fsdp:d2, fsdp:c2, fsdp:t2.",
)
@json_option
def model(model: str, dtype: str, allocation: str, as_json: bool) -> None:
    """Compare the log-probs that training computes for a model with those of its own forward.

    A few rows of random tokens are computed as training does, packed and on the given ranks, and
    one at a time by the model's class in Transformers. `train` does the same before its first step,
    unless `actor.parity_check` is false.

    Exit code 0: equal within rounding. 1: different; training would refuse the model. 2: the model
    cannot be loaded or split.
    """
    from areal_core.config.allocation import parse_allocation
    from areal_debug.installation import require
    from areal_debug.report.terminal import answer

    require("transformers")
    train = parse_allocation(allocation).train
    if train is None:
        raise ValueError(f"--allocation {allocation!r} has no training part: give one such as fsdp:d2")
    sizes = {"context": train.context, "tensor": train.tensor}
    announce(f"checking {model} as {train}")
    report = measure_on_ranks(model, dtype, sizes, train.world_size)
    answer(report | {"allocation": str(train)}, parity_report(model, str(train), report), as_json)


def measure_on_ranks(model: str, dtype: str, sizes: dict[str, int], num_ranks: int) -> dict[str, Any]:
    """Measure the parity of a model on ranks and return the report of rank 0.

    Ends the command with the ranks' exit code if they fail.
    """
    from areal_core.launch.torchrun import run_ranks
    from areal_debug.render import REPORT_FILE
    from areal_debug.replay.ranks import task

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        asked = task("parity", model=model, dtype=dtype, **sizes)
        code = run_ranks(asked, num_ranks, {REPORT_FILE: str(file)}, Path(folder), echo=not is_quiet())
        if code != 0 or not file.exists():
            if is_quiet():
                print_log_end(Path(folder) / "trainer.log")
            fail(f"the model could not be checked: the ranks ended with exit code {code}", code or 1)
        return read_report(file)


def parity_report(model: str, allocation: str, report: dict[str, Any]) -> Report:
    subject = f"{model} ({report['model_type']}) in {report['dtype']} on {allocation}"
    packing = "packed" if report["packs_rows"] else "computed one at a time"
    rows = [
        Row("rows", f"{packing}; of {', '.join(map(str, report['lengths']))} tokens"),
        Row("largest difference", f"{format_number(report['difference'])} nats"),
        Row("tolerance", f"{format_number(report['tolerance'])} nats, of rounding in {report['dtype']}"),
    ]
    if report["reason"] is not None:
        rows.append(Row("reason", str(report["reason"])))
    if not report["packs_rows"] and report["packed_difference"] is not None:
        rows.append(Row("packed rows", f"would differ by {format_number(report['packed_difference'])} nats"))
    rows += rows_of("not checked", report["unchecked"])
    times = f"{format_seconds(report['check_s'])}, after {format_seconds(report['load_s'])} of loading"
    rows.append(Row("time", times))
    if report["is_equal"]:
        return Report(
            "Equal", f"{subject} trains on the log-probs of its own forward.", "good", [Facts(rows)]
        )
    sentence = f"{subject} would train on other log-probs than its own."
    return Report("Different", sentence, "bad", [Facts(rows)])
