"""Prompt tokens of messages, by the tokenizer's chat template.

`hf` renders the complete conversation for each call. A template may render an earlier turn
differently from what the model sampled (it drops reasoning, reformats a tool call, and tokenises
text in its own way); the prompt does not start with the sampled tokens then. `concat` never renders
a sampled turn: its prompt is the parent call's exact tokens and the template's continuation.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from areal_core.agent.conversation import Call, Interaction
from areal_core.agent.errors import BadRequest
from areal_core.data.processor import VisionProcessor
from areal_core.errors import ImageError

logger = logging.getLogger(__name__)
TURN_END = "<<the assistant's turn ends here>>"


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase,
    call: Call,
    earlier: Sequence[Interaction],
    style: str,
    processor: VisionProcessor | None = None,
) -> list[int]:
    """Return the token ids of a call's prompt.

    Args:
        earlier: the session's answered calls; `concat` looks for the parent among them.
        style: "hf" or "concat". Both render a call without a parent completely.
        processor: of pictures; None for a model of text.

    Raises:
        BadRequest: the template refuses the messages, or the model reads no pictures.
    """
    if call.images and processor is None:
        raise BadRequest(
            f"the request has {len(call.images)} images, and the model reads only text: train a vision model"
        )
    if call.prompt is not None:
        tokens = tokenizer.encode(call.prompt) if isinstance(call.prompt, str) else list(call.prompt)
        if processor is not None and processor.image_token_id in tokens:
            raise BadRequest("the prompt has image tokens, and no images: send messages with images")
        return tokens
    parent = find_parent(call, earlier) if style == "concat" else None
    try:
        if parent is None:
            return render(tokenizer, call, processor)
        added = call.messages[len(parent.call.messages) + 1 :]
        return parent.tokens + continuation_tokens(
            tokenizer,
            [m.for_template() for m in added],
            parent.tokens[-1],
            call.template_kwargs,
            processor,
            call.images[len(parent.call.images) :],
        )
    except ImageError as error:
        raise BadRequest(str(error)) from error
    except (TemplateError, TypeError) as error:
        raise BadRequest(f"the model's chat template refuses these messages: {error}") from error


def render(tokenizer: PreTrainedTokenizerBase, call: Call, processor: VisionProcessor | None) -> list[int]:
    """Render the complete conversation. A final message of the assistant is continued."""
    continues = call.messages[-1].role == "assistant"
    messages = [message.for_template() for message in call.messages]
    options: dict[str, Any] = {
        "tools": list(call.tools) or None,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        **call.template_kwargs,
    }
    if processor is not None:
        return processor.prompt(messages, call.images, **options).input_ids
    tokens: Any = tokenizer.apply_chat_template(messages, return_dict=False, **options)
    return tokens


def continuation_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    last_token: int,
    template_kwargs: Mapping[str, Any] | None = None,
    processor: VisionProcessor | None = None,
    images: Sequence[bytes] = (),
) -> list[int]:
    """Return the tokens from a sampled turn to the next one: its end, `messages`, the next opening.

    `images` are the pictures of `messages`.

    The template renders a placeholder turn, so no sampled token is ever decoded and tokenised
    again. The end of the turn is left out if the model has sampled it as `last_token`; a turn that
    was truncated by its length gets it here, outside of the loss mask.
    """
    placeholder = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN_END}]
    text: Any = tokenizer.apply_chat_template(
        [*placeholder, *map(dict, messages)],
        add_generation_prompt=True,
        tokenize=False,
        **(template_kwargs or {}),
    )
    added = text.partition(TURN_END)[2]
    if processor is None:
        tokens = tokenizer.encode(added, add_special_tokens=False)
    else:
        tokens = processor.tokenize(added, images).input_ids
    return tokens[1:] if tokens[:1] == [last_token] else tokens


def find_parent(call: Call, earlier: Sequence[Interaction]) -> Interaction | None:
    """Return the longest earlier conversation that `call` continues; None without one.

    The continuation has at least one message, and does not end with one of the assistant.
    """

    def is_continued(candidate: Interaction) -> bool:
        known = candidate.conversation
        rest = call.messages[len(known) :]
        return known + rest == call.messages and bool(rest) and rest[-1].role != "assistant"

    continued = [one for one in earlier if one.call.prompt is None and is_continued(one)]
    return max(continued, key=lambda candidate: len(candidate.call.messages), default=None)
