"""One call of the model: messages to tokens, tokens to the engine, sampled tokens to a message."""

import logging
import time
import uuid
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from areal_core.agent.chat_template import prompt_tokens
from areal_core.agent.conversation import Call, Interaction, Message
from areal_core.agent.errors import BadRequest
from areal_core.agent.output_parsers import (
    TOOL_FORMATS,
    dump,
    named_call,
    parse_tool_calls,
    split_reasoning,
    with_ids,
)
from areal_core.agent.sessions import Session
from areal_core.rollout.errors import PromptTooLong, RequestRefused, UnsupportedSampling
from areal_core.rollout.types import ModelRequest, ModelResponse, Sampling

logger = logging.getLogger(__name__)
# Logprobs depend on these: a value other than the run's is reported, once each.
SAMPLING_LAW = ("greedy", "temperature", "top_p", "top_k", "frequency_penalty")


@dataclass(frozen=True, kw_only=True)
class Dialogue:
    """Conversion of messages to tokens, and of tokens to a message.

    `tool_call_parser` is a name of `TOOL_FORMATS`, or "template" for the tokenizer's own
    `response_template`.
    """

    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling
    tool_call_parser: str = "qwen"
    reasoning_parser: str = "qwen3"
    chat_template_type: str = "hf"


async def complete(session: Session, call: Call, dialogue: Dialogue, id_prefix: str) -> Interaction:
    """Sample the answer to a call and add it to the session.

    Raises:
        BadRequest: unsupported messages or sampling options.
    """
    started = time.monotonic()
    turn, session.num_calls = session.num_calls, session.num_calls + 1
    request = ModelRequest(
        input_ids=prompt_tokens(dialogue.tokenizer, call, session.in_order(), dialogue.chat_template_type),
        sampling=sampling_of(call, dialogue.sampling),
        metadata={"turn": turn},
    )
    try:
        response = await session.generate(request)
    except PromptTooLong as error:
        raise BadRequest(str(error), code="context_length_exceeded") from error
    except (UnsupportedSampling, RequestRefused) as error:
        raise BadRequest(str(error)) from error
    interaction = Interaction(
        id=f"{id_prefix}{uuid.uuid4().hex}",
        turn=turn,
        call=call,
        response=response,
        message=read_message(response, call, dialogue),
        created=int(time.time()),
        latency_s=time.monotonic() - started,
    )
    session.interactions.append(interaction)
    return interaction


def sampling_of(call: Call, ours: Sampling) -> Sampling:
    """Return the run's sampling with the client's changes, within the run's max_new_tokens."""
    changes: dict[str, Any] = dict(call.sampling)
    if "max_new_tokens" in changes:
        changes["max_new_tokens"] = min(changes["max_new_tokens"], ours.max_new_tokens)
    if changes.get("temperature") == 0:
        changes = changes | {"temperature": 1.0, "greedy": True}
    for name in SAMPLING_LAW:
        if name in changes and changes[name] != getattr(ours, name):
            warn_once(
                f"the agent requests {name} {changes[name]}, and gconfig.{name} is {getattr(ours, name)}"
            )
    return replace(ours, **changes)


@cache
def warn_once(difference: str) -> None:
    """Log a warning the first time that this difference occurs, since it recurs with every call."""
    logger.warning("%s: the trainer's logprobs follow gconfig; do not set it in the agent", difference)


def read_message(response: ModelResponse, call: Call, dialogue: Dialogue) -> Message:
    """Return the sampled tokens as a message.

    The batch never uses it: it keeps the tokens themselves.
    """
    tokens = response.output_tokens
    if response.stop_reason == "stop" and tokens and tokens[-1] in dialogue.sampling.stop_token_ids:
        tokens = tokens[:-1]
    if call.tools and dialogue.tool_call_parser == "template":
        return message_by_template(dialogue.tokenizer, response.input_tokens, tokens, call)
    parser = dialogue.tool_call_parser if call.tools else "none"
    hide_special = dialogue.sampling.skip_special_tokens and not TOOL_FORMATS[parser].special
    text: Any = dialogue.tokenizer.decode(tokens, skip_special_tokens=hide_special)
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
