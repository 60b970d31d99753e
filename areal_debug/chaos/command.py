"""`areal-debug chaos`: train behind servers that fail and send wrong replies; check every row."""

from pathlib import Path

import click

from areal_debug.cli import Verb, force_option, json_option, output_option, overrides_argument
from areal_debug.render import (
    console,
    errors_as_sentences,
    fail,
    note,
    print_json,
    quiet_core,
    refuse_existing,
)

ENGINES = ("embedded", "sglang")


def known_kinds(names: str | None) -> tuple[str, ...]:
    """Return the named kinds of faults, or all of a run. Raises `click.BadParameter`."""
    from areal_debug.chaos.faults import KINDS, OF_A_RUN

    if names is None:
        return OF_A_RUN
    kinds = tuple(names.split(","))
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise click.BadParameter(f"there is no fault {unknown[0]!r}: choose from {', '.join(KINDS)}")
    return kinds


@click.command(
    cls=Verb,
    context_settings={"ignore_unknown_options": True},
    example="areal-debug chaos examples/chaos.yaml --minutes 2\n"
    "areal-debug chaos my.yaml --backend sglang --seed 7 rollout.max_head_offpolicyness=1\n"
    "areal-debug chaos --schedules 200",
)
@click.argument("config", required=False, type=click.Path())
@click.option(
    "--schedules",
    type=click.IntRange(min=1),
    metavar="N",
    help="Instead of CONFIG: N short schedules with scripted servers in this process.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    help="Minutes with faults, after the first step.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the schedule of faults.")
@click.option("--servers", type=click.IntRange(min=2), default=3, show_default=True, help="Servers.")
@click.option(
    "--backend",
    "engine",
    type=click.Choice(ENGINES),
    default="embedded",
    show_default=True,
    help="What the servers run.",
)
@click.option(
    "--faults",
    metavar="KIND,...",
    callback=lambda context, _, names: known_kinds(names),
    help="Only these kinds of faults; by default all that docs/chaos.md lists.",
)
@output_option("New folder for record and logs; by default runs/chaos.")
@force_option
@json_option
@overrides_argument
@errors_as_sentences
def command(
    config: str | None,
    schedules: int | None,
    minutes: float,
    seed: int,
    servers: int,
    engine: str,
    faults: tuple[str, ...],
    output: Path | None,
    force: bool,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Train by CONFIG on inference servers behind a proxy that kills, stops, delays, truncates and
    spoils; then compare every trained row with the replies that were sent intact.

    The first server only is slow, busy or breaks connections, since a run without any honest server
    has to end. Set a model and OPTION=VALUE as for `train`; without actor.path a tiny model is
    made.

    Exit code 0: nothing was lost, doubled, too old or poisoned. 1: something was. 2: misuse.
    """
    if (config is None) == (schedules is None):
        raise ValueError("give either CONFIG, for a training run, or --schedules N")
    if schedules is not None:
        raise SystemExit(run_schedules(range(seed, seed + schedules), faults, as_json))
    assert config is not None
    raise SystemExit(
        run_training(config, overrides, output, force, minutes, seed, servers, engine, faults, as_json)
    )


def run_schedules(seeds: range, kinds: tuple[str, ...], as_json: bool) -> int:
    import tempfile

    from areal_debug.chaos.render import print_trial, print_trials
    from areal_debug.chaos.trial import run_trial

    trials = []
    with quiet_core():
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                trials.append(run_trial(seed, Path(folder), kinds))
            if not as_json:
                print_trial(console(), trials[-1])
    if as_json:
        print_json([trial.as_dict() for trial in trials])
    else:
        print_trials(console(), trials)
    return 1 if any(trial.violations for trial in trials) else 0


def run_training(
    config: str,
    overrides: tuple[str, ...],
    output: Path | None,
    force: bool,
    minutes: float,
    seed: int,
    servers: int,
    engine: str,
    kinds: tuple[str, ...],
    as_json: bool,
) -> int:
    import shutil

    from areal_core.errors import ServerFailed
    from areal_debug.chaos.chaos_training import chaos_arguments, run_chaos
    from areal_debug.chaos.render import print_chaos

    folder = (output or Path("runs") / "chaos").resolve()
    refuse_existing(folder, force or output is None)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    arguments = chaos_arguments(config, overrides, folder, servers)
    try:
        with quiet_core():
            report = run_chaos(arguments, folder, minutes, seed, engine, kinds, note)
    except ServerFailed as failure:
        fail(str(failure))
    if as_json:
        print_json(report.as_dict())
    else:
        print_chaos(console(), report)
    return 1 if report.violations else 0
