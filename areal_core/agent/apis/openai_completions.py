"""OpenAI's completions API: a text or token ids are continued without a chat template."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from areal_core.agent.apis.json_fields import (
    required_output,
    sampling_fields,
    shown,
    sse,
    take,
    template_options,
)
from areal_core.agent.apis.openai_chat import count_of_choices, envelope, finish_reason, usage
from areal_core.agent.apis.request_fields import COMPLETIONS, check_fields
from areal_core.agent.conversation import Call, Interaction, Message
from areal_core.agent.errors import BadRequest

ID_PREFIX = "cmpl-"


def parse_call(body: dict[str, Any], earlier: Sequence[Interaction]) -> Call:
    """Parse a request of the completions API. Raises BadRequest."""
    check_fields(body, COMPLETIONS)
    prompt = prompt_of(body.get("prompt"))
    return Call(
        messages=(Message("user", prompt if isinstance(prompt, str) else ""),),
        prompt=prompt,
        n=count_of_choices(body),
        required=required_output(body),
        sampling=sampling_fields(body, "max_tokens"),
        template_kwargs=template_options(body),
        model=take(body, "model", str, ""),
        stream=take(body, "stream", bool, False),
        stream_usage=take(take(body, "stream_options", dict, {}), "include_usage", bool, False),
        logprobs=take(body, "logprobs", int, None) is not None,
        echo=take(body, "echo", bool, False),
    )


def prompt_of(prompt: Any) -> str | tuple[int, ...]:
    """Return the prompt, a text or token ids, also if it is the only one of a list.

    Raises BadRequest.
    """
    match prompt:
        case str() if prompt:
            return prompt
        case [str() | list() as only]:
            return prompt_of(only)
        case [int(), *_] if all(type(token) is int and token >= 0 for token in prompt):
            return tuple(prompt)
    raise BadRequest(f"prompt is {shown(prompt)}; expected one text or one list of token ids")


def render_reply(interactions: Sequence[Interaction], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return a `text_completion` object, with a choice per interaction."""
    choices = [choice_json(index, one, tokenizer) for index, one in enumerate(interactions)]
    return envelope(interactions[0], "text_completion") | {"choices": choices, "usage": usage(interactions)}


def choice_json(index: int, interaction: Interaction, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    prompt: Any = tokenizer.decode(interaction.response.input_tokens) if interaction.call.echo else ""
    return {
        "index": index,
        "text": prompt + interaction.message.content,
        "finish_reason": finish_reason(interaction),
        "logprobs": logprobs_json(interaction, tokenizer, len(prompt)) if interaction.call.logprobs else None,
        "interaction_id": interaction.id,
    }


def logprobs_json(interaction: Interaction, tokenizer: PreTrainedTokenizerBase, start: int) -> dict[str, Any]:
    tokens: list[str] = [tokenizer.decode([token]) for token in interaction.response.output_tokens]  # type: ignore[misc]
    offsets = list(accumulate(map(len, tokens[:-1]), initial=start))
    logprobs = interaction.response.output_logprobs
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


def render_stream(interactions: Sequence[Interaction], tokenizer: PreTrainedTokenizerBase) -> Iterator[bytes]:
    """Yield one chunk per choice, all after sampling has ended."""
    reply = render_reply(interactions, tokenizer)
    common = {key: value for key, value in reply.items() if key not in ("choices", "usage")}
    for choice in reply["choices"]:
        yield sse(common | {"choices": [choice]})
    if interactions[0].call.stream_usage:
        yield sse(common | {"choices": [], "usage": reply["usage"]})
    yield sse("[DONE]")
