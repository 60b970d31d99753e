"""From messages to prompt tokens, by the tokenizer's own chat template.

`hf` renders the whole conversation for each call. A template may render an earlier turn otherwise than the model wrote it (it drops
reasoning, spells a tool call anew, and tokenises text in its own way), and then the prompt does not begin with the tokens that were
sampled. `concat` never renders a sampled turn: its prompt is the parent call's exact tokens and the template's continuation after them.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from areal_core.rollout.agent.conversation import Call, Interaction, Message
from areal_core.rollout.agent.errors import BadRequest

logger = logging.getLogger(__name__)
TURN_END = "<<the assistant's turn ends here>>"


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, call: Call, earlier: Sequence[Interaction], style: str
) -> list[int]:
    """Token ids of a call's prompt.

    Args:
        earlier: the session's answered calls; `concat` looks for the parent among them.
        style: "hf" or "concat". A call without a parent is rendered whole by both.

    Raises:
        BadRequest: the template refuses the messages.
    """
    parent = find_parent(call, earlier) if style == "concat" else None
    try:
        if parent is None:
            return render(tokenizer, call)
        added = call.messages[len(parent.call.messages) + 1 :]
        return parent.tokens + continuation_tokens(
            tokenizer, [m.for_template() for m in added], parent.tokens[-1], call.template_kwargs
        )
    except (TemplateError, TypeError) as error:
        raise BadRequest(f"the model's chat template refuses these messages: {error}") from error


def render(tokenizer: PreTrainedTokenizerBase, call: Call) -> list[int]:
    """The whole conversation. An assistant's message at its end is gone on with."""
    goes_on = call.messages[-1].role == "assistant"
    tokens: Any = tokenizer.apply_chat_template(
        [message.for_template() for message in call.messages],
        tools=list(call.tools) or None,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        return_dict=False,
        **call.template_kwargs,
    )
    return tokens


def continuation_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    last_token: int,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """What stands between a sampled turn, whose last token is `last_token`, and the next one: its end, `messages`, the next opening.

    The template is run on a stand-in turn, so no sampled token is ever decoded and tokenised again. The end of the turn is left out
    if the model has sampled it itself; a turn that was cut by its length gets it here, outside the loss.
    """
    stand_in = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN_END}]
    text: Any = tokenizer.apply_chat_template(
        [*stand_in, *map(dict, messages)],
        add_generation_prompt=True,
        tokenize=False,
        **(template_kwargs or {}),
    )
    tokens = tokenizer.encode(text.partition(TURN_END)[2], add_special_tokens=False)
    return tokens[1:] if tokens[:1] == [last_token] else tokens


def find_parent(call: Call, earlier: Sequence[Interaction]) -> Interaction | None:
    """The longest earlier conversation that this call continues with at least one message of others."""

    def is_continued(candidate: Interaction) -> bool:
        said: tuple[Message, ...] = (*candidate.call.messages, candidate.message)
        rest = call.messages[len(said) :]
        return call.messages[: len(said)] == said and bool(rest) and rest[-1].role != "assistant"

    continued = [candidate for candidate in earlier if is_continued(candidate)]
    return max(continued, key=lambda candidate: len(candidate.call.messages), default=None)
