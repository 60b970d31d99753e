"""`areal-debug preflight`: check that a run is deterministic before it starts."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from areal_debug.cli import Verb, json_option, nproc_option
from areal_debug.render import console, errors_as_sentences, fail, is_quiet, print_json, print_log_end

if TYPE_CHECKING:
    from replayer.preflight.repeats import PreflightReport


@click.command(
    cls=Verb,
    context_settings={"ignore_unknown_options": True},
    example="areal-debug preflight --config my.yaml --script train.py",
)
@click.option("--config", "config_file", type=click.Path(), required=True, help="YAML file of the run.")
@click.option("--script", type=click.Path(path_type=Path), help="Script of the run, to be read, not run.")
@nproc_option
@click.option("--as-is", is_flag=True, help="Use this shell's environment, not the one that `train` sets.")
@json_option
@click.argument("inputs", nargs=-1, type=click.UNPROCESSED, metavar="[RECORD] [OPTION=VALUE]...")
@errors_as_sentences
def command(
    config_file: str,
    script: Path | None,
    nproc: int | None,
    as_is: bool,
    as_json: bool,
    inputs: tuple[str, ...],
) -> None:
    """Find sources of nondeterminism, run one real step of the configured run twice, and compare
    every bit.

    RECORD, of an earlier run, adds a check of the order of its rows. OPTION=VALUE changes an option
    of the config: actor.path=model.

    Exit code 0: no problem, equal bits. 1: a problem, or different bits; then with the noise floor
    per parameter.
    """
    from areal_debug.preflight.render import print_preflight
    from recorder import open_record
    from replayer.preflight.checks import check_script, order_of_record

    record, overrides = split_inputs(inputs)
    arguments = ["--config", config_file, *overrides]
    num_ranks = nproc or ranks_of(arguments)
    around = check_script(script) if script is not None else []
    if record is not None:
        around.append(order_of_record(open_record(record)))
    with tempfile.TemporaryDirectory() as folder:
        report = repeat_step(Path(folder), arguments, num_ranks, as_is)
    report = replace(report, findings=report.findings + tuple(around))
    if as_json:
        print_json(report.to_dict())
    else:
        print_preflight(console(), report)
    raise SystemExit(0 if report.identical and not report.problems else 1)


def split_inputs(inputs: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """Separate a record from overrides, which have a `=`. Raises ValueError for several records."""
    records = [text for text in inputs if "=" not in text]
    if len(records) > 1:
        raise ValueError(f"expected one RECORD and overrides OPTION=VALUE, got {' '.join(records)}")
    return next(iter(records), None), [text for text in inputs if "=" in text]


def ranks_of(arguments: list[str]) -> int:
    """Return the number of the trainer's ranks by the config's allocation. Raises ConfigError."""
    from areal_core.config import PPOConfig, load_expr_config

    train = load_expr_config(arguments, PPOConfig)[0].allocation.train
    if train is None:
        raise ValueError("the allocation has no training part, so there is no step to run")
    return train.world_size


def repeat_step(folder: Path, arguments: list[str], num_ranks: int, as_is: bool) -> "PreflightReport":
    """Repeat the step in separate processes and compare.

    If bits differ, two more repeats keep the values that differ, to measure the noise floor.
    """
    from replayer.preflight.repeats import (
        ParameterNoise,
        PreflightReport,
        compare_repeats,
        measure_noise,
        read_repeat,
    )

    repeats = [run_step(folder / name, arguments, num_ranks, as_is, []) for name in ("first", "second")]
    comparison = compare_repeats(*repeats)
    noise: tuple[ParameterNoise, ...] = ()
    if names := [difference.where for difference in comparison.parameters]:
        kept_repeats = [
            run_step(folder / name, arguments, num_ranks, as_is, names) for name in ("third", "fourth")
        ]
        noise = measure_noise(*kept_repeats)
    findings = read_repeat(repeats[0])[1]
    return PreflightReport(findings, comparison.num_compared, comparison.differences, noise)


def run_step(folder: Path, arguments: list[str], num_ranks: int, as_is: bool, keep: list[str]) -> Path:
    """Run the step once; its output goes to the folder."""
    from areal_core.environment import DETERMINISTIC
    from areal_core.launch.torchrun import run_ranks

    folder.mkdir()
    command = ["-m", "areal_debug.replay.on_rank", "preflight", str(folder), json.dumps(keep), *arguments]
    code = run_ranks(command, num_ranks, {} if as_is else DETERMINISTIC, folder / "logs", echo=not is_quiet())
    if code != 0:
        if is_quiet():
            print_log_end(folder / "logs" / "trainer.log")
        fail(
            f"the step could not be run: the ranks ended with exit code {code}; their output is above",
            code,
        )
    return folder
