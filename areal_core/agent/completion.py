"""One call of the model: messages to tokens, tokens to the engine, sampled tokens to a message."""

import asyncio
import time
import uuid
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from areal_core.agent.apis.request_fields import warn_once
from areal_core.agent.chat_template import prompt_tokens
from areal_core.agent.conversation import Call, Interaction, Message
from areal_core.agent.errors import BadRequest
from areal_core.agent.grammar import server_parameters
from areal_core.agent.output_parsers import (
    dump,
    named_call,
    parse_tool_calls,
    shows_special_tokens,
    split_reasoning,
    with_ids,
)
from areal_core.agent.sessions import Session
from areal_core.data.processor import VisionProcessor
from areal_core.rollout.errors import PromptTooLong, RequestRefused, UnsupportedSampling
from areal_core.rollout.types import ModelRequest, ModelResponse, Sampling

# Options of which the reported logprobs depend; top_p and top_k cut after them.
LAW_OF_LOGPROBS = ("temperature", "frequency_penalty", "min_new_tokens")
LAW_WARNING = "the samples are not those of the policy itself (docs/agent_proxy.md)"
LAW = (*LAW_OF_LOGPROBS, "greedy", "top_p", "top_k")


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """Conversion of messages to tokens, and of tokens to a message.

    `tool_call_parser` is a name of `TOOL_FORMATS` or of SGLang, or "template" for the tokenizer's
    own `response_template`.
    """

    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    tool_call_parser: str = "qwen"
    reasoning_parser: str = "qwen3"
    chat_template_type: str = "hf"
    processor: VisionProcessor | None = None  # of a vision model
    remote_images: bool = False  # whether pictures of http(s) URLs are fetched

    def prompt_of(self, call: Call, session: Session) -> list[int]:
        """Return the tokens of a call's prompt. Raises BadRequest."""
        style = self.chat_template_type
        return prompt_tokens(self.tokenizer, call, session.in_order(), style, self.processor)


async def complete(session: Session, call: Call, dialogue: Dialogue, id_prefix: str) -> list[Interaction]:
    """Sample the `n` answers to a call and add them to the session.

    Raises:
        BadRequest: unsupported messages or sampling options.
    """
    prompt = dialogue.prompt_of(call, session)
    for name in call.template_kwargs:
        if name not in str(dialogue.tokenizer.chat_template):
            warn_once(f"a request sets {name}, which the model's chat template does not use")
    sampling = sampling_of(call, prompt, dialogue)
    turns = range(session.num_calls, session.num_calls + call.n)
    session.num_calls = turns.stop
    answers = [answer(session, call, dialogue, id_prefix, prompt, sampling, turn) for turn in turns]
    answered = await asyncio.gather(*answers, return_exceptions=True)
    for failure in answered:
        if isinstance(failure, BaseException):
            raise failure
    interactions = [one for one in answered if isinstance(one, Interaction)]
    session.interactions += interactions
    return interactions


async def answer(
    session: Session,
    call: Call,
    dialogue: Dialogue,
    id_prefix: str,
    prompt: list[int],
    sampling: Sampling,
    turn: int,
) -> Interaction:
    """Sample one answer. Raises BadRequest."""
    started = time.monotonic()
    request = ModelRequest(
        input_ids=prompt,
        sampling=sampling,
        metadata={"turn": turn},
        images=call.images,
        image_token_id=-1 if dialogue.processor is None else dialogue.processor.image_token_id,
    )
    try:
        response = await session.generate(request)
    except PromptTooLong as error:
        raise BadRequest(str(error), code="context_length_exceeded") from error
    except (UnsupportedSampling, RequestRefused) as error:
        raise BadRequest(str(error)) from error
    return Interaction(
        id=f"{id_prefix}{uuid.uuid4().hex}",
        turn=turn,
        call=call,
        response=response,
        message=read_message(response, call, dialogue),
        created=int(time.time()),
        latency_s=time.monotonic() - started,
    )


