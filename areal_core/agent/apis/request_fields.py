"""Every field of a request, and what becomes of it: honoured, ignored with a warning, or refused.

A field that no table has is refused, so nothing is ignored silently. A table names nested fields
("tool_choice.type") where the parser reads an object field by field; the contents of other fields
(messages, metadata) belong to the field. `docs/agent_proxy.md` shows these tables.

Fields that change what is sampled are all honoured. Where the sampling differs from the run's
`gconfig`, tokens get the log-probs of the model itself (`Sampling.model_logprobs`), which are those
that the trainer computes: see `completion.sampling_of`.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from areal_core.agent.errors import BadRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rule:
    """What becomes of a field; `neutral` values request nothing, so they always pass."""

    use: str  # "honoured", "ignored" or "refused"
    why: str = ""
    neutral: tuple[Any, ...] = ()


Table = Mapping[str, Rule]


def honoured(*names: str, why: str = "") -> Table:
    return dict.fromkeys(names, Rule("honoured", why))


def ignored(why: str, *names: str, neutral: tuple[Any, ...] = ()) -> Table:
    """Return rows of fields without effect, for the given reason."""
    return dict.fromkeys(names, Rule("ignored", why, neutral))


def refused(why: str, *names: str, neutral: tuple[Any, ...] = ()) -> Table:
    """Return rows of fields that are refused, for the given reason."""
    return dict.fromkeys(names, Rule("refused", why, neutral))


HOSTED = "the proxy has no service behind it, only the model"
ONLY_FUNCTIONS = "only functions can be offered"
TEXT_ONLY = "only text is supported"
ONE_SEED = "one seed would make the samples of a prompt equal; the run has its own, `seed`"
GRAMMAR = "by a grammar of SGLang"
SCORED = "where it differs from `gconfig`, tokens get the log-probs of the model"

SAMPLING: Table = {
    **honoured(
        "temperature",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "min_p",
        "min_tokens",
        why=SCORED,
    ),
    **honoured("top_p", "top_k", why="log-probs are those before the cut, as in the trainer"),
    **honoured("ignore_eos"),
    **honoured("stop_token_ids", why="added to those of the run"),
    **honoured("json_schema", "regex", "ebnf", why=GRAMMAR),
    **honoured("guided_json", "guided_regex", "guided_choice", why=f"{GRAMMAR}; vLLM's names"),
    **honoured("chat_template_kwargs", why="variables of the chat template"),
    **ignored(ONE_SEED, "seed"),
    **refused("beams are not samples of the policy", "use_beam_search", neutral=(False,)),
    **refused("choose among n choices in the agent", "best_of", neutral=(1,)),
}
ACCOUNTING: Table = {
    **ignored(
        "no account, cache or content policy is involved",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
    ),
    **refused(HOSTED, "moderation"),
}
STREAM: Table = honoured("stream", why="all events are sent after sampling has ended")
UNPADDED = "events are not padded"
STREAM_OPTIONS: Table = {
    **honoured("stream_options", "stream_options.include_usage"),
    **ignored(UNPADDED, "stream_options.include_obfuscation", neutral=(False,)),
}
EFFORT = "the chat template's variable `reasoning_effort`"
VERBOSITY = "request it in the prompt"
STRICT = "arguments of a forced call follow the schema in any case; those of a free call are not constrained"
PARALLEL = "false limits a forced call to one; several free calls are possible"
TOP_LOGPROBS = "only the log-prob of the sampled token is kept"

CHAT: Table = {
    **SAMPLING,
    **ACCOUNTING,
    **STREAM,
    **STREAM_OPTIONS,
    **honoured("model", why="any name; echoed"),
    **honoured("messages", why="text, images and tool calls; other content is refused"),
    **honoured("logprobs", "stop"),
    **honoured("n", why="at most 128; n interactions; each choice has the id of its own, `interaction_id`"),
    **honoured("max_tokens", "max_completion_tokens", why="at most `gconfig.max_new_tokens`"),
    **honoured("tools", "tools.function", why="given to the chat template"),
    **honoured("tools.function.name", "tools.function.description", "tools.function.parameters"),
    **ignored(STRICT, "tools.function.strict", neutral=(False,)),
    **refused(ONLY_FUNCTIONS, "tools.type", neutral=("function",)),
    **honoured("tool_choice", "tool_choice.type", "tool_choice.function", why=GRAMMAR),
    **honoured("parallel_tool_calls", why=PARALLEL),
    **honoured("response_format", "response_format.type", "response_format.json_schema", why=GRAMMAR),
    **honoured("reasoning_effort", why=EFFORT),
    **ignored(TOP_LOGPROBS, "top_logprobs"),
    **ignored(VERBOSITY, "verbosity"),
    **ignored("output is sampled, not verified against a guess", "prediction"),
    **refused("use tools and tool_choice", "functions", "function_call"),
    **refused("offer other tools, or none", "tool_choice.allowed_tools"),
    **refused(ONLY_FUNCTIONS, "tools.custom", "tool_choice.custom"),
    **refused(TEXT_ONLY, "audio"),
    **refused(TEXT_ONLY, "modalities", neutral=(["text"],)),
    **refused(HOSTED, "web_search_options"),
}
COMPLETIONS: Table = {
    **SAMPLING,
    **ignored(ACCOUNTING["user"].why, "user"),
    **STREAM,
    **STREAM_OPTIONS,
    **honoured("model", why="any name; echoed"),
    **honoured("prompt", why="one text or list of token ids, not rendered by the chat template"),
    **honoured("stop", "echo", "n"),
    **honoured("logprobs", why=TOP_LOGPROBS),
    **honoured("max_tokens", why="at most `gconfig.max_new_tokens`"),
    **refused("the model continues text, it does not fill gaps", "suffix"),
}
RESPONSES: Table = {
    **SAMPLING,
    **ACCOUNTING,
    **STREAM,
    **ignored(UNPADDED, "stream_options"),
    **honoured("model", why="any name; echoed"),
    **honoured("input", why="text, images, function calls, their outputs and reasoning; no other items"),
    **honoured("instructions"),
    **honoured("previous_response_id", why="of the same session"),
    **honoured("max_output_tokens", why="at most `gconfig.max_new_tokens`"),
    **honoured("tools", "tools.name", "tools.description", "tools.parameters"),
    **refused(ONLY_FUNCTIONS, "tools.type", neutral=("function",)),
    **honoured("tool_choice", "tool_choice.type", "tool_choice.name", why=GRAMMAR),
    **honoured("parallel_tool_calls", why=PARALLEL),
    **honoured("text", "text.format", why=GRAMMAR),
    **honoured("reasoning"),
    **honoured("reasoning.effort", why=EFFORT),
    **ignored(STRICT, "tools.strict", neutral=(False,)),
    **ignored("the proxy gives all tools to the chat template", "tools.defer_loading", neutral=(False,)),
    **ignored("the agent calls its functions itself", "tools.async", "tools.allowed_callers"),
    **ignored("outputs are not checked", "tools.output_schema"),
    **ignored(VERBOSITY, "text.verbosity"),
    **ignored("reasoning is returned as sampled", "reasoning.summary", "reasoning.generate_summary"),
    **ignored("the chat template decides", "reasoning.context", "reasoning.mode"),
    **ignored("output has text, calls and reasoning only", "include"),
    **ignored(TOP_LOGPROBS, "top_logprobs", neutral=(0,)),
    **ignored("only built-in tools count, and there are none", "max_tool_calls"),
    **ignored("a prompt that is too long is refused, never cut", "truncation", neutral=("disabled",)),
    **refused("offer other tools, or none", "tool_choice.tools", "tool_choice.mode"),
    **refused(HOSTED, "tool_choice.server_label", "conversation", "prompt", "context_management"),
    **refused(HOSTED, "background", "background_options", "access_programs", neutral=(False,)),
    **refused(TEXT_ONLY, "image"),
}
MESSAGES: Table = {
    **SAMPLING,
    **STREAM,
    **honoured("model", why="any name; echoed"),
    **honoured("messages", why="text, images, thinking, tool uses and results; no other content"),
    **honoured("system", "stop_sequences"),
    **honoured("max_tokens", why="at most `gconfig.max_new_tokens`"),
    **honoured("tools", "tools.name", "tools.description", "tools.input_schema"),
    **honoured("tool_choice", "tool_choice.type", "tool_choice.name", why=GRAMMAR),
    **honoured("tool_choice.disable_parallel_tool_use", why="true limits a forced call to one"),
    **honoured("output_config"),
    **honoured("output_config.format", why=GRAMMAR),
    **honoured("output_config.effort", why=EFFORT),
    **honoured("thinking"),
    **honoured("thinking.type", why="the chat template's variable `enable_thinking`"),
    **ignored("`max_tokens` bounds reasoning and answer together", "thinking.budget_tokens"),
    **ignored("reasoning is returned as sampled", "thinking.display"),
    **ignored(STRICT, "tools.strict", neutral=(False,)),
    **ignored("the proxy gives all tools to the chat template", "tools.defer_loading", neutral=(False,)),
    **ignored("the agent calls its functions itself", "tools.allowed_callers"),
    **ignored("describe them in the description", "tools.input_examples"),
    **ignored("all events are sent after sampling", "tools.eager_input_streaming"),
    **ignored(
        ACCOUNTING["user"].why,
        "metadata",
        "service_tier",
        "cache_control",
        "tools.cache_control",
        "inference_geo",
        "speed",
        "user_profile_id",
        "workspace_id",
    ),
    **ignored("no earlier message is compared", "diagnostics"),
    **refused(ONLY_FUNCTIONS, "tools.type", neutral=("custom", "function")),
    **refused(HOSTED, "container", "mcp_servers", "context_management"),
}
TABLES: Mapping[str, Table] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}
NOTHING: tuple[Any, ...] = (None, "", [], {})


def check_fields(fields: Mapping[str, Any], table: Table, path: str = "") -> None:
    """Warn once of each field that is ignored. Raises BadRequest for a refused or unknown one."""
    for name, value in fields.items():
        full = f"{path}{name}"
        rule = table.get(full)
        if value in NOTHING or (rule is not None and value in rule.neutral):
            continue
        if rule is None:
            raise BadRequest(f"{full} is {str(value)[:80]!r}, and the proxy has no such field: leave it out")
        if rule.use == "refused":
            raise BadRequest(f"{full} is {str(value)[:80]!r}, which is not available: {rule.why}")
        if rule.use == "ignored":
            warn_once(f"a request has {full}, which is ignored: {rule.why}")
        elif any(other.startswith(f"{full}.") for other in table):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, dict):
                    check_fields(item, table, f"{full}.")


@cache
def warn_once(message: str) -> None:
    """Log a warning the first time, since it recurs with every call."""
    logger.warning("%s", message)
