"""`areal-debug agent`: an agent run alone, then under load, then inside the trainer."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from areal_debug.render import errors_as_sentences, fail, print_json

if TYPE_CHECKING:
    from areal_core.rollout.agent.workflow import AgentWorkflow
    from areal_core.rollout.engine import InferenceEngine


@click.group()
def command() -> None:
    """Run an agent alone, under load, or inside the trainer, and see what it says and where it fails."""


def engine_options(body: Callable[..., Any]) -> Callable[..., Any]:
    """What the agent talks to, its rows and its own arguments."""
    options = (
        click.argument("agent"),
        click.option("--data", required=True, metavar="FILE", help="JSONL file or dataset with the rows."),
        click.option("--model", metavar="PATH", help="Model to sample in this process; the tokenizer beside --server."),
        click.option("--server", metavar="HOST:PORT", help="SGLang server to sample from (see `serve`)."),
        click.option("--say", multiple=True, metavar="TEXT", help="No model: answer so; repeated, one line a turn."),
        click.option("--latency", "latency_s", default=0.0, metavar="SECONDS", help="Mean time of a --say answer."),
        click.option("--config", "config_file", metavar="FILE", help="Take gconfig and rollout.agent from a run."),
        click.option("--arg", "arguments", multiple=True, metavar="NAME=VALUE", help="For the agent's constructor."),
        click.option("--json", "as_json", is_flag=True, help="The same facts as JSON."),
        click.argument("overrides", nargs=-1),
    )  # fmt: skip
    for option in reversed(options):
        body = option(body)
    return body


@command.command()
@engine_options
@click.option("--index", default=0, show_default=True, help="Which row.")
@errors_as_sentences
def run(agent: str, data: str, index: int, as_json: bool, **choice: Any) -> None:
    """Run one episode of AGENT (MODULE:CLASS or FILE.py:CLASS); show every turn with its tokens, and the reward.

    OVERRIDES change options: gconfig.max_new_tokens=64 rollout.agent.export_style=concat.
    """
    from areal_debug.agent_output import print_episode
    from areal_debug.agent_run import run_one

    row = pick_row(data, index)
    workflow, engine, name = build(agent, **choice)
    try:
        report = run_one(workflow, engine, name, row, index)
    finally:
        workflow.close()
    print_json(asdict(report)) if as_json else print_episode(report)
    raise SystemExit(0 if report.error is None else 1)


@command.command()
@engine_options
@click.option("--batch-size", default=256, show_default=True, type=click.IntRange(1), help="Prompts.")
@click.option("--group-size", default=8, show_default=True, type=click.IntRange(1), help="Samples each.")
@errors_as_sentences
def stress(agent: str, data: str, batch_size: int, group_size: int, as_json: bool, **choice: Any) -> None:
    """Run AGENT with the concurrency of training; report latencies, errors, and what blocks its event loop."""
    from areal_debug.agent_engine import read_rows
    from areal_debug.agent_output import print_stress
    from areal_debug.agent_stress import stress as run_stress

    rows = read_rows(data)
    workflow, engine, name = build(agent, **choice)
    try:
        report = run_stress(workflow, engine, name, rows, batch_size, group_size)
    finally:
        workflow.close()
    if as_json:
        print_json(asdict(report) | {"healthy": report.is_healthy})
    else:
        print_stress(report)
    raise SystemExit(0 if report.is_healthy else 1)


def pick_row(data: str, index: int) -> dict[str, Any]:
    """The row of a data file. Raises DatasetError or ValueError."""
    from areal_debug.agent_engine import read_rows

    rows = read_rows(data)
    if not 0 <= index < len(rows):
        raise ValueError(f"--index is {index} and {data} has {len(rows)} rows; expected 0 to {len(rows) - 1}")
    return rows[index]


def build(
    agent: str,
    model: str | None,
    server: str | None,
    say: tuple[str, ...],
    latency_s: float,
    config_file: str | None,
    arguments: tuple[str, ...],
    overrides: tuple[str, ...],
) -> "tuple[AgentWorkflow, InferenceEngine, str]":
    """The workflow and the engine that it talks to; the cheap mistakes are found first."""
    from areal_core.engine.errors import EngineError
    from areal_core.rollout import errors as rollout
    from areal_core.rollout.agent.agents import load_agent
    from areal_core.rollout.agent.workflow import AgentWorkflow
    from areal_debug.agent_engine import EngineChoice, open_engine
    from areal_debug.agent_settings import parse_arguments, read_settings

    settings = read_settings(config_file, overrides)
    agent_kwargs = parse_arguments(arguments)
    load_agent(agent, agent_kwargs)
    try:
        engine, tokenizer, name = open_engine(EngineChoice(server, model or settings.model, say, latency_s))
    except (EngineError, rollout.NoServers, rollout.WrongServer) as error:
        fail(str(error))
    return AgentWorkflow(agent, settings.gconfig, tokenizer, settings.agent, agent_kwargs), engine, name
