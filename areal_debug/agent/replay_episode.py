"""Run an agent again with the model's answers from a record; compare what it asks and returns.

    record ── answers of the model ──> RecordedAnswers ──> agent ── its tools, really run
      └────── messages, tools, rewards ──> compared with <── its requests and rewards

A request that differs is answered as recorded, so that it is among the answered calls, and the run
ends at the next one: what follows was never sampled.
"""

import asyncio
import itertools
import json
import re
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from areal_core.agent.agent_workflow import AgentWorkflow, Outcome
from areal_core.agent.conversation import Interaction
from areal_core.agent.transcript import encode, from_json, message_facts, options_of
from areal_core.data.rows import num_shared
from areal_core.rollout.loop_thread import LoopThread
from areal_core.rollout.types import ModelRequest, ModelResponse
from areal_debug.agent.run import frames_of_agent
from recorder import Record, RecordError
from recorder.conversations import calls_before, offered_tools
from recorder.reader import RecordedStep
from recorder.transcripts import Transcript

ADDRESS = re.compile(r"(?P<record>.+?)(?:#(?P<step>\d+)(?:/(?P<prompt>\d+)(?:/(?P<episode>\d+))?)?)?")


@dataclass(frozen=True)
class Address:
    """The episodes of RECORD#STEP/PROMPT/SAMPLE; all where a number is None."""

    record: str
    step: int | None = None
    prompt: int | None = None
    episode: int | None = None


@dataclass(frozen=True)
class Answer:
    """The tokens of a recorded call; the prompt is None where nothing was sampled after it."""

    prompt: list[int] | None
    response: ModelResponse


@dataclass(frozen=True)
class Episode:
    """A recorded episode: its transcript, and the answers by the number of the call."""

    step: int
    transcript: Transcript
    answers: dict[int, Answer]


@dataclass(frozen=True)
class EpisodeDifference:
    """The first difference of an episode; its place is added last.

    Attributes:
        call: number of the call; None for what the agent returned.
        kind: "tool_result", "message", "tools", "options", "prompt_tokens", "more_calls",
            "fewer_calls", "raised", "failure" or "reward".
        what: a phrase that names it.
        recorded, now: the values; of long texts, from before the first character that differs.
        at: position in a text or a list of tokens.
        frames: where the agent raised, innermost last.
    """

    step: int = field(default=-1, kw_only=True)
    prompt_id: int = field(default=-1, kw_only=True)
    sample: int = field(default=-1, kw_only=True)
    call: int | None
    kind: str
    what: str
    recorded: Any = None
    now: Any = None
    at: int | None = None
    frames: tuple[str, ...] = ()


@dataclass(frozen=True)
class AgentReplay:
    """Episodes that were run again, and the first difference of each that differs."""

    record: str
    agent: str
    num_episodes: int
    num_calls: int
    num_tool_results: int
    differences: tuple[EpisodeDifference, ...]


class Diverged(Exception):
    """The agent makes a call that has no recorded answer."""


def parse_address(text: str) -> Address:
    """Parse RECORD, RECORD#STEP, RECORD#STEP/PROMPT or RECORD#STEP/PROMPT/SAMPLE.

    Raises ValueError.
    """
    found = ADDRESS.fullmatch(text)
    if found is None or ("#" in text and found["step"] is None):
        raise ValueError(
            f"{text!r} names no episode: expected RECORD#STEP/PROMPT/SAMPLE, as in runs/record#3/17/0"
        )
    numbers = [None if found[name] is None else int(found[name]) for name in ("step", "prompt", "episode")]
    return Address(found["record"], *numbers)


def read_episodes(record: Record, address: Address) -> Iterator[Episode]:
    """Yield the recorded episodes of an address, in the order of steps, prompts and samples.

    Raises RecordError if there is none.
    """
    num_found = 0
    for number in record.steps if address.step is None else (address.step,):
        step = record.step(number)
        for rank in step.ranks:
            for transcript in step.calls(rank) or ():
                names = (transcript.prompt_id, transcript.episode)
                if all(
                    wanted in (None, name)
                    for wanted, name in zip((address.prompt, address.episode), names, strict=True)
                ):
                    num_found += 1
                    yield Episode(number, transcript, read_answers(step, rank, transcript))
    if not num_found:
        where = (
            ""
            if address.step is None
            else f" at {'/'.join(str(n) for n in (address.step, address.prompt, address.episode) if n is not None)}"
        )
        raise RecordError(
            f"{record.path} has no episode of an agent{where}: `areal-debug record ls` lists its steps; calls of agents "
            "are recorded with debug.record_text=true"
        )


