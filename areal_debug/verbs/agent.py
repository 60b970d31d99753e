"""`areal-debug agent`: run an agent alone or under load."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from areal_debug.cli import Verb, VerbGroup, json_option, model_option, overrides_argument
from areal_debug.render import fail
from areal_debug.report.terminal import answer

EXAMPLE = "examples/tool_agent.py:CalculatorAgent"


@click.group(
    cls=VerbGroup,
    example=f"areal-debug agent run {EXAMPLE} --data examples/word_problems.jsonl --model MODEL",
)
def command() -> None:
    """Run an agent, or a RolloutWorkflow, alone or under load; show turns, rewards and failures."""


def engine_options(body: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.argument("agent", type=click.Path()),
        click.option("--data", required=True, metavar="FILE", help="JSONL file or dataset with the rows."),
        click.option("--model", metavar="PATH", help="Model to sample in this process; tokenizer of --server."),
        click.option("--server", metavar="HOST:PORT", help="SGLang server to sample from (see `serve`)."),
        click.option("--say", multiple=True, metavar="TEXT", help="Scripted reply in place of a model; once per turn."),
        click.option("--latency", "latency_s", default=0.0, metavar="SECONDS", help="Mean latency of a --say reply."),
        click.option("--config", "config_file", metavar="FILE", help="Read gconfig and rollout.agent from a run."),
        click.option("--arg", "arguments", multiple=True, metavar="NAME=VALUE", help="Argument of its constructor."),
        json_option,
        overrides_argument,
    )  # fmt: skip
    for option in reversed(options):
        body = option(body)
    return body


@command.command(
    cls=Verb,
    short_help="Run one episode and show every turn with its tokens, and the reward",
    example=f"areal-debug agent run {EXAMPLE} --data examples/word_problems.jsonl --model MODEL",
)
@engine_options
@click.option("--index", default=0, show_default=True, help="Row of the data.")
def run(agent: str, data: str, index: int, as_json: bool, **choice: Any) -> None:
    """Run one episode of AGENT; show every turn with its tokens, and the reward.

    AGENT is an agent or a RolloutWorkflow: MODULE:NAME or FILE.py:NAME of a class or an instance.
    OPTION=VALUE changes an option: gconfig.max_new_tokens=64 rollout.agent.export_style=concat.
    """
    from areal_core.agent.agent_workflow import AgentWorkflow
    from areal_core.data import rows_of
    from areal_debug.agent.report import report_of_episode
    from areal_debug.agent.run import run_one
    from areal_debug.agent.under_test import build
    from areal_debug.agent.workflow_run import run_workflow

    rows = rows_of(data)
    if not 0 <= index < len(rows):
        raise ValueError(f"--index is {index} and {data} has {len(rows)} rows; expected 0 to {len(rows) - 1}")
    row = rows[index]
    tested = build(agent, **choice)
    workflow, engine, names = tested.workflow, tested.engine, (tested.name, tested.engine_name)
    with tested.cleanup:
        if isinstance(workflow, AgentWorkflow):
            report = run_one(workflow, engine, tested.engine_name, row, index)
        else:
            report = run_workflow(workflow, engine, tested.tokenizer, names, row, index)
    answer(asdict(report), report_of_episode(report), as_json)


@command.command(
    cls=Verb,
    short_help="Run an agent under load; find what blocks its event loop",
    example=f"areal-debug agent stress {EXAMPLE} --data examples/word_problems.jsonl --server HOST:PORT",
)
@engine_options
@click.option("--batch-size", default=256, show_default=True, type=click.IntRange(1), help="Prompts.")
@click.option(
    "--group-size", default=8, show_default=True, type=click.IntRange(1), help="Samples per prompt."
)
def stress(agent: str, data: str, batch_size: int, group_size: int, as_json: bool, **choice: Any) -> None:
    """Run AGENT with the concurrency of training; report latencies, errors, and what blocks its
    event loop.

    AGENT is an agent or a RolloutWorkflow: MODULE:NAME or FILE.py:NAME of a class or an instance.
    """
    from areal_core.data import rows_of
    from areal_debug.agent.report import report_of_stress
    from areal_debug.agent.stress import stress as run_stress
    from areal_debug.agent.under_test import build

    rows = rows_of(data)
    tested = build(agent, **choice)
    names = (tested.name, tested.engine_name)
    with tested.cleanup:
        report = run_stress(tested.workflow, tested.engine, names, rows, batch_size, group_size)
    answer(asdict(report) | {"healthy": report.is_healthy}, report_of_stress(report), as_json)


@command.command(
    cls=Verb,
    short_help="Run a recorded episode again with the model's recorded answers",
    example=f"areal-debug agent replay 'runs/record#3/17/0' {EXAMPLE}",
)
@click.argument("episode", type=click.Path(), metavar="RECORD[#STEP[/PROMPT[/SAMPLE]]]")
@click.argument("agent", type=click.Path(), required=False)
@click.option(
    "--arg",
    "arguments",
    multiple=True,
    metavar="NAME=VALUE",
    help="Argument of its constructor, if not as recorded.",
)
@model_option
@click.option("--all", "show_all", is_flag=True, help="Continue after an episode that differs.")
@json_option
def replay(
    episode: str,
    agent: str | None,
    arguments: tuple[str, ...],
    model: str | None,
    show_all: bool,
    as_json: bool,
) -> None:
    """Run AGENT again on recorded episodes, with the model's answers from the record, and find the
    first request, tool result or reward that differs.

    Tools run again. AGENT is MODULE:NAME or FILE.py:NAME: code runs only if you name it. Exit code
    0: as recorded. 1: something differs.
    """
    from areal_debug.agent.replay_episode import parse_address, read_episodes
    from areal_debug.agent.replay_episode import replay as run_again
    from areal_debug.agent.report import report_of_replay
    from areal_debug.agent.under_test import build_recorded
    from recorder import open_record

    address = parse_address(episode)
    record = open_record(address.record)
    recorded = next(read_episodes(record, address)).transcript.agent
    if agent is None:
        fail(
            f"the record names its agent {recorded.name!r}; its code runs only if you name it: areal-debug agent replay {episode!r} AGENT"
        )
    workflow = build_recorded(record, agent, recorded.arguments, arguments, model)
    try:
        report = run_again(record, address, workflow, show_all)
    finally:
        workflow.close()
    answer(asdict(report) | {"identical": not report.differences}, report_of_replay(report), as_json)
