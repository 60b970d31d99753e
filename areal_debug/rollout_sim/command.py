"""`areal-debug rollout-sim`: measure the rollout client with hundreds of simulated servers."""

import click

from areal_debug.cli import Verb, json_option
from areal_debug.render import console, errors_as_sentences, print_json, quiet_core


@click.command(cls=Verb, example="areal-debug rollout-sim --servers 512 --requests 50000")
@click.option("--servers", type=click.IntRange(min=2), default=512, show_default=True, help="Servers.")
@click.option(
    "--requests",
    type=click.IntRange(min=1),
    default=50_000,
    show_default=True,
    help="Samples, in ten batches.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of latencies and deaths.")
@click.option(
    "--latency",
    "latency_s",
    type=click.FloatRange(min=0, min_open=True),
    default=4.0,
    show_default=True,
    help="Median seconds of a completion.",
)
@click.option(
    "--max-lag",
    "max_lag_ms",
    type=click.FloatRange(min=0),
    default=200.0,
    show_default=True,
    help="Milliseconds by which the event loop may be late.",
)
@json_option
@errors_as_sentences
def command(
    servers: int, requests: int, seed: int, latency_s: float, max_lag_ms: float, as_json: bool
) -> None:
    """Run the executor, the client and its router against simulated servers, in this process.

    Servers differ in speed, die, restart with old weights and get new ones ten times. Nothing is
    sent over a network, so the CPU time is that of the rollout client alone.

    Exit code 0: no sample lost or doubled, none too stale, and the event loop was never late by
    more than the limit. 1: otherwise.
    """
    from areal_core.rollout.loop_thread import short_collections
    from areal_debug.rollout_sim.render import print_simulation
    from areal_debug.rollout_sim.simulate import simulate

    with quiet_core(), short_collections():
        report = simulate(servers, requests, seed, latency_s)
    problems = report.problems(max_lag_ms)
    if as_json:
        print_json(report.as_dict() | {"problems": problems})
    else:
        print_simulation(console(), report, problems)
    raise SystemExit(1 if problems else 0)
