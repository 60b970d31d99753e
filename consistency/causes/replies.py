"""Replies that contradict themselves or their requests, before any logprob is compared.

A reply says several things twice: ids beside logprobs, counts of both, the text of the ids, the
number of prompt tokens, the request's id. Where two of them differ, one is wrong, whatever the
logprobs look like. A field that the engine does not report is unknown, and contradicts nothing.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence

from consistency.case import Finding
from consistency.engine.reply import Reply, SamplingParams

Decode = Callable[[list[int]], str]
SAME_VALUE = 0.05  # nats between two reports of one logprob; rounding of transport is far less
NOT_LETTERS = re.compile(r"[\s\ufffd]+")


def find_contradictions(
    prompts: Sequence[Sequence[int]],
    replies: Sequence[Reply],
    params: SamplingParams,
    decode: Decode,
    with_images: frozenset[int] = frozenset(),
) -> tuple[Finding, ...]:
    """Compare every redundant fact of the replies; `replies[i]` answers `prompts[i]`.

    `with_images` are the prompts with images.
    """
    exchanged = exchanged_requests(replies)
    found = [
        exchanged,
        None if exchanged is not None else other_prompt_counted(prompts, replies, with_images),
        counts_differ(replies),
        final_token_missing(prompts, replies, params),
        too_many_tokens(replies, params),
        other_ids(replies, decode),
        other_text(replies, decode),
        other_logprobs(replies),
    ]
    return tuple(finding for finding in found if finding is not None)


def exchanged_requests(replies: Sequence[Reply]) -> Finding | None:
    sent = {reply.sent_id for reply in replies if reply.sent_id is not None}
    wrong = [i for i, r in enumerate(replies) if r.returned_id in sent and r.returned_id != r.sent_id]
    if not wrong:
        return None
    return Finding(
        "R12",
        "replies exchanged between requests",
        0.99,
        f"{listed(wrong, replies)} the id of another request",
        "the id of each reply must be that of its request",
        "pair replies with requests by their id, not by the order in which they arrive",
    )


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
    counted = Counter(reply.num_prompt for reply in replies)
    exchanged = counted == Counter(map(len, prompts)) and len(set(deltas.values())) > 1
    text = f"{listed(list(deltas), replies)} a prompt of {sorted(set(deltas.values()))[:5]} tokens more than were sent"
    if exchanged:
        return Finding(
            "R12",
            "replies exchanged between requests",
            0.95,
            f"{text}; the counts are those of the prompts in another order",
            "the number of prompt tokens of each reply must be that of its request",
            "pair replies with requests by their id, not by the order in which they arrive",
        )
    if set(deltas) <= with_images:
        return Finding(
            "R63",
            "placeholders of images expanded differently",
            0.84,  # as below: a probe may find which processor made them
            f"{text}; all of them have images",
            "prompt_tokens of each reply must equal the number of ids with all placeholders",
            "one processor on both sides: the same size limits, patch size and merge size in preprocessor_config.json",
        )
    return Finding(
        "R16",
        "the engine counted another prompt than it was sent",
        0.84,  # below `SETTLED_CONFIDENCE`: a probe may find which tokens differ
        text,
        "prompt_tokens of each reply must equal the number of ids that were sent",
        "send input_ids; check BOS, system prompt and truncation on the way to the engine",
    )


def counts_differ(replies: Sequence[Reply]) -> Finding | None:
    """R17: the numbers of tokens, ids, logprobs and top tokens of a reply differ."""

    def counts(reply: Reply) -> set[int]:
        ids = None if reply.ids is None else len(reply.ids)
        tops = None if reply.tops is None else len(reply.tops)
        known = (reply.num_output, ids, tops, len(reply.logprobs), len(reply.output_ids))
        return {count for count in known if count is not None}

    wrong = [i for i, reply in enumerate(replies) if len(counts(reply)) > 1]
    if not wrong:
        return None
    one = replies[wrong[0]]
    ids = "unknown" if one.ids is None else len(one.ids)
    return Finding(
        "R17",
        "a token without its logprob, or a logprob without its token",
        0.97,
        f"{listed(wrong, replies)} lists of different lengths; the first: completion_tokens {one.num_output}, ids {ids}, "
        f"logprobs {len(one.logprobs)}, ids of logprobs {len(one.output_ids)}",
        "completion_tokens, ids and logprobs of a reply must be equally many",
        "SGLang: no_stop_trim true, and ids and logprobs from output_token_logprobs; keep the token that stops",
    )


def final_token_missing(
    prompts: Sequence[Sequence[int]], replies: Sequence[Reply], params: SamplingParams
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
    return Finding(
        "R17",
        "the last token of replies is missing",
        0.95 if stopped or len(early) > 1 else 0.7,  # one may have met the end of the context
        f"{listed(wrong, replies)} no final token: {len(stopped)} stopped at a token that is not their last, "
        f"{len(early)} at a length below max_new_tokens {params.max_new_tokens}",
        "the last id of a reply that stopped must be the token that stopped it",
        "keep the stop token with its logprob (SGLang no_stop_trim true); do not cut lists on the way",
    )


def too_many_tokens(replies: Sequence[Reply], params: SamplingParams) -> Finding | None:
    """R61: more tokens than were requested."""
    wrong = [i for i, reply in enumerate(replies) if len(reply.output_ids) > params.max_new_tokens]
    if not wrong:
        return None
    longest = max(len(replies[i].output_ids) for i in wrong)
    return Finding(
        "R61",
        "more tokens than were requested",
        0.97,
        f"{listed(wrong, replies)} up to {longest} tokens, max_new_tokens is {params.max_new_tokens}",
        "no reply may be longer than max_new_tokens",
        "look for code that changes sampling options between client and engine",
    )


def other_ids(replies: Sequence[Reply], decode: Decode) -> Finding | None:
    """R11, R12, R13: the list of ids differs from the ids that the logprobs carry."""
    wrong = [
        i
        for i, reply in enumerate(replies)
        if reply.ids is not None and len(reply.ids) == len(reply.output_ids) and reply.ids != reply.output_ids
    ]
    if not wrong:
        return None
    owners = Counter(reply.output_ids for reply in replies)
    cause, name = "R13", "ids differ from those that the logprobs carry (re-tokenised)"
    if sum(owners[replies[i].ids or ()] > 0 for i in wrong) > len(wrong) / 2:
        cause, name = "R12", "ids exchanged between replies"
    elif sum(is_shifted(replies[i].ids or (), replies[i].output_ids) for i in wrong) > len(wrong) / 2:
        cause, name = "R11", "ids shifted against their logprobs"
    same = sum(decode(list(replies[i].ids or ())) == decode(list(replies[i].output_ids)) for i in wrong)
    return Finding(
        cause,
        name,
        0.95,
        f"{listed(wrong, replies)} output_ids that are not those of output_token_logprobs; {same} decode to the same text",
        "both lists of a reply must be equal",
        "keep the engine's ids (SGLang output_ids, vLLM return_token_ids); never encode decoded text",
    )


def is_shifted(one: Sequence[int], other: Sequence[int]) -> bool:
    return tuple(one[1:]) == tuple(other[:-1]) or tuple(one[:-1]) == tuple(other[1:])


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
    return Finding(
        "R12" if exchanged else "R13",
        "texts exchanged between replies" if exchanged else "the text of replies is not that of their ids",
        0.9 if exchanged else 0.7,
        f"{listed(wrong, replies)} a text that its ids do not decode to"
        + (", but those of another reply do" if exchanged else ""),
        "decoding the ids of a reply must give its text",
        "pair texts and ids by the id of the request"
        if exchanged
        else "train on the ids, never on encoded text; give the tokenizer that the engine uses",
    )


def letters(text: str) -> str:
    """Remove white space and replacement characters, in which detokenizers differ."""
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
    of_likeliest = likeliest > 0.9 * differing
    return Finding(
        "R09" if of_likeliest else "R61",
        "logprob of the most likely token" if of_likeliest else "two logprobs of the same token in one reply",
        0.9,
        f"{differing} of {compared} sampled tokens have another logprob in output_top_logprobs than in output_token_logprobs",
        "a token must have one logprob per place",
        "read the sampled token's row: SGLang output_token_logprobs, vLLM logprobs=0",
    )


def listed(wrong: Sequence[int], replies: Sequence[Reply]) -> str:
    """Count replies and name the first ones."""
    more = ", ..." if len(wrong) > 3 else ""
    verb = "reply has" if len(wrong) == 1 else "replies have"
    return f"{len(wrong)} of {len(replies)} {verb} (number {', '.join(map(str, wrong[:3]))}{more})"