def read_answers(step: RecordedStep, rank: int, transcript: Transcript) -> dict[int, Answer]:
    keys = ("input_ids", "turns", "loss_mask", "logprobs", "versions", "prompt_id", "episode", "sample_id")
    arrays = step.batch(rank, [*keys, "cu_seqlens"])
    is_here = (arrays["prompt_id"] == transcript.prompt_id) & (arrays["episode"] == transcript.episode)
    sampled: dict[int, Answer] = {}
    finish = {call.turn: call.finish for call in transcript.calls}
    rows = np.flatnonzero(is_here)
    if not step.known(rank, "input_ids")[rows].all():
        place = f"{step.manifest.step}/{transcript.prompt_id}/{transcript.episode}"
        raise RecordError(
            f"tokens of {place} are masked in this copy: run the episode of the original record"
        )
    for row in rows[np.argsort(arrays["sample_id"][rows])]:
        span = slice(*arrays["cu_seqlens"][row : row + 2])
        ids, turns = arrays["input_ids"][span].tolist(), arrays["turns"][span]
        for turn in set(turns[turns > 0].tolist()):
            own = np.flatnonzero(turns == turn)
            # where another row trains the call, its log-probs are there
            if turn - 1 in sampled and not arrays["loss_mask"][span][own].all():
                continue
            first, end = int(own[0]), int(own[-1]) + 1
            response = ModelResponse(
                input_tokens=ids[:first],
                output_tokens=ids[first:end],
                output_logprobs=arrays["logprobs"][span][first:end].tolist(),
                output_versions=arrays["versions"][span][first:end].tolist(),
                stop_reason=finish.get(turn - 1, "stop"),
            )
            sampled[turn - 1] = Answer(ids[:first], response)
    return {turn: sampled.get(turn) or nothing_sampled(stop) for turn, stop in finish.items()}


def nothing_sampled(finish: str) -> Answer:
    empty = ModelResponse(
        input_tokens=[], output_tokens=[], output_logprobs=[], output_versions=[], stop_reason=finish
    )
    return Answer(None, empty)


