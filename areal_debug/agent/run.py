"""Run one episode of an agent; report every message and sampled token (`areal-debug agent run`)."""

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from areal_core.agent.agent_workflow import AgentWorkflow
from areal_core.agent.chat_template import find_parent, render
from areal_core.agent.conversation import Interaction
from areal_core.agent.export import conversations, export_rows
from areal_core.agent.sessions import Session
from areal_core.rollout.episodes import EpisodeEngine
from areal_core.rollout.loop_thread import LoopThread
from areal_core.rollout.types import InferenceEngine
from recorder.samples import Token, token_texts


@dataclass(frozen=True)
class TurnFacts:
    """One call of the model."""

    turn: int
    new_messages: list[dict[str, Any]]  # not in the prompts of earlier turns
    num_tools: int
    num_prompt_tokens: int
    continues: int | None  # the turn whose exact tokens are a prefix of the prompt
    prefix_mismatch: str | None  # where the messages continue a turn and the tokens do not
    tokens: list[Token]  # sampled
    content: str
    reasoning: str | None
    tool_calls: list[dict[str, Any]]
    finish: str
    mean_logprob: float | None
    lowest_logprob: float | None
    latency_s: float
    reward: float | None  # that the agent assigned to this turn


@dataclass(frozen=True)
class RowFacts:
    """One row of the episode as the trainer would get it."""

    turns: list[int]
    num_tokens: int
    num_trained: int
    reward: float


@dataclass(frozen=True)
class EpisodeReport:
    """One episode. `error` is None if it produced rows to train on."""

    agent: str
    engine: str
    row: dict[str, Any]
    turns: list[TurnFacts]
    rows: list[RowFacts]
    wall_s: float
    notes: list[str]  # problems that do not stop the episode but harm training
    error: str | None = None
    error_at: list[str] | None = None  # where in the agent it was raised, innermost last


def run_one(
    workflow: AgentWorkflow, engine: InferenceEngine, engine_name: str, data: dict[str, Any], index: int
) -> EpisodeReport:
    """Run the agent once on a row. An exception of the agent is part of the report."""
    began = time.monotonic()
    loop, sessions = LoopThread(), workflow.server.proxy.sessions
    session = sessions.open(EpisodeEngine(engine, index, 0).agenerate, loop.loop)
    rewards, rows, error, error_at = {}, [], None, None
    try:
        rewards = loop.run(workflow.run_in(session, data))
        rows = describe_rows(session, rewards, workflow)
    except Exception as raised:  # the boundary: any exception of the agent is reported to the user
        error = f"{type(raised).__name__}: {raised}"
        error_at = frames_of_agent(raised)
    finally:
        sessions.close(session)
        engine.close()
        loop.close()
    return EpisodeReport(
        agent=workflow.name,
        engine=engine_name,
        row=data,
        turns=describe_turns(
            session.in_order(), rewards or session.rewards, workflow.server.proxy.dialogue.tokenizer
        ),
        rows=rows,
        wall_s=time.monotonic() - began,
        notes=notes_on(session.in_order(), workflow.server.proxy.dialogue.tokenizer),
        error=error,
        error_at=error_at,
    )


def describe_rows(session: Session, rewards: dict[str, float], workflow: AgentWorkflow) -> list[RowFacts]:
    """Describe the rows of a finished episode, in the export style of the run."""
    interactions, options = session.in_order(), workflow.options
    exported = export_rows(interactions, rewards, options.turn_discount, options.export_style)
    chains = conversations(interactions) if options.export_style == "concat" else [[i] for i in interactions]
    return [
        RowFacts([turn.turn for turn in chain], int(attended), int(trained), float(reward))
        for chain, attended, trained, reward in zip(
            chains,
            exported["attention_mask"].sum(1),
            exported["loss_mask"].sum(1),
            exported["rewards"],
            strict=True,
        )
    ]


def describe_turns(
    interactions: Sequence[Interaction], rewards: dict[str, float], tokenizer: PreTrainedTokenizerBase
) -> list[TurnFacts]:
    """Describe the calls in order, each with what it adds to the earlier ones."""
    return [
        describe_turn(interaction, interactions[:number], rewards.get(interaction.id), tokenizer)
        for number, interaction in enumerate(interactions)
    ]


def describe_turn(
    interaction: Interaction,
    earlier: Sequence[Interaction],
    reward: float | None,
    tokenizer: PreTrainedTokenizerBase,
) -> TurnFacts:
    """Describe one call; `earlier` are the calls before it in the session."""
    call, response, message = interaction.call, interaction.response, interaction.message
    continued = conversations([*earlier, interaction])[-1][:-1]
    parent = find_parent(call, earlier)
    num_known = len(parent.call.messages) + 1 if parent else 0
    logprobs = response.output_logprobs
    texts = token_texts(response.output_tokens, lambda ids: str(tokenizer.decode(ids)))
    return TurnFacts(
        turn=interaction.turn,
        new_messages=[message.for_template() for message in call.messages[num_known:]],
        num_tools=len(call.tools),
        num_prompt_tokens=len(response.input_tokens),
        continues=continued[-1].turn if continued else None,
        prefix_mismatch=first_difference(parent, interaction, tokenizer)
        if parent and not continued
        else None,
        tokens=[
            Token(token, text, True, logprob, version)
            for token, text, logprob, version in zip(
                response.output_tokens, texts, logprobs, response.output_versions, strict=True
            )
        ],
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=[{"name": call.name, "arguments": call.arguments} for call in message.tool_calls],
        finish=response.stop_reason,
        mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
        lowest_logprob=min(logprobs, default=None),
        latency_s=interaction.latency_s,
        reward=reward,
    )


def notes_on(interactions: Sequence[Interaction], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Note tools that the template never shows to the model, and turns that were truncated."""
    notes = []
    with_tools = [interaction.call for interaction in interactions if interaction.call.tools]
    if with_tools and render(tokenizer, with_tools[0]) == render(tokenizer, replace(with_tools[0], tools=())):
        notes.append(
            "tools were offered, and the chat template does not show them to the model: it cannot call them"
        )
    num_cut = sum(interaction.response.stop_reason == "length" for interaction in interactions)
    if num_cut:
        notes.append(
            f"{num_cut} of {len(interactions)} turns were truncated at the length limit: raise gconfig.max_new_tokens if they should end"
        )
    return notes


def first_difference(
    parent: Interaction, interaction: Interaction, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Describe where a prompt diverges from the tokens of the turn that its messages continue.

    The chat template rendered that turn differently from what was sampled.
    """
    ours, theirs = parent.tokens, interaction.response.input_tokens
    at = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    then, now = (tokenizer.decode(tokens[at : at + 6]) for tokens in (ours, theirs))
    return f"from token {at} on the prompt has {now!r}, where turn {parent.turn} had {then!r}"


def frames_of_agent(error: BaseException) -> list[str]:
    """Return the frames of the user's own code in the traceback, innermost last."""
    from areal_debug.agent.loop_monitor import is_users

    caused = error.__cause__ or error  # the engine's error wraps the agent's own as its cause
    frames = traceback.extract_tb(caused.__traceback__)
    return [
        f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames if is_users(frame.filename)
    ]
