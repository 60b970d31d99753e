"""The codes of a batch's `branch`: how a call continues another one, and why not exactly."""

# Reasons for which a prompt does not begin with the tokens of the call that it continues.
BROKEN = {
    "reasoning": "the template leaves out reasoning that was sampled",
    "tool_call": "the template renders a sampled tool call differently",
    "text": "the template renders sampled text differently",
    "tools_changed": "the call offers other tools, which the template renders before the conversation",
    "system_rewritten": "the system prompt was rewritten",
    "compacted": "earlier messages were left out or summarised",
    "edited": "the client changed an earlier message",
}
RENDERED = ("reasoning", "tool_call", "text")  # chat_template_type "concat" never renders these again
# The values of a batch's `branch`: the index in this tuple.
BRANCHES = ("root", "continued", "fork", "sub_agent", "separate", *BROKEN)
