"""Run one episode of an agent; report every message and sampled token (`areal-debug agent run`)."""

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from areal_core.agent.agent_workflow import AgentWorkflow, Outcome
from areal_core.agent.chat_template import render
from areal_core.agent.conversation import BROKEN, Interaction, Message
from areal_core.agent.episode_tree import Turn
from areal_core.agent.export import rows_of
from areal_core.agent.sessions import Session
from areal_core.data.rows import num_shared
from areal_core.rollout.episodes import EpisodeEngine
from areal_core.rollout.loop_thread import LoopThread
from areal_core.rollout.types import InferenceEngine, ModelResponse
from recorder.samples import Token, token_texts


@dataclass(frozen=True)
class TurnFacts:
    """One call of the model."""

    turn: int
    new_messages: list[dict[str, Any]]  # not in the prompts of earlier turns
    num_tools: int
    num_prompt_tokens: int
    continues: int | None  # the turn whose exact tokens are a prefix of the prompt
    prefix_mismatch: str | None  # where it continues a turn and the tokens do not
    tokens: list[Token]  # sampled
    content: str
    reasoning: str | None
    tool_calls: list[dict[str, Any]]
    finish: str
    mean_logprob: float | None
    lowest_logprob: float | None
    latency_s: float
    reward: float | None  # that the agent assigned to this turn
    branch: str = "root"  # how it continues `parent`, a member of `BRANCHES`
    parent: int | None = None  # the turn that it continues, or that waits for it


@dataclass(frozen=True)
class RowFacts:
    """One row of the episode as the trainer would get it."""

    turns: list[int]
    num_tokens: int
    num_trained: int
    reward: float
    num_shared: int = 0  # of these turns, from the first on, that another row trains


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
    failure: str | None = None  # what the model did wrong, if it failed the episode, and the error
    error: str | None = None
    error_at: list[str] | None = None  # where in the agent it was raised, innermost last


def run_one(
    workflow: AgentWorkflow, engine: InferenceEngine, engine_name: str, data: dict[str, Any], index: int
) -> EpisodeReport:
    began = time.monotonic()
    loop, sessions = LoopThread(), workflow.server.proxy.sessions
    session = sessions.open(EpisodeEngine(engine, index, 0).agenerate, loop.loop)
    outcome, rows, error, error_at = Outcome(session.rewards), [], None, None
    try:
        outcome = loop.run(workflow.run_in(session, data))
        rows = describe_rows(session, outcome, workflow)
    except Exception as raised:  # the boundary: any exception of the agent is reported to the user
        error = f"{type(raised).__name__}: {raised}"
        error_at = frames_of_agent(raised)
    finally:
        sessions.close(session)
        engine.close()
        loop.close()
    tokenizer, tree = workflow.server.proxy.dialogue.tokenizer, workflow.tree_of(session)
    return EpisodeReport(
        agent=workflow.name,
        engine=engine_name,
        row=data,
        turns=[
            describe_turn(turn, tree, outcome.rewards.get(turn.interaction.id), tokenizer) for turn in tree
        ],
        rows=rows,
        wall_s=time.monotonic() - began,
        notes=notes_on(session.in_order(), tokenizer),
        failure=f"{outcome.failure}: {outcome.reason}" if outcome.failure else None,
        error=error,
        error_at=error_at,
    )


def describe_rows(session: Session, outcome: Outcome, workflow: AgentWorkflow) -> list[RowFacts]:
    """Describe the rows of a finished episode, in the export style of the run."""
    tree, exported = workflow.tree_of(session), workflow.rows_of(session, outcome)
    return [
        RowFacts(
            [tree[i].interaction.turn for i in path.turns],
            int(attended),
            int(trained),
            float(reward),
            path.num_shared,
        )
        for path, attended, trained, reward in zip(
            rows_of(tree, workflow.options.export_style),
            exported["attention_mask"].sum(1),
            exported["loss_mask"].sum(1),
            exported["rewards"],
            strict=True,
        )
    ]


def describe_turn(
    turn: Turn, tree: Sequence[Turn], reward: float | None, tokenizer: PreTrainedTokenizerBase
) -> TurnFacts:
    interaction, response = turn.interaction, turn.interaction.response
    message = interaction.message
    parent = None if turn.parent is None else tree[turn.parent].interaction
    return TurnFacts(
        turn=interaction.turn,
        new_messages=[message.for_template() for message in new_messages(interaction, parent)],
        num_tools=len(interaction.call.tools),
        branch=turn.branch,
        parent=parent.turn if parent else None,
        continues=None if turn.prefix is None else tree[turn.prefix].interaction.turn,
        prefix_mismatch=first_difference(parent, interaction, tokenizer)
        if parent and turn.branch in BROKEN
        else None,
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=[{"name": call.name, "arguments": call.arguments} for call in message.tool_calls],
        latency_s=interaction.latency_s,
        reward=reward,
        **facts_of_response(response, tokenizer),
    )


def facts_of_response(response: ModelResponse, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return what a `TurnFacts` says of the prompt's length and of the sampled tokens."""
    tokens, logprobs = response.output_tokens, response.output_logprobs
    texts = token_texts(tokens, lambda ids: str(tokenizer.decode(ids)))
    columns = zip(tokens, texts, logprobs, response.output_versions, strict=True)
    return {
        "num_prompt_tokens": len(response.input_tokens),
        "tokens": [Token(token, text, True, logprob, version) for token, text, logprob, version in columns],
        "finish": response.stop_reason,
        "mean_logprob": sum(logprobs) / len(logprobs) if logprobs else None,
        "lowest_logprob": min(logprobs, default=None),
    }


def new_messages(interaction: Interaction, parent: Interaction | None) -> list[Message]:
    known = parent.conversation if parent else ()
    return [message for message in interaction.call.messages if message not in known]


def notes_on(interactions: Sequence[Interaction], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Note tools that the template never shows to the model, and turns that were truncated."""
    notes = []
    first = next((interaction.call for interaction in interactions if interaction.call.tools), None)
    if first and render(tokenizer, first, None) == render(tokenizer, replace(first, tools=()), None):
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
    """Describe where a prompt diverges from the tokens of the turn that it continues."""
    ours, theirs = parent.tokens, interaction.response.input_tokens
    at = num_shared(ours, theirs)
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
