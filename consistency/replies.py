"""Replies that contradict themselves or their requests, before any logprob is compared.

A reply says several things twice: ids beside logprobs, counts of both, the text of the ids, the
number of prompt tokens, the request's id. Where two of them differ, one is wrong, whatever the
logprobs look like. A field that the engine does not report is unknown, and contradicts nothing.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence

from areal_core.rollout.types import Sampling
from consistency.causes import Finding, finding
from consistency.engines import Reply

Decode = Callable[[list[int]], str]
SAME_VALUE = 0.05  # nats between two reports of one logprob; rounding of transport is far less
# White space and replacement characters, in which detokenizers differ.
NOT_LETTERS = re.compile(r"[\s\ufffd]+")


def find_contradictions(
    prompts: Sequence[Sequence[int]],
    replies: Sequence[Reply],
    params: Sampling,
    decode: Decode,
    with_images: frozenset[int] = frozenset(),
) -> tuple[Finding, ...]:
    """Compare every redundant fact of the replies; `replies[i]` answers `prompts[i]`.

    `with_images` are the prompts with images.
    """
    exchanged = exchanged_requests(replies)
    found = [
        exchanged or other_prompt_counted(prompts, replies, with_images),
        counts_differ(replies),
        final_token_missing(prompts, replies, params),
        too_many_tokens(replies, params),
        other_ids(replies, decode),
        other_text(replies, decode),
        other_logprobs(replies),
    ]
    return tuple(one for one in found if one is not None)


def exchanged_requests(replies: Sequence[Reply]) -> Finding | None:
    sent = {reply.sent_id for reply in replies if reply.sent_id is not None}
    wrong = [i for i, r in enumerate(replies) if r.returned_id in sent and r.returned_id != r.sent_id]
    return finding("R12.requests", listed=listed(wrong, replies)) if wrong else None


def other_prompt_counted(
    prompts: Sequence[Sequence[int]], replies: Sequence[Reply], with_images: frozenset[int]
) -> Finding | None:
    """R12, R16, R63: the engine counted another number of prompt tokens than it was sent."""
    deltas = {
        i: reply.num_prompt - len(prompt)
        for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
        if reply.num_prompt not in (None, len(prompt))
    }
    if not deltas:
        return None
    in_another_order = Counter(reply.num_prompt for reply in replies) == Counter(map(len, prompts))
    exchanged = in_another_order and len(set(deltas.values())) > 1
    key = "R12.counts" if exchanged else "R63.counts" if set(deltas) <= with_images else "R16.counts"
    more = sorted(set(deltas.values()))[:5]
    return finding(
        key, counted=f"{listed(list(deltas), replies)} a prompt of {more} tokens more than were sent"
    )


def counts_differ(replies: Sequence[Reply]) -> Finding | None:
    """R17: the numbers of tokens, ids, logprobs and top tokens of a reply differ."""

    def counts(reply: Reply) -> set[int]:
        lists = (reply.ids, reply.tops, reply.logprobs, reply.output_ids)
        known = {len(one) for one in lists if one is not None}
        return known if reply.num_output is None else known | {reply.num_output}

    wrong = [i for i, reply in enumerate(replies) if len(counts(reply)) > 1]
    if not wrong:
        return None
    one = replies[wrong[0]]
    return finding(
        "R17.counts",
        listed=listed(wrong, replies),
        num_output=one.num_output,
        ids="unknown" if one.ids is None else len(one.ids),
        logprobs=len(one.logprobs),
        output_ids=len(one.output_ids),
    )


def final_token_missing(
    prompts: Sequence[Sequence[int]], replies: Sequence[Reply], params: Sampling
) -> Finding | None:
    stopped = [
        i
        for i, reply in enumerate(replies)
        if reply.finish == "stop" and reply.matched is not None and reply.matched not in reply.output_ids[-1:]
    ]
    early = [
        i
        for i, reply in enumerate(replies)
        if reply.finish == "length"
        and max(len(reply.logprobs), len(reply.output_ids)) < params.max_new_tokens
    ]
    # The end of the context stops rows at one total length, which no other row exceeds.
    totals = [len(prompt) + len(reply.logprobs) for prompt, reply in zip(prompts, replies, strict=True)]
    if len(early) > 1 and {totals[i] for i in early} == {max(totals)}:
        early = []
    wrong = sorted({*stopped, *early})
    if not wrong:
        return None
    return finding(
        "R17.final",
        None if stopped or len(early) > 1 else 0.7,  # one may have met the end of the context
        listed=listed(wrong, replies),
        stopped=len(stopped),
        early=len(early),
        limit=params.max_new_tokens,
    )


def too_many_tokens(replies: Sequence[Reply], params: Sampling) -> Finding | None:
    limit = params.max_new_tokens
    wrong = [i for i, reply in enumerate(replies) if len(reply.output_ids) > limit]
    if not wrong:
        return None
    longest = max(len(replies[i].output_ids) for i in wrong)
    return finding("R61", listed=listed(wrong, replies), longest=longest, limit=limit)


def other_ids(replies: Sequence[Reply], decode: Decode) -> Finding | None:
    """R11, R12, R13: the list of ids differs from the ids that the logprobs carry."""
    pairs = {
        i: (reply.ids, reply.output_ids)
        for i, reply in enumerate(replies)
        if reply.ids is not None and len(reply.ids) == len(reply.output_ids) and reply.ids != reply.output_ids
    }
    if not pairs:
        return None
    owners = {reply.output_ids for reply in replies}
    exchanged = sum(ids in owners for ids, _ in pairs.values()) > len(pairs) / 2
    shifted = sum(a[1:] == b[:-1] or a[:-1] == b[1:] for a, b in pairs.values()) > len(pairs) / 2
    same = sum(decode(list(ids)) == decode(list(output)) for ids, output in pairs.values())
    key = "R12.ids" if exchanged else "R11.ids" if shifted else "R13.ids"
    return finding(key, listed=listed(list(pairs), replies), same=same)


def other_text(replies: Sequence[Reply], decode: Decode) -> Finding | None:
    """R12, R13: the text is not that of the ids."""
    texts = [letters(decode(list(reply.output_ids))) for reply in replies]
    cut = [letters(decode(list(reply.output_ids[:-1]))) for reply in replies]  # without the stop token
    wrong = [
        i
        for i, reply in enumerate(replies)
        if reply.text is not None and letters(reply.text) not in (texts[i], cut[i])
    ]
    if not wrong:
        return None
    others = {*texts, *cut}
    exchanged = sum(letters(replies[i].text or "") in others for i in wrong) > len(wrong) / 2
    return finding("R12.texts" if exchanged else "R13.texts", listed=listed(wrong, replies))


def letters(text: str) -> str:
    return NOT_LETTERS.sub("", text)


def other_logprobs(replies: Sequence[Reply]) -> Finding | None:
    """R09, R61: a token's logprob differs from its own among the most likely tokens."""
    differing = likeliest = compared = 0
    for reply in replies:
        for token, value, top in zip(reply.output_ids, reply.logprobs, reply.tops or (), strict=False):
            reported = dict(top)
            if token not in reported or value != value:
                continue
            compared += 1
            if abs(reported[token] - value) > SAME_VALUE:
                differing += 1
                likeliest += abs(max(reported.values()) - value) <= SAME_VALUE
    if differing <= 0.01 * compared:
        return None
    key = "R09.tops" if likeliest > 0.9 * differing else "R61.tops"
    return finding(key, differing=differing, compared=compared)


def listed(wrong: Sequence[int], replies: Sequence[Reply]) -> str:
    """Count replies and name the first ones."""
    more = ", ..." if len(wrong) > 3 else ""
    verb = "reply has" if len(wrong) == 1 else "replies have"
    return f"{len(wrong)} of {len(replies)} {verb} (number {', '.join(map(str, wrong[:3]))}{more})"
