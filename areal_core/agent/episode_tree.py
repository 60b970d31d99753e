"""The calls of one episode as a tree: which call each one continues, and if not exactly, why.

    turn 0 ── turn 1 ── turn 3    continued: the prompt begins with the exact tokens before it
         └─── turn 2              fork: a second continuation of turn 0
    turn 4                        sub_agent: a conversation of its own while turn 3 waits for a tool
    turn 5                        compacted, reasoning, ...: it continues turn 3, and its prompt does
                                  not begin with the tokens of turn 3: a broken prefix

Tokens decide whether a call continues another one; its messages decide why it does not. A row of
`export_style: concat` is a path of exact continuations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from areal_core.agent.chat_template import find_parent
from areal_core.agent.conversation import Interaction, Message
from areal_core.data.rows import num_shared

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Turn:
    """One answered call of an episode; other calls are named by their positions.

    Attributes:
        prefix: the longest earlier call whose exact tokens begin the prompt; None without one.
        parent: the call that this one continues, which is `prefix` unless the prefix is broken, or
            the one that waits for it (`sub_agent`); None without one.
        branch: how it continues `parent`, one of `BRANCHES`.
    """

    interaction: Interaction
    prefix: int | None = None
    parent: int | None = None
    branch: str = "root"


@dataclass(frozen=True)
class Path:
    """The positions of the calls of one row; the first `num_shared` are trained in another row."""

    turns: tuple[int, ...]
    num_shared: int = 0

    @property
    def first_own(self) -> int:
        return self.turns[self.num_shared]


def episode_tree(interactions: Sequence[Interaction], decode: Decode) -> list[Turn]:
    """Return the calls with their place in the tree.

    Args:
        interactions: the answered calls, in the order of their requests.
        decode: token ids to text, to find the message that a template renders differently.
    """
    tree: list[Turn] = []
    for interaction in interactions:
        prefix = exact_prefix(interaction, interactions[: len(tree)])
        tree.append(Turn(interaction, prefix, *relation(interaction, prefix, tree, decode)))
    return tree


def without_retry_orphans(interactions: Sequence[Interaction]) -> list[Interaction]:
    """Leave out answers to a request that the client sent again, and took the other answer.

    Of calls with the same messages, those stay that a later call continues; without one, the last.
    Completions of one call (`n`) are not repeats of each other.
    """
    continued = [find_parent(one.call, interactions[:i]) for i, one in enumerate(interactions)]
    taken = {parent.id for parent in continued if parent is not None}
    numbers = {one.id: number for number, one in enumerate(interactions)}

    def is_orphan(one: Interaction) -> bool:
        same = [x for x in interactions if x.call is not one.call and x.call.messages == one.call.messages]
        if one.id in taken or not same:
            return False
        return any(x.id in taken for x in same) or any(numbers[x.id] > numbers[one.id] for x in same)

    return [one for one in interactions if not is_orphan(one)]


def paths(tree: Sequence[Turn]) -> list[Path]:
    """Return the rows of `concat`, in the order of their first own call.

    A row begins with a call that does not simply continue another one and holds its continuations.
    The calls before a fork belong to the row that continued them first, which does not depend on
    rewards or on the time of an answer; the row of the fork repeats their tokens as its prompt.
    """
    following = {turn.prefix: i for i, turn in enumerate(tree) if turn.branch == "continued"}
    found = []
    for start in (i for i, turn in enumerate(tree) if turn.branch != "continued"):
        shared: list[int] = []
        before = tree[start].prefix
        while before is not None:
            shared.insert(0, before)
            before = tree[before].prefix
        own = [start]
        while own[-1] in following:
            own.append(following[own[-1]])
        found.append(Path((*shared, *own), len(shared)))
    return found


def exact_prefix(interaction: Interaction, earlier: Sequence[Interaction]) -> int | None:
    """Return the position of the longest earlier call whose tokens begin the prompt.

    Its pictures must be the same, too: those of one size have the same tokens.
    """
    prompt, images = interaction.response.input_tokens, interaction.call.images

    def begins(one: Interaction) -> bool:
        same_images = images[: len(one.call.images)] == one.call.images
        return same_images and prompt[: one.num_tokens] == one.tokens

    by_length = sorted(range(len(earlier)), key=lambda i: -earlier[i].num_tokens)
    fitting = (i for i in by_length if earlier[i].num_tokens <= len(prompt))
    return next((i for i in fitting if begins(earlier[i])), None)


def relation(
    interaction: Interaction, prefix: int | None, tree: Sequence[Turn], decode: Decode
) -> tuple[int | None, str]:
    """Return the parent of a call and how it continues it; `tree` has the calls before it."""
    if not tree:
        return None, "root"
    earlier, call = [turn.interaction for turn in tree], interaction.call
    by_messages = find_parent(call, earlier)
    known = 0 if by_messages is None else len(by_messages.call.messages)
    latest_first = range(len(tree) - 1, -1, -1)
    if by_messages is not None and not begins_with(interaction, by_messages):
        parent = earlier.index(by_messages)
        if call.tools != by_messages.call.tools:
            return parent, "tools_changed"
        return parent, rendered_differently(interaction, tree, parent, decode)
    for i in latest_first:
        if len(earlier[i].call.messages) > known and is_answer_edited(call.messages, earlier[i]):
            return i, "edited"
    if prefix is not None:
        taken = any(turn.prefix == prefix and turn.branch == "continued" for turn in tree)
        return prefix, "fork" if taken else "continued"
    if any(call.messages == before.call.messages for before in earlier):
        return None, "fork"  # the same prompt, sampled again
    for change in (changed_by_client, compacted):
        for i in latest_first:
            if (branch := change(call.messages, earlier[i])) is not None:
                return i, branch
    continued = {turn.prefix for turn in tree}
    waiting = (i for i in latest_first if earlier[i].message.tool_calls and i not in continued)
    caller = next(waiting, None)
    return caller, "separate" if caller is None else "sub_agent"


def begins_with(interaction: Interaction, earlier: Interaction) -> bool:
    """Whether a prompt begins with the exact tokens of an earlier call."""
    return interaction.response.input_tokens[: earlier.num_tokens] == earlier.tokens


def rendered_differently(interaction: Interaction, tree: Sequence[Turn], parent: int, decode: Decode) -> str:
    """Return what the template renders differently in the first sampled turn that differs."""
    ours, theirs = tree[parent].interaction.tokens, interaction.response.input_tokens
    at = num_shared(ours, theirs)
    changed = parent
    while (before := tree[changed].prefix) is not None and tree[before].interaction.num_tokens > at:
        changed = before
    message, response = tree[changed].interaction.message, tree[changed].interaction.response
    kept = decode(response.output_tokens[: max(at - len(response.input_tokens), 0)])
    if message.reasoning and message.reasoning.strip() not in kept:
        return "reasoning"
    return "tool_call" if message.tool_calls else "text"


def split_system(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    system = [message for message in messages if message.role in ("system", "developer")]
    return system, [message for message in messages if message not in system]


def is_answer_edited(messages: Sequence[Message], earlier: Interaction) -> bool:
    known = len(earlier.call.messages)
    rest = messages[known:]
    return tuple(messages[:known]) == earlier.call.messages and len(rest) > 1 and rest[0].role == "assistant"


def changed_by_client(messages: Sequence[Message], earlier: Interaction) -> str | None:
    """Return what was changed in a conversation that continues an earlier one; None of another.

    It continues that one if it has its answer, or its first message and more, in the same roles.
    """
    (system, rest), (before, known) = split_system(messages), split_system(earlier.conversation)
    has_start, roles = rest[:1] == known[:1], [message.role for message in known]
    is_longer = has_start and [message.role for message in rest[: len(known)]] == roles
    if not is_longer and earlier.message not in rest:
        return None
    if system != before:
        return "system_rewritten"
    return "edited" if has_start else "compacted"


def compacted(messages: Sequence[Message], earlier: Interaction) -> str | None:
    """Return "compacted" where the system prompt is the same, or another message without one."""
    (system, rest), (before, known) = split_system(messages), split_system(earlier.conversation)
    is_shared = bool(system) or any(message in known for message in rest)
    return "compacted" if system == before and is_shared else None
