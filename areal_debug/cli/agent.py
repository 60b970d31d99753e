"""`areal-debug agent`: an agent run alone, then under load, then inside the trainer."""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from areal_debug.render import errors_as_sentences, fail, print_json

if TYPE_CHECKING:
    from areal_core.config import PPOConfig
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


@command.command()
@click.argument("agent")
@click.option("--config", "config_file", required=True, metavar="FILE", help="The run's YAML file.")
@click.option("--steps", default=1, show_default=True, type=click.IntRange(1), help="Batches.")
@click.option("--record", metavar="DIR", help="Where to record; by default beside the run's logs.")
@click.option("--arg", "arguments", multiple=True, metavar="NAME=VALUE", help="For the agent's constructor.")
@click.option("--json", "as_json", is_flag=True, help="The same facts as JSON.")
@click.argument("overrides", nargs=-1)
@errors_as_sentences
def rollout(
    agent: str,
    config_file: str,
    steps: int,
    record: str | None,
    arguments: tuple[str, ...],
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Run AGENT as training will: through launcher, trainer and executor; record the batches, which `replay` takes.

    The config says where: ranks and servers by its allocation_mode, on this machine, Ray or SLURM by its scheduler.
    """
    from areal_core.paths import record_folder
    from areal_core.rollout.agent.agents import load_agent
    from areal_debug.agent_output import print_rollout
    from areal_debug.agent_record import describe_step
    from areal_debug.agent_settings import parse_arguments
    from areal_debug.cli.train import check_record, read_config
    from areal_debug.flags import flag_overrides
    from recorder import open_record

    agent_kwargs = parse_arguments(arguments)
    load_agent(agent, agent_kwargs)
    argv = [
        *("--config", config_file, *flag_overrides("--dump-rollout", record or "")),
        *(f"rollout.agent.agent_cls_path={agent}", f"total_train_steps={steps}", *overrides),
    ]
    config = read_config(argv)
    check_record(config)
    code = launch_rollout(config, argv, agent_kwargs, quiet=as_json)
    if code:
        fail(f"the run ended with exit code {code}; what it said stands above", code)
    folder = record_folder(config)
    opened = open_record(folder)
    facts = [describe_step(opened, step) for step in opened.steps]
    if as_json:
        print_json({"record": str(folder), "agent": agent, "steps": [asdict(step) for step in facts]})
    else:
        print_rollout(agent, folder, facts)


def launch_rollout(config: "PPOConfig", argv: list[str], agent_kwargs: dict[str, Any], quiet: bool) -> int:
    """Run the trainer with the agent on its ranks and servers; the exit code."""
    import contextlib
    import json
    import sys

    from areal_core.launch.job import Job
    from areal_core.launch.run import run as run_attempts
    from areal_core.paths import run_folder
    from areal_debug import agent_rollout

    allocation = config.allocation
    if allocation.train is None:
        fail(
            "the allocation has no training part, so there is no trainer to roll out in: add one, as in 'sglang:d1+fsdp:d2'"
        )
    job = Job(
        ("-m", "areal_debug.script", agent_rollout.__file__, *argv),
        config,
        allocation,
        {agent_rollout.ARGUMENTS: json.dumps(agent_kwargs)},
        run_folder(config, "logs"),
    )
    with contextlib.redirect_stdout(sys.stderr) if quiet else contextlib.nullcontext():
        return run_attempts(lambda attempt: job)


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