class RecordedAnswers:
    """A `TokenSampler` that answers each request as recorded.

    A request gets the answer to the same tokens, whatever the order of requests that run at the
    same time; one with other tokens gets that of the first call that has not been answered.

    Attributes:
        calls: number of the recorded call by that of the request.
        other_tokens: the requests, by number, that are not those recorded.
        stopped: set when the agent makes a call that has no recorded answer.
    """

    version = 0

    def __init__(self, answers: dict[int, Answer]) -> None:
        self._left = dict(sorted(answers.items()))
        self.calls: dict[int, int] = {}
        self.other_tokens: dict[int, list[int]] = {}
        self.stopped = asyncio.Event()

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Return the recorded answer. Raises PromptTooLong, as the engine did, and Diverged."""
        req.num_new_tokens()
        if not self._left or self.other_tokens:
            self.stopped.set()
            raise Diverged("the record has no answer to this request")
        same = (turn for turn, answer in self._left.items() if answer.prompt in (None, req.input_ids))
        turn = next(same, None)
        if turn is None:
            turn = next(iter(self._left))
            self.other_tokens[req.metadata["turn"]] = req.input_ids
        self.calls[req.metadata["turn"]] = turn
        answer = self._left.pop(turn).response
        return ModelResponse(**vars(answer) | {"input_tokens": req.input_ids})


def replay(record: Record, address: Address, workflow: AgentWorkflow, show_all: bool) -> AgentReplay:
    """Run episodes again up to the first that differs, or all.

    Raises RecordError: there is no such episode, or its row of data was not recorded.
    """
    differences, transcripts = [], []
    loop = LoopThread()
    try:
        for episode in read_episodes(record, address):
            transcripts.append(episode.transcript)
            found = first_difference(episode, workflow, loop)
            if found is not None:
                one = episode.transcript
                placed = replace(found, step=episode.step, prompt_id=one.prompt_id, sample=one.episode)
                differences.append(placed)
                if not show_all:
                    break
    finally:
        loop.close()
    calls = [call for transcript in transcripts for call in transcript.calls]
    num_results = sum(message["role"] == "tool" for call in calls for message in call.messages)
    return AgentReplay(
        record.path, workflow.name, len(transcripts), len(calls), num_results, tuple(differences)
    )


def first_difference(episode: Episode, workflow: AgentWorkflow, loop: LoopThread) -> EpisodeDifference | None:
    """Run an episode again; return its first difference from the record."""
    transcript = episode.transcript
    if transcript.data is None:
        raise RecordError(
            f"the row of prompt {transcript.prompt_id} is not in the record, because it is not JSON, and the agent needs it"
        )
    sessions, engine = workflow.server.proxy.sessions, RecordedAnswers(episode.answers)
    session = sessions.open(engine.agenerate, loop.loop)
    outcome: Outcome | None = None
    raised: Exception | None = None
    try:
        outcome = loop.run(
            until_stopped(workflow.run_in(session, from_json(transcript.data)), engine.stopped)
        )
    except Exception as error:  # the boundary: any exception of the agent is reported to the user
        raised = error
    finally:
        sessions.close(session)
    interactions = session.in_order()
    found = differing_call(episode, engine, interactions)
    if found is not None:
        return found
    left = [call.turn for call in transcript.calls if call.turn not in engine.calls.values()]
    if engine.stopped.is_set():
        what = f"the agent makes call {len(transcript.calls)}, and made {len(transcript.calls)} in the record"
        return EpisodeDifference(len(transcript.calls), "more_calls", what)
    if raised is not None:
        what = f"the agent raises {type(raised).__name__}: {raised}"
        return EpisodeDifference(
            min(left, default=None), "raised", what, frames=tuple(frames_of_agent(raised))
        )
    if left:
        what = (
            f"the agent ends after {len(interactions)} calls, and made {len(transcript.calls)} in the record"
        )
        return EpisodeDifference(left[0], "fewer_calls", what)
    assert outcome is not None
    return differing_outcome(transcript, engine, interactions, outcome)


async def until_stopped(run: Coroutine[Any, Any, Outcome], stopped: asyncio.Event) -> Outcome | None:
    running, stopping = asyncio.ensure_future(run), asyncio.ensure_future(stopped.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not running.done():
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return None
    return running.result()


def differing_call(
    episode: Episode, engine: RecordedAnswers, interactions: Sequence[Interaction]
) -> EpisodeDifference | None:
    recorded = {call.turn: call for call in episode.transcript.calls}
    tools = offered_tools(episode.transcript)
    by_turn = sorted((engine.calls[interaction.turn], interaction) for interaction in interactions)
    for turn, interaction in by_turn:
        now = [without_reasoning(message_facts(message)) for message in interaction.call.messages]
        requested = conversation(episode.transcript, turn)
        found = (
            differing_message(turn, requested, canonical(now))
            or differing_value(
                turn, "tools", "other tools are offered", tools[turn], canonical(interaction.call.tools)
            )
            or differing_value(
                turn,
                "options",
                "other options are set",
                recorded[turn].options,
                canonical(options_of(interaction.call)),
            )
            or differing_tokens(turn, episode.answers[turn].prompt, engine.other_tokens.get(interaction.turn))
        )
        if found is not None:
            return found
    return None


def conversation(transcript: Transcript, turn: int) -> list[dict[str, Any]]:
    """Return all messages of a recorded request."""
    *before, last = calls_before(transcript, turn)
    earlier = (message for call in before for message in (*call.messages, call.answer))
    return list(map(without_reasoning, (*earlier, *last.messages)))


def without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def canonical(value: Any) -> Any:
    """Return a value as the record would have it."""
    return json.loads(encode(value))


def differing_message(turn: int, recorded: list[Any], now: list[Any]) -> EpisodeDifference | None:
    for number, (was, found) in enumerate(itertools.zip_longest(recorded, now)):
        if was == found:
            continue
        if was is None or found is None:
            what = f"message {number} is {'new' if was is None else 'missing'}"
            return EpisodeDifference(turn, "message", what, was, found)
        name = tool_call_of(recorded, number) if was["role"] == found["role"] == "tool" else None
        kind, what = "message", f"message {number} ({found['role']}) is another one"
        if name is not None:
            kind, what = "tool_result", f"the tool {name} returns something else"
        before, after = was.get("content"), found.get("content")
        if isinstance(before, str) and isinstance(after, str) and before != after:
            return EpisodeDifference(turn, kind, what, before, after, num_shared(before, after))
        return EpisodeDifference(turn, kind, what, was, found)
    return None


def tool_call_of(messages: Sequence[dict[str, Any]], number: int) -> str | None:
    first = number
    while first > 0 and messages[first - 1]["role"] == "tool":
        first -= 1
    calls = messages[first - 1].get("tool_calls", []) if first else []
    if number - first >= len(calls):
        return None
    call = calls[number - first]
    return f"{call['name']}({call['arguments']})"


def differing_value(turn: int, kind: str, what: str, recorded: Any, now: Any) -> EpisodeDifference | None:
    """Return a difference unless the values are equal."""
    return None if recorded == now else EpisodeDifference(turn, kind, what, recorded, now)


def differing_tokens(
    turn: int, recorded: list[int] | None, now: list[int] | None
) -> EpisodeDifference | None:
    if recorded is None or now is None:
        return None
    at = num_shared(recorded, now)
    what = f"the same messages have other tokens from token {at} on: tokenizer or chat template differ"
    return EpisodeDifference(turn, "prompt_tokens", what, recorded[at : at + 8], now[at : at + 8], at)


def differing_outcome(
    transcript: Transcript, engine: RecordedAnswers, interactions: Sequence[Interaction], outcome: Outcome
) -> EpisodeDifference | None:
    """Return how rewards or the failure of an episode differ, whose calls are as recorded."""
    if outcome.failure != transcript.failure:
        was, now = (failure or "none" for failure in (transcript.failure, outcome.failure))
        what = f"the failure of the model is {now}, {was} in the record"
        return EpisodeDifference(None, "failure", what, transcript.failure, outcome.failure)
    order = [engine.calls[one.turn] for one in interactions]
    # A number is the reward of the last call, which is another one where requests that run at the
    # same time came in another order: then that of the last recorded call.
    calls = dict(zip(order if len(outcome.rewards) > 1 else sorted(order), interactions, strict=True))
    rewards = {turn: outcome.rewards.get(one.id) for turn, one in calls.items()}
    for call in transcript.calls:
        if rewards[call.turn] != call.reward:
            return EpisodeDifference(
                call.turn, "reward", "the reward is another one", call.reward, rewards[call.turn]
            )
    return None