def sampling_of(call: Call, prompt: list[int], dialogue: Dialogue) -> Sampling:
    """Return the run's sampling with the client's changes, within the run's max_new_tokens.

    The trainer computes log-probs of softmax(logits / gconfig.temperature). A request with another
    temperature, with penalties or with a grammar is sampled as requested, and its tokens get the
    log-probs of softmax(logits): what the trainer computes if gconfig.temperature is 1. With
    another one the request is refused. The samples still come from another law than the policy's,
    which no importance weight corrects: hence the warning.

    Raises:
        BadRequest: the log-probs would not be those of the trainer.
    """
    ours = dialogue.sampling
    changes: dict[str, Any] = dict(call.sampling)
    if "max_new_tokens" in changes:
        changes["max_new_tokens"] = min(changes["max_new_tokens"], ours.max_new_tokens)
    if "stop_token_ids" in changes:
        changes["stop_token_ids"] = sorted({*ours.stop_token_ids, *changes["stop_token_ids"]})
    if "temperature" in changes:
        changes["greedy"] = changes["temperature"] == 0
        changes["temperature"] = changes["temperature"] or 1.0
    tail = dialogue.tokenizer.decode(prompt[-8:])
    opened = str(tail).rstrip().endswith("<think>")
    grammar = server_parameters(call, dialogue.tool_call_parser, dialogue.reasoning_parser, opened)
    server_only = {**changes.get("server_only", {}), **grammar}
    wanted = replace(ours, **changes | {"server_only": server_only})
    unlike = {name: getattr(wanted, name) for name in LAW if getattr(wanted, name) != getattr(ours, name)}
    for name, value in unlike.items():
        warn_once(
            f"the agent requests {name} {value}, and gconfig.{name} is {getattr(ours, name)}: {LAW_WARNING}"
        )
    for name in server_only:
        warn_once(f"the agent's request is sampled with {name}: {LAW_WARNING}")
    changed = [*server_only, *(name for name in unlike if name in LAW_OF_LOGPROBS)]
    if changed and ours.temperature != 1 and not ours.greedy:
        raise BadRequest(
            f"the request needs {', '.join(changed)}, and gconfig.temperature is {ours.temperature}: "
            "log-probs that the trainer can compute are then available at gconfig.temperature 1 only"
        )
    return replace(wanted, model_logprobs=bool(changed))


def read_message(response: ModelResponse, call: Call, dialogue: Dialogue) -> Message:
    """Return the sampled tokens as a message.

    The batch never uses it: it keeps the tokens themselves.
    """
    tokens = response.output_tokens
    ends = {*dialogue.sampling.stop_token_ids, *call.sampling.get("stop_token_ids", ())}
    if response.stop_reason == "stop" and tokens and tokens[-1] in ends:
        tokens = tokens[:-1]
    hide_special = dialogue.sampling.skip_special_tokens
    text: Any = dialogue.tokenizer.decode(tokens, skip_special_tokens=hide_special)
    if call.prompt is not None:
        return Message("assistant", text)
    if call.tools and dialogue.tool_call_parser == "template":
        return message_by_template(dialogue.tokenizer, response.input_tokens, tokens, call)
    parser = dialogue.tool_call_parser if call.tools else "none"
    if shows_special_tokens(parser):
        text = dialogue.tokenizer.decode(tokens)
    reasoning, content = split_reasoning(text, dialogue.reasoning_parser)
    content, tool_calls = parse_tool_calls(content, parser, call.tools)
    return Message("assistant", content, tool_calls, reasoning=reasoning)


def message_by_template(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], tokens: list[int], call: Call
) -> Message:
    """Parse tokens by the tokenizer's own `response_template`; what it cannot parse is content.

    Raises BadRequest if the tokenizer has none.
    """
    try:
        parsed = tokenizer.parse_response(tokens, prefix=prompt, tools=list(call.tools))
    except AttributeError as error:
        raise BadRequest(
            "the tokenizer has no response_template: set rollout.agent.tool_call_parser"
        ) from error
    except ValueError:
        text: Any = tokenizer.decode(tokens)
        return Message("assistant", text)
    found = [named_call(dump(item["function"])) for item in parsed.get("tool_calls") or ()]
    return Message(
        "assistant",
        parsed.get("content") or "",
        with_ids(call for call in found if call),
        reasoning=parsed.get("thinking") or parsed.get("reasoning_content"),
    )
