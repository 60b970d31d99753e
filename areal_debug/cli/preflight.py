"""`areal-debug preflight`: would a run come out the same twice? Asked before it costs anything."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from areal_debug.render import console, errors_as_sentences, fail, print_json

if TYPE_CHECKING:
    from replayer.twice import PreflightReport


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--config", "config_file", type=click.Path(), required=True, help="The run's YAML file.")
@click.option("--script", type=click.Path(path_type=Path), help="The run's script, to be read, not run.")
@click.option(
    "--record", type=click.Path(), help="A record of an earlier run, to look at the order of its rows."
)
@click.option("--nproc", type=click.IntRange(min=1), help="Ranks; by default as the allocation says.")
@click.option("--as-is", is_flag=True, help="With this shell's environment, not the one that `train` sets.")
@click.option("--json", "as_json", is_flag=True, help="The same facts as JSON.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@errors_as_sentences
def command(
    config_file: str,
    script: Path | None,
    record: str | None,
    nproc: int | None,
    as_is: bool,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Look for what changes bits from run to run, take one real step of the configured run twice, and compare.

    OVERRIDES change options of the config: actor.path=model.

    Exit code 0: nothing found, equal bits. 1: a problem, or other bits; the machine's own noise per parameter is shown.
    """
    from areal_debug.preflight_output import print_preflight
    from recorder import open_record
    from replayer.preflight_checks import check_script, order_of_record

    arguments = ["--config", config_file, *overrides]
    num_ranks = nproc or ranks_of(arguments)
    around = check_script(script) if script is not None else []
    if record is not None:
        around.append(order_of_record(open_record(record)))
    with tempfile.TemporaryDirectory() as folder:
        report = take_twice(Path(folder), arguments, num_ranks, as_is)
    report = replace(report, findings=report.findings + tuple(around))
    if as_json:
        print_json(report.to_dict())
    else:
        print_preflight(console(), report)
    raise SystemExit(0 if report.identical and not report.problems else 1)


def ranks_of(arguments: list[str]) -> int:
    """The trainer's ranks as the config's allocation says. Raises ConfigError for what is wrong with the config."""
    from areal_core.config import PPOConfig, load_expr_config

    train = load_expr_config(arguments, PPOConfig)[0].allocation.train
    if train is None:
        raise ValueError("the allocation has no training part, so there is no step to take")
    return train.world_size


def take_twice(folder: Path, arguments: list[str], num_ranks: int, as_is: bool) -> "PreflightReport":
    """The step in two generations of processes; where bits differ, twice more for the values of what differs."""
    from replayer.twice import ParameterNoise, PreflightReport, compare_repeats, measure_noise, read_repeat

    takes = [take(folder / name, arguments, num_ranks, as_is, []) for name in ("first", "second")]
    comparison = compare_repeats(*takes)
    noise: tuple[ParameterNoise, ...] = ()
    if names := [difference.where for difference in comparison.parameters]:
        kept = [take(folder / name, arguments, num_ranks, as_is, names) for name in ("third", "fourth")]
        noise = measure_noise(*kept)
    findings = read_repeat(takes[0])[1]
    return PreflightReport(findings, comparison.num_compared, comparison.differences, noise)


def take(folder: Path, arguments: list[str], num_ranks: int, as_is: bool, keep: list[str]) -> Path:
    """One take of the step, in a folder."""
    from areal_core.environment import DETERMINISTIC
    from areal_core.launch.torchrun import run_ranks

    folder.mkdir()
    command = ["-m", "areal_debug.replay_rank", "preflight", str(folder), json.dumps(keep), *arguments]
    code = run_ranks(command, num_ranks, {} if as_is else DETERMINISTIC, folder / "logs")
    if code != 0:
        fail(
            f"the step could not be taken: the ranks ended with exit code {code}; what they said stands above",
            code,
        )
    return folder
