"""What `areal-debug agent` tests: an agent or a workflow, with the engine that it samples from."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from areal_core.agent.agent_workflow import AgentWorkflow
from areal_core.agent.agents import is_agent, load_agent
from areal_core.errors import EngineError
from areal_core.rollout.errors import NoServers, WrongServer
from areal_core.rollout.types import InferenceEngine
from areal_core.rollout.workflow import RolloutWorkflow
from areal_core.trainer.build import load_processor_of, load_tokenizer
from areal_core.trainer.build_rollouts import build_workflow, find_workflow
from areal_debug.agent.engine import EngineChoice, open_engine
from areal_debug.agent.settings import parse_arguments, read_settings
from areal_debug.render import fail
from recorder import Record
from replayer.errors import ReplayError
from replayer.request import replay_config


@dataclass(frozen=True)
class UnderTest:
    """An agent, wrapped in its workflow, or a workflow; `cleanup` ends its processes."""

    name: str
    workflow: RolloutWorkflow
    engine: InferenceEngine
    engine_name: str
    tokenizer: PreTrainedTokenizerBase
    cleanup: ExitStack = field(default_factory=ExitStack)


def check_workflow(path: str, arguments: dict[str, Any]) -> None:
    """Check what can be checked of an agent or a workflow before anything is loaded.

    Raises:
        NotAnAgent, ConfigError: there is no such object, or it is neither.
    """
    found = find_workflow(path)
    if is_agent(found) or not callable(getattr(found, "arun_episode", None)):
        load_agent(found, arguments)


def build_recorded(
    record: Record, agent: str, recorded: dict[str, Any] | None, changed: Sequence[str], model: str | None
) -> AgentWorkflow:
    """Build an agent with the options and the arguments of a recorded run.

    Args:
        recorded: arguments of the agent's constructor; `changed` has others, NAME=VALUE.
        model: current path of the recorded model, whose tokenizer is used, if it has moved.

    Raises:
        NotAnAgent, ConfigError, ModelError: what cannot be built, and why.
        ReplayError: the agent ran in a client of its own.
    """
    check_workflow(agent, (recorded or {}) | parse_arguments(changed))
    if not is_agent(find_workflow(agent)):
        raise ReplayError(f"{agent} is a workflow, which calls the engine itself: only agents are replayed")
    config = replay_config(record, model, trains=False)
    options = config.rollout.agent
    if options.mode == "online":
        raise ReplayError(
            "the record is of rollout.agent.mode=online: its agent was a client outside of the run"
        )
    arguments = (recorded or {}) | parse_arguments(changed)
    return AgentWorkflow(
        agent, config.gconfig, load_tokenizer(config), options, arguments, load_processor_of(config)
    )


def build(
    workflow: str,
    model: str | None,
    server: str | None,
    say: tuple[str, ...],
    latency_s: float,
    config_file: str | None,
    arguments: Sequence[str],
    overrides: Sequence[str],
) -> UnderTest:
    """Build the agent or workflow at an import path, and its engine; cheap checks come first."""
    settings = read_settings(config_file, overrides)
    constructed_from = parse_arguments(arguments)
    check_workflow(workflow, constructed_from)
    try:
        engine, tokenizer, name = open_engine(EngineChoice(server, model or settings.model, say, latency_s))
    except (EngineError, NoServers, WrongServer) as error:
        fail(str(error))
    cleanup = ExitStack()
    built = build_workflow(
        workflow,
        constructed_from,
        settings.gconfig,
        tokenizer,
        cleanup.callback,
        agent_options=settings.agent,
    )
    return UnderTest(workflow, built, engine, name, tokenizer, cleanup)
